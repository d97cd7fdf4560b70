"""Stop, pause and resume on a GPU: every bit, what a pause keeps, and a checkpoint of gigabytes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from tests.gpu.hardware.check import Check, Conditions, below, holds
from tests.gpu.hardware.detached_run import DetachedRun
from tests.gpu.hardware.first_gpu import MIB, find_first_gpu
from tests.gpu.hardware.instruments import free_device_bytes
from tests.run_module import ROOT
from tests.system.conftest import Ltui

SCRIPTS = Path(__file__).with_name("scripts")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
COMPILED = "compiled"
STOP_AT = 17
"""Step of the stop: in the middle of the second epoch."""
PAUSE_S = 4.0
"""How long a pause is observed, after the readings of the work before it have passed."""
_READINGS_LAG_S = 2.5
_SAME_MIB = 16.0
_IDLE_PERCENT = 5.0
_LARGE_S, _COMPILED_S = 60.0, 120.0
"""Seconds that must be left for these parts."""
MOST_PARAMETERS = 640_000_000
_WIDTH = 8192
_DEVICE_BYTES, _HOST_BYTES, _DISK_BYTES = 20, 24, 12
"""Bytes for each parameter: with Adam and what it needs in between on the device, twice the file
in memory while Lightning writes it, and the file."""

Lines = list[dict[str, Any]]


class Meter(Protocol):
    """Readings of a device."""

    def used_mib(self) -> float | None: ...
    def utilisation_percent(self) -> float | None: ...
    def power_w(self) -> float | None: ...


class CpuMeter:
    """In place of a GPU in a rehearsal: memory and processor time of one process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def used_mib(self) -> float | None:
        return float(self._process.memory_info().rss) / MIB

    def utilisation_percent(self) -> float | None:
        return float(self._process.cpu_percent(0.5))

    def power_w(self) -> float | None:
        return None


def start_script(conditions: Conditions, name: str, *words: object) -> DetachedRun:
    """Start a script under ltui as the run ``name``."""
    ltui = Ltui(conditions.home, ROOT)
    ltui.environment = _environment(conditions)
    return DetachedRun(ltui, "exec", name, "--", sys.executable, *map(str, words))


def end(run: DetachedRun, folder: Path) -> None:
    """Kill the run if it still runs. Copy its logs, which would be deleted with the home."""
    run.kill()
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(run.run_dir.path / "logs", folder / f"{run.name}-logs")


def checks(conditions: Conditions) -> Iterator[Check]:
    """Yield the checks of all parts; each goes on if another fails."""
    for part in (exactness, pause, large_checkpoint, compiled):
        try:
            yield from part(conditions)
        except Exception as error:
            yield _failed(part.__name__.replace("_", " "), error, judged=part is not compiled)


def _failed(what: str, error: Exception, *, judged: bool) -> Check:
    text = f"{type(error).__name__}: {error}"[-600:]
    return Check(f"{what}: tried", text, "yes", False if judged else None)


def _environment(conditions: Conditions) -> dict[str, str]:
    """Return the environment of a script."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if conditions.rehearsal else {}
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **deterministic, **hidden, "LTUI_HOME": str(conditions.home)}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# -- every bit -------------------------------------------------------------------------------------


def exactness(conditions: Conditions) -> Iterator[Check]:
    """Yield, for each precision, what differs after a stop and a resume."""
    kinds = [p for p in PRECISIONS if not (conditions.rehearsal and p == "bf16-mixed")]
    yield from _compared(conditions, kinds, judged=True)


def compiled(conditions: Conditions) -> Iterator[Check]:
    """Yield the same with torch.compile, for information, if it can compile for this device."""
    what = f"{COMPILED}: stopped and resumed as never stopped"
    if conditions.rehearsal or importlib.util.find_spec("triton") is None:
        yield Check(what, None)
    elif conditions.seconds_left() < _COMPILED_S:
        yield Check(what, "not tried, no time left")
    else:
        yield from _compared(conditions, [COMPILED], judged=False)


def _compared(conditions: Conditions, kinds: Sequence[str], *, judged: bool) -> Iterator[Check]:
    """Train once without ltui, and at the same time with ltui, a stop and a resume."""
    whole = _empty(conditions.folder / f"whole-{kinds[0]}")
    parts = _empty(conditions.folder / f"parts-{kinds[0]}")
    with ThreadPoolExecutor(2 if conditions.rehearsal else len(kinds) + 1) as pool:
        reference = pool.submit(_train_whole, conditions, whole, kinds)
        stopped = [(kind, pool.submit(_stop_and_resume, conditions, parts, kind)) for kind in kinds]
        reference.result()
        for kind, future in stopped:
            try:
                at = future.result()
            except Exception as error:
                yield _failed(kind, error, judged=judged)
                continue
            yield Check(
                f"{kind}: stopped at step", at, str(STOP_AT), at == STOP_AT if judged else None
            )
            name = f"{kind}.jsonl"
            yield from same_bits(kind, _lines(whole / name), _lines(parts / name), judged=judged)


def _train_whole(conditions: Conditions, folder: Path, kinds: Sequence[str]) -> None:
    """Train to the end without ltui."""
    script = SCRIPTS / "exact_training.py"
    with (folder / "log.txt").open("wb") as log:
        subprocess.run(
            [sys.executable, str(script), str(folder), conditions.accelerator, *kinds],
            env=_environment(conditions),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, conditions.seconds_left()),
            check=True,
        )


def _stop_and_resume(conditions: Conditions, folder: Path, kind: str) -> int | None:
    """Train with a stop. Return the step at which it stopped."""
    words = (SCRIPTS / "exact_training.py", folder, conditions.accelerator, kind)
    training = start_script(conditions, f"exact-{kind}", *words)
    try:
        training.ltui("stop", training.name, "--at-step", str(STOP_AT))
        stopped = training.ended()
        assert stopped.state is RunState.STOPPED, f"{stopped.state.value}: {stopped.detail}"
        training.ltui("resume", training.name, "--detach")
        finished = training.until(lambda s: s.attempt == 2 and s.state not in LIVE, 150)
        assert finished.state is RunState.FINISHED, f"{finished.state.value}: {finished.detail}"
        return stopped.global_step
    finally:
        end(training, folder)


def same_bits(kind: str, whole: Lines, parts: Lines, *, judged: bool) -> Iterator[Check]:
    """Yield whether losses and final states are those of the training that was never stopped."""
    *whole_steps, whole_end = whole or [{}]
    *part_steps, part_end = parts or [{}]
    differs = next((a for a, b in zip(whole_steps, part_steps, strict=False) if a != b), None)
    if differs is not None:
        said = f"differs from step {differs.get('step')} on"
    elif len(whole_steps) != len(part_steps):
        said = f"{len(part_steps)} steps instead of {len(whole_steps)}"
    else:
        said = f"{len(part_steps)} equal"
    right = bool(whole_steps) and whole_steps == part_steps
    what = f"{kind}: losses of all steps, bit for bit"
    yield Check(what, said, "all equal", right if judged else None)
    other = [name for name in whole_end if whole_end[name] != part_end.get(name)]
    right = bool(whole_end) and whole_end == part_end
    said = ", ".join(other) or ("nothing" if right else "it has no end")
    what = f"{kind}: what differs at the end of weights, optimizer, loss scaler and random state"
    yield Check(what, said, "nothing", right if judged else None)


def _lines(file: Path) -> Lines:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return []


# -- a pause ---------------------------------------------------------------------------------------


def pause(conditions: Conditions) -> Iterator[Check]:
    """Yield what a pause keeps, and how the training goes on."""
    file = _empty(conditions.folder / "pause") / "steps.jsonl"
    shape = (64, 2, 0) if conditions.rehearsal else (4096, 4, 100)
    words = (SCRIPTS / "large_training.py", file, conditions.accelerator, *shape)
    training = start_script(conditions, "pause", *words)
    try:
        seen = training.until(lambda s: (s.global_step or 0) >= 5, 120)
        meter: Meter | None = find_first_gpu(conditions.rehearsal)
        if conditions.rehearsal:
            meter = CpuMeter(seen.ranks[0].pid or 0)
        time.sleep(_READINGS_LAG_S)
        before = Readings.of(meter)
        training.ltui("pause", training.name)
        paused = training.until(lambda s: s.state is RunState.PAUSED, 60)
        time.sleep(_READINGS_LAG_S)
        during = [Readings.of(meter)]
        deadline = time.monotonic() + PAUSE_S
        while time.monotonic() < deadline:
            during.append(Readings.of(meter))
            time.sleep(0.5)
        still = training.until(lambda s: True, 10)
        yield from paused_checks(before, during)
        xids = [f"XID {gpu.xid_code}" for gpu in still.gpus if gpu.xid_code is not None]
        yield holds("pause: no XID error", not xids, xids or "none")
        steps = (paused.global_step or 0, still.global_step or 0)
        training.ltui("continue", training.name)
        later = training.until(lambda s: (s.global_step or 0) >= steps[1] + 5, 60)
        yield continued_check(steps, later.global_step or 0, _lines(file))
    finally:
        end(training, file.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """Readings of a device at one moment."""

    used_mib: float | None = None
    utilisation_percent: float | None = None
    power_w: float | None = None

    @classmethod
    def of(cls, meter: Meter | None) -> Readings:
        """Read the device now."""
        if meter is None:
            return cls()
        return cls(
            used_mib=meter.used_mib(),
            utilisation_percent=meter.utilisation_percent(),
            power_w=meter.power_w(),
        )


def paused_checks(before: Readings, during: Sequence[Readings]) -> Iterator[Check]:
    """Yield whether memory was kept, and whether the device was idle."""
    used = [r.used_mib for r in during if r.used_mib is not None]
    what = "pause: memory in use before and during the pause, MiB"
    if before.used_mib is None or not used:
        yield Check(what, None)
    else:
        same = max(abs(mib - before.used_mib) for mib in used) <= _SAME_MIB
        yield Check(what, [round(before.used_mib), round(used[-1])], "the same", same)
    yield Check("pause: utilisation before, percent", before.utilisation_percent)
    percents = [r.utilisation_percent for r in during if r.utilisation_percent is not None]
    yield below("pause: highest utilisation, percent", max(percents, default=None), _IDLE_PERCENT)
    watts = [r.power_w for r in during if r.power_w is not None]
    what = "pause: power before, and lowest during it, W"
    if before.power_w is None or not watts:
        yield Check(what, None)
    else:
        said = [round(before.power_w), round(min(watts))]
        yield Check(what, said, "falls", min(watts) < before.power_w)


def continued_check(paused: tuple[int, int], later: int, lines: Lines) -> Check:
    """Return whether nothing was trained in the pause, and the next step came after it.

    ``paused``: the step at the beginning and at the end of the pause.
    """
    steps = [line["step"] for line in lines]
    gapless = steps == list(range(1, len(steps) + 1))
    right = paused[0] == paused[1] < later and gapless
    said = f"paused at steps {paused[0]} and {paused[1]}, then {later}"
    said += "" if gapless else "; steps are missing or repeated"
    return Check("pause: continues with the next step", said, "one step, then later ones", right)


# -- a checkpoint of gigabytes ---------------------------------------------------------------------


def large_checkpoint(conditions: Conditions) -> Iterator[Check]:
    """Yield size and times of a checkpoint of a large model."""
    folder = _empty(conditions.folder / "large")
    width, layers = large_shape(conditions)
    what = "large checkpoint"
    if layers == 0 or conditions.seconds_left() < _LARGE_S:
        yield Check(f"{what}: verified", "not tried: too little memory, disk or time is left")
        return
    file = folder / "steps.jsonl"
    words = (SCRIPTS / "large_training.py", file, conditions.accelerator, width, layers, 0)
    training = start_script(conditions, "large", *words)
    try:
        limit_s = max(30.0, conditions.seconds_left())
        training.until(lambda s: (s.global_step or 0) >= 5, limit_s)
        began = time.monotonic()
        training.ltui("stop", training.name, "--timeout", str(int(limit_s)), timeout=limit_s)
        seconds = time.monotonic() - began
        yield from large_checks(training.ended(limit_s), width * width * layers, seconds)
        last = _lines(file)[-1]["step"]
        began_at = time.time()
        training.ltui("resume", training.name, "--detach", timeout=limit_s)
        training.until(lambda s: s.attempt == 2 and (s.global_step or 0) > last, limit_s)
        first = _lines(file)[last]
        yield holds(f"{what}: resumes at the next step", first["step"] == last + 1, first["step"])
        yield Check(f"{what}: seconds from the resume to its first step", first["t"] - began_at)
    finally:
        end(training, folder)
        shutil.rmtree(training.run_dir.path / "checkpoints", ignore_errors=True)


def large_shape(conditions: Conditions) -> tuple[int, int]:
    """Return width and layers of a model for half of what is free of each kind of memory."""
    if conditions.rehearsal:
        return 256, 4
    return _WIDTH, layers_for(
        device_bytes=free_device_bytes(),
        host_bytes=psutil.virtual_memory().available,
        disk_bytes=shutil.disk_usage(conditions.home).free,
    )


def layers_for(*, device_bytes: int, host_bytes: int, disk_bytes: int) -> int:
    """Return how many layers there are memory and disk for."""
    parameters = min(
        MOST_PARAMETERS,
        device_bytes // 2 // _DEVICE_BYTES,
        host_bytes // 2 // _HOST_BYTES,
        disk_bytes // 2 // _DISK_BYTES,
    )
    return parameters // _WIDTH**2


def large_checks(stopped: RunSnapshot, parameters: int, seconds: float) -> Iterator[Check]:
    """Yield whether the checkpoint of a stopped run is good, its size, and its times."""
    what = "large checkpoint"
    newest = max(stopped.checkpoints, key=lambda c: c.saved_at or 0.0, default=None)
    good = stopped.state is RunState.STOPPED and newest is not None and newest.ok is True
    yield Check(f"{what}: verified", f"{stopped.state.value}: {stopped.detail}", "yes", good)
    size = None if newest is None else newest.size_bytes
    saving = stopped.checkpoint_seconds[-1] if stopped.checkpoint_seconds else None
    yield Check(f"{what}: parameters, millions", parameters / 1e6)
    yield Check(f"{what}: size, GB", None if size is None else size / 1e9)
    yield Check(f"{what}: seconds to save it", saving)
    rate = size / 1e6 / saving if size and saving else None
    yield Check(f"{what}: MB/s while saving, with flush and checksum", rate)
    yield Check(f"{what}: seconds from the stop to the verified checkpoint", seconds)
