"""Section ``preset_runs``: the larger presets on synthetic data for a minute each, and pictures.

Each run must finish, its loss must fall, and its snapshot must show the GPU that its rank uses. The
pictures, taken while it trains, are ``PRESET.svg`` and ``PRESET-gpu.svg`` in the section's folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ltui.training.data.ffcv.ffcv_environment import has_ffcv
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from tests.gpu.hardware import pictures
from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.detached_run import (
    FAILURES,
    DetachedRun,
    Settings,
    gpu_of,
    has_reached,
    one_device,
    open_ltui,
    start_preset,
    why_ended,
)
from tests.gpu.hardware.instruments import GIB, free_device_bytes
from tests.gpu.hardware.synthetic_images import CLASSES, image_folder
from tests.system.conftest import Ltui

_START_S, _END_S = 100.0, 60.0
"""Seconds until a run trains, and from the end of its training to its own end, at the latest."""
_USUAL_OVERHEAD_S = 35.0
"""Seconds that a run usually takes beside its training."""
_LEAST_FALL = 0.9
"""Greatest share of its first value at which a loss counts as fallen."""
_FIRST_STEPS = 10
"""Steps whose mean is the first value, because easy classes are learnt in a few more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything."""

    width: int
    """Of the GPT, as ``layers`` and ``context``."""
    layers: int
    context: int
    batch_size: int
    """Images in a step."""
    side: int
    """Pixels of the photographs at the beginning; they grow by a quarter."""
    photographs: int
    icons: int
    """Images of 32x32 pixels."""
    workers: int


def size_for(conditions: Conditions) -> Size:
    """Return the size for the memory of the GPU, or a tiny one for a rehearsal."""
    if conditions.rehearsal:
        return Size(
            width=32,
            layers=2,
            context=64,
            batch_size=4,
            side=32,
            photographs=40,
            icons=40,
            workers=1,
        )
    large = free_device_bytes() > 30 * GIB
    return Size(
        width=1024 if large else 512,
        layers=12 if large else 6,
        context=1024 if large else 512,
        batch_size=256 if large else 32,
        side=160,
        photographs=10_000,
        icons=50_000,
        workers=len(os.sched_getaffinity(0)),
    )


def trials(data: Path, size: Size) -> dict[str, Settings]:
    """Return the settings of each preset: more epochs than there is time for, and the data."""

    def in_beton(folder: Path) -> dict[str, Any]:
        val = folder.with_name(f"{folder.name}-val")
        return {
            "model.init_args.classes": CLASSES,
            "data.init_args.folder": data / "beton",
            "data.init_args.sources": f"{{train: {folder}, val: {val}, test: {val}}}",
            "data.init_args.batch_size": size.batch_size,
        }

    return {
        "gpt-fsdp": {
            "trainer.max_epochs": 100,
            "model.init_args.width": size.width,
            "model.init_args.layers": size.layers,
            "model.init_args.context": size.context,
            "model.init_args.learning_rate": 0.0005,
        },
        "cifar10-ffcv-resnet18": {
            "trainer.max_epochs": 200,
            "model.init_args.learning_rate": 0.2,
            **in_beton(data / "icons"),
        },
        "image-folder-finetune": {
            "trainer.max_epochs": 100,
            "data.init_args.folder": data / "photographs",
            "data.init_args.batch_size": size.batch_size // 2,
            "data.init_args.size": size.side,
            "data.init_args.workers": size.workers,
        },
        "imagenet-ffcv-resnet50": {
            "trainer.max_epochs": 40,
            "model.init_args.learning_rate": 0.4,
            "data.init_args.resolution_from_epoch": f"{{0: {size.side}, 1: {size.side * 5 // 4}}}",
            "data.init_args.val_resolution": size.side * 3 // 2,
            **in_beton(data / "photographs"),
        },
    }


def draw_images(data: Path, size: Size) -> None:
    """Write the images of all presets; a fifth of the photographs differ."""
    copies = 5 if size.photographs > 1000 else 1
    image_folder(data / "photographs", size.photographs // copies, 380, copies=copies)
    image_folder(data / "icons", size.icons, 32)
    for name, side in (("photographs", 380), ("icons", 32)):
        image_folder(data / f"{name}-val", 20 + size.photographs // 50, side, first=100_000)


def checks(conditions: Conditions) -> Iterator[Check]:
    """Train every preset and yield what its run shows."""
    data, size = conditions.home / "synthetic", size_for(conditions)
    draw_images(data, size)
    ltui = open_ltui(conditions)
    ltui.environment["LTUI_COUNT_FLOPS"] = "1"
    every = trials(data, size)
    for number, (preset, settings) in enumerate(every.items()):
        train_s = training_time(conditions, runs=len(every) - number)
        if "ffcv" in preset and not has_ffcv():
            yield Check(preset, None, "FFCV is not installed here")
            continue
        try:
            yield from train(conditions, ltui, preset, settings, train_s)
        except FAILURES as error:
            yield holds(f"{preset}: finished", False, str(error)[-500:])


def training_time(conditions: Conditions, *, runs: int) -> float:
    """Return the seconds for which each of the remaining runs trains."""
    if conditions.rehearsal:
        return 20.0
    return max(20.0, min(60.0, conditions.seconds_left() / runs - _USUAL_OVERHEAD_S))


def train(
    conditions: Conditions, ltui: Ltui, preset: str, settings: Settings, train_s: float
) -> Iterator[Check]:
    """Yield the checks of one run, of which pictures are taken while it trains."""
    settings = {
        **one_device(conditions),
        "trainer.precision": "bf16-mixed",
        "trainer.max_time": f"{{seconds: {train_s:.0f}}}",
        **settings,
    }
    run = start_preset(ltui, preset, settings, preset)
    try:
        run.until(has_reached(4), _START_S)
        seen = run.watch(train_s / 3)[-1]
        yield from judge_training(preset, seen, on_gpu=not conditions.rehearsal)
        yield from take_pictures(conditions, run, preset)
        end = run.ended(train_s + _END_S)
    finally:
        run.kill()
    yield holds(f"{preset}: finished", end.state is RunState.FINISHED, why_ended(end))
    exported = ltui("export", preset, "--metric", "train/loss", "--format", "json").stdout
    values = [row["value"] for row in json.loads(exported)]
    yield from judge_loss(preset, values, falls=not conditions.rehearsal)


def take_pictures(conditions: Conditions, run: DetachedRun, preset: str) -> Iterator[Check]:
    """Write the pictures and check that they hold nothing of this machine."""
    screens = pictures.run_and_gpu(conditions.home, run.run_dir)
    for name, svg in zip((preset, f"{preset}-gpu"), screens, strict=True):
        (conditions.folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        private = pictures.private_words(svg, pictures.machine_names())
        yield holds(f"{name}.svg has no path, user, host or UUID", not private, private or None)


def judge_training(preset: str, snapshot: RunSnapshot, *, on_gpu: bool) -> Iterator[Check]:
    """Check the snapshot of a run that trains."""
    trains = snapshot.state in LIVE
    yield holds(f"{preset}: trains", trains, None if trains else why_ended(snapshot))
    yield Check(f"{preset}: samples/s", snapshot.throughput.samples_per_s)
    yield Check(f"{preset}: share of waiting for data", snapshot.throughput.data_wait_share)
    if not on_gpu:
        return
    gpu = gpu_of(snapshot)
    known = gpu is not None and None not in (gpu.utilisation_percent, gpu.memory_used_bytes)
    yield holds(f"{preset}: readings of the GPU of rank 0", known)
    if gpu is not None:
        yield Check(f"{preset}: GPU utilisation, %", gpu.utilisation_percent)
        yield Check(f"{preset}: SM activity", gpu.sm_activity)
        yield Check(f"{preset}: power, W", gpu.power_w)
    share = snapshot.model_flop_utilisation
    yield Check(
        f"{preset}: model FLOP utilisation",
        share,
        "0 to 1",
        None if share is None else 0 < share < 1,
    )


def judge_loss(preset: str, values: Sequence[float | None], *, falls: bool) -> Iterator[Check]:
    """Check that the loss of every step is finite.

    ``falls``: check that it falls, too, for which a rehearsal is too short.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    what = f"{preset}: steps with a finite loss"
    yield Check(what, len(finite), str(len(values)), 0 < len(finite) == len(values))
    part = max(1, len(finite) // 10)
    parts = finite[: min(part, _FIRST_STEPS)], finite[-part:]
    first, last = (fmean(some) if some else math.nan for some in parts)
    expected = f"the last less than {_LEAST_FALL:g} of the first"
    fell = last < _LEAST_FALL * first if falls else None
    yield Check(
        f"{preset}: mean loss of the first steps and of the last tenth",
        [first, last],
        expected,
        fell,
    )
