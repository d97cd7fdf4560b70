"""Section ``loaders``: FFCV beside torch's DataLoader on all cores, feeding ResNets in bfloat16.

ResNet-50 gets JPEGs of about 400x350 that cost as much to decode as photographs, ResNet-18 gets
images of CIFAR-10's size and number. ``ltui bench data`` measures the loaders alone and chooses the
number of workers. Then both feed the same preset in turn, each run with its own start. The first
seconds of a run do not count: the DataLoader has filled its queue while the GPU began. The share of
waiting is the rank's; its GPU may still have work of earlier steps. No figure is judged by a bound.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ltui.training.data.ffcv.ffcv_environment import has_ffcv
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.detached_run import (
    FAILURES,
    DetachedRun,
    Settings,
    has_reached,
    mean_of,
    one_device,
    open_ltui,
    start_preset,
    step_of,
    why_ended,
    words,
)
from tests.gpu.hardware.instruments import GIB, free_device_bytes
from tests.gpu.hardware.synthetic_images import CLASSES, bytes_per_pixel, image_folder
from tests.ltui_command import answer
from tests.system.conftest import Ltui

FFCV, DATALOADER = "FFCV", "DataLoader"
_KEYS = {FFCV: "ffcv", DATALOADER: "torch"}
"""Values of ``data.init_args.loader``."""
_NO_FFCV = "FFCV is not installed here; the DataLoader reads the folder of images"
_START_S, _RUN_S, _NETWORK_S = 120.0, 60.0, 180.0
"""Seconds until a run trains at the latest, of a usual run, and of a network with one round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much of everything: small in a rehearsal and on small GPUs and disks."""

    images: int
    """Different images."""
    copies: int
    """Samples by image. A long epoch has no restart of the loader while it is measured."""
    batch_size: int
    resolution: int
    warm_up_s: float
    measured_s: float
    """At least the 10 s over which ltui averages its figures."""
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network, its preset and its images."""

    name: str
    preset: str
    architecture: str
    side: int
    size: Size
    settings: Settings = field(default_factory=dict)


def networks(conditions: Conditions) -> list[Network]:
    """Return the networks in sizes that fit the memory and the disk; in a rehearsal only one."""
    if conditions.rehearsal:
        small = Size(
            images=40,
            copies=2,
            batch_size=4,
            resolution=32,
            warm_up_s=0.5,
            measured_s=3.0,
            rounds=1,
        )
        photographs = icons = small
    else:
        large_gpu = free_device_bytes() > 30 * GIB
        disk = shutil.disk_usage(conditions.home).free
        photographs = Size(
            images=2000,
            copies=20 if disk > 20 * GIB else 4,
            batch_size=128 if large_gpu else 32,
            resolution=224,
            warm_up_s=8.0,
            measured_s=11.0,
            rounds=2,
        )
        icons = Size(
            images=50_000,
            copies=1,
            batch_size=512 if large_gpu else 128,
            resolution=32,
            warm_up_s=8.0,
            measured_s=11.0,
            rounds=2,
        )
    both = [
        Network(
            name="ResNet-50",
            preset="imagenet-ffcv-resnet50",
            architecture="resnet18" if conditions.rehearsal else "resnet50",
            side=380,
            size=photographs,
            settings={"data.init_args.resolution_from_epoch": None},
        ),
        Network(
            name="ResNet-18",
            preset="cifar10-ffcv-resnet18",
            architecture="resnet18",
            side=32,
            size=icons,
        ),
    ]
    return both[:1] if conditions.rehearsal else both


def checks(conditions: Conditions) -> Iterator[Check]:
    """Yield the figures of both networks."""
    yield Check("cores", len(os.sched_getaffinity(0)))
    ltui = open_ltui(conditions)
    every = networks(conditions)
    for number, network in enumerate(every, 1):
        if number > 1 and conditions.seconds_left() < _NETWORK_S:
            yield Check(network.name, None, "too little time is left")
            continue
        reserve_s = _NETWORK_S * (len(every) - number)
        try:
            yield from compare(conditions, ltui, network, reserve_s)
        except FAILURES as error:
            yield holds(f"{network.name}: measured to the end", False, str(error)[-500:])


def compare(
    conditions: Conditions, ltui: Ltui, network: Network, reserve_s: float
) -> Iterator[Check]:
    """Yield the figures of one network: loaders alone, then in training.

    ``reserve_s``: seconds to leave for the networks after this one.
    """
    size = network.size
    folder = conditions.home / network.name
    image_folder(folder, size.images, network.side, copies=size.copies)
    if network.side > 100:
        yield Check(f"{network.name}: bytes a pixel of the JPEGs", bytes_per_pixel(folder), "0.6")
    if has_ffcv():
        images = "jpeg" if network.side > 100 else "raw"
        build = ("data", "build", str(folder), "-o", f"{folder}.beton", "--images", images)
        ltui(*build, "--python", sys.executable, timeout=150)
    else:
        yield Check(f"{network.name}, {FFCV}", None, _NO_FFCV)
    workers = yield from loaders_alone(conditions, ltui, network, folder)
    yield from in_training(conditions, ltui, network, folder, workers, reserve_s)
    shutil.rmtree(folder)
    Path(f"{folder}.beton").unlink(missing_ok=True)


def loaders_alone(
    conditions: Conditions, ltui: Ltui, network: Network, folder: Path
) -> Generator[Check, None, dict[str, int]]:
    """Yield what ``ltui bench data`` measures. Return the best number of workers by loader."""
    cores = len(os.sched_getaffinity(0))
    counts = [1] if conditions.rehearsal else sorted({max(1, cores // 2), cores})
    loader = FFCV if has_ffcv() else DATALOADER
    preset, settings = training(conditions, network, folder, loader, None)
    done = ltui(
        *("bench", "data", preset, "--json", "--python", sys.executable),
        *("--workers", ",".join(map(str, counts)), "--rounds", "1"),
        *("--seconds", "1" if conditions.rehearsal else "5", *words(settings)),
        check=None,
        timeout=150,
    )
    ok = done.returncode == 0
    yield holds(f"{network.name}: ltui bench data measures", ok, None if ok else done.stderr[-500:])
    variants = answer(done.stdout)["variants"] if ok else []
    for variant in variants:
        what = f"{network.name}, {variant['loader']} alone, {variant['workers']} workers: samples/s"
        yield Check(what, median(variant["samples_per_s"]))
    return fastest(variants)


def fastest(variants: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the fastest number of workers by loader."""
    ordered = sorted(variants, key=lambda variant: median(variant["samples_per_s"]))
    return {variant["loader"]: variant["workers"] for variant in ordered}


def training(
    conditions: Conditions, network: Network, folder: Path, loader: str, workers: int | None
) -> tuple[str, Settings]:
    """Return the preset and the settings with which ``loader`` feeds the network."""
    size = network.size
    settings: dict[str, Any] = {
        **one_device(conditions),
        "trainer.precision": "bf16-mixed",
        "trainer.max_epochs": 1000,
        "trainer.limit_val_batches": 0,
        "model.init_args.architecture": network.architecture,
        "model.init_args.classes": CLASSES,
        "data.init_args.batch_size": size.batch_size,
    }
    if not has_ffcv():
        return "image-folder-finetune", {
            **settings,
            "trainer.benchmark": "true",
            "model.init_args.pretrained": '"no"',
            "data.init_args.folder": folder,
            "data.init_args.size": size.resolution,
            "data.init_args.workers": workers or len(os.sched_getaffinity(0)),
        }
    return network.preset, {
        **settings,
        **network.settings,
        "data.init_args.train": f"{folder}.beton",
        "data.init_args.val": None,
        "data.init_args.test": None,
        "data.init_args.sources": None,
        "data.init_args.resolution": size.resolution,
        "data.init_args.loader": _KEYS[loader],
        "data.init_args.num_workers": workers,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one run shows after its warm-up."""

    samples_per_s: float
    """Counted here, from the steps of rank 0."""
    shown_samples_per_s: float | None
    data_wait_share: float | None
    utilisation_percent: float | None
    sm_activity: float | None


def in_training(
    conditions: Conditions,
    ltui: Ltui,
    network: Network,
    folder: Path,
    workers: dict[str, int],
    reserve_s: float,
) -> Iterator[Check]:
    """Yield the figures of both loaders, which feed the network in turn."""
    loaders = [FFCV, DATALOADER] if has_ffcv() else [DATALOADER]
    rounds: dict[str, list[Round]] = {loader: [] for loader in loaders}
    for number in range(network.size.rounds):
        if number and conditions.seconds_left() < reserve_s + len(loaders) * _RUN_S:
            break
        for loader in loaders:
            name = f"{network.name}, {loader}"
            used = training(conditions, network, folder, loader, workers.get(loader))
            try:
                run = start_preset(ltui, *used, f"{network.preset}-{_KEYS[loader]}-{number}")
                snapshots = train(run, network.size)
            except FAILURES as error:
                yield holds(f"{name}: trains", False, str(error)[-500:])
                continue
            yield from judge(name, snapshots, on_gpu=not conditions.rehearsal)
            if (one := measured(snapshots, network.size.batch_size)) is not None:
                rounds[loader].append(one)
    for loader, of_loader in rounds.items():
        yield from figures(f"{network.name}, {loader}", of_loader)
    if all(rounds.get(loader) for loader in (FFCV, DATALOADER)):
        rates = {name: median(r.samples_per_s for r in of) for name, of in rounds.items()}
        what = f"{network.name}: training by FFCV beside the DataLoader, samples/s"
        yield Check(what, rates[FFCV] / rates[DATALOADER])


def train(run: DetachedRun, size: Size) -> list[RunSnapshot]:
    """Return the snapshots of the time that is measured. The run is killed after that."""
    try:
        run.until(has_reached(2), _START_S)
        run.watch(size.warm_up_s)
        return run.watch(size.measured_s)
    finally:
        run.kill()


def judge(name: str, snapshots: Sequence[RunSnapshot], *, on_gpu: bool) -> Iterator[Check]:
    """Check that a run trained all the time and that everything to be compared is known."""
    last = snapshots[-1]
    alive = last.state in LIVE and step_of(last) > step_of(snapshots[0])
    yield holds(f"{name}: trains", alive, None if alive else why_ended(last))
    share = last.throughput.data_wait_share
    yield holds(f"{name}: the share of waiting is known", share is not None and 0 <= share <= 1)
    if on_gpu:
        known = mean_of(snapshots, "utilisation_percent")
        yield holds(f"{name}: the GPU of rank 0 is read", known is not None)


def measured(snapshots: Sequence[RunSnapshot], batch_size: int) -> Round | None:
    """Return the figures of a run; None if it did not train."""
    first, last = snapshots[0], snapshots[-1]
    steps = step_of(last) - step_of(first)
    if not steps or first.taken_at is None or last.taken_at is None:
        return None
    return Round(
        samples_per_s=steps * batch_size / (last.taken_at - first.taken_at),
        shown_samples_per_s=last.throughput.samples_per_s,
        data_wait_share=last.throughput.data_wait_share,
        utilisation_percent=mean_of(snapshots, "utilisation_percent"),
        sm_activity=mean_of(snapshots, "sm_activity"),
    )


def figures(name: str, rounds: Sequence[Round]) -> Iterator[Check]:
    """Yield the medians over the rounds."""
    titles = {
        "samples_per_s": "samples/s",
        "shown_samples_per_s": "samples/s as ltui shows it",
        "data_wait_share": "share of waiting for data",
        "utilisation_percent": "mean GPU utilisation, %",
        "sm_activity": "mean SM activity",
    }
    for attribute, title in titles.items():
        values = [value for one in rounds if (value := getattr(one, attribute)) is not None]
        what = f"{name}: {title}, median of {len(rounds)}"
        yield Check(what, median(values) if values else None)
