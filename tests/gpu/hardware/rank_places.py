"""On which GPU ltui sees the rank of a real run, for each way to choose the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from ltui.training.gpu.reading import GpuReading
from ltui.training.gpu.run_gpus import RankLocation, map_ranks, normalize_uuid
from tests.gpu.hardware.check import Check, Conditions
from tests.gpu.hardware.simulated_driver import SimulatedDriver
from tests.run_module import ROOT
from tests.system.conftest import LIVE, Ltui

SCRIPT = Path(__file__).with_name("scripts") / "holds_memory.py"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_SETTLE_S = 3.0
"""Seconds after the first steps until the processes on the GPU have been read."""
_COST_S = 8.0


def ways_to_choose(reading: GpuReading) -> dict[str, str | None]:
    """Return values of ``CUDA_VISIBLE_DEVICES`` that choose this GPU; None: not set."""
    ways: dict[str, str | None] = {"not set": None, "by index": str(reading.index)}
    if reading.uuid is not None:
        ways |= {"by UUID": reading.uuid, "by a prefix of the UUID": reading.uuid[:12]}
    return ways


def check_places(
    conditions: Conditions,
    readings: Sequence[GpuReading],
    reading: GpuReading,
    driver: SimulatedDriver | None,
) -> Iterator[Check]:
    """Start a run in each way and compare what ltui says with what torch says in the rank.

    ``reading``: the GPU to choose. ``driver``: that of a rehearsal.
    """
    ways = ways_to_choose(reading)
    if VISIBLE in os.environ:  # the other GPUs may belong to somebody else
        del ways["not set"]
    if conditions.rehearsal:
        ways = {way: ways[way] for way in ("by index", "by a prefix of the UUID")}
    for number, (way, visible) in enumerate(ways.items()):
        try:
            with _PlacedRun(conditions, visible, driver) as run:
                yield from judge_place(way, visible, run.facts, run.snapshot, readings)
                if number == len(ways) - 1:
                    share = run.supervisor_share()
                    yield Check("supervisor of the run: % of a core", share)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            yield Check(f"rank, {way}", str(error)[-400:], "a run", False)


class _PlacedRun:
    """A run of the program, from its first steps to its end."""

    def __init__(
        self, conditions: Conditions, visible: str | None, driver: SimulatedDriver | None
    ) -> None:
        self._running = conditions.home / "running"
        facts = conditions.home / "facts.json"
        facts.unlink(missing_ok=True)
        self._running.touch()
        self._ltui = Ltui(conditions.home, ROOT)
        self._ltui.environment.pop(VISIBLE, None)
        if visible is not None:
            self._ltui.environment[VISIBLE] = visible
        command = (sys.executable, SCRIPT, conditions.accelerator, self._running, facts)
        self._ltui("exec", "--detach", "--", *map(str, command), timeout=60)
        try:
            begun = self._ltui.wait(lambda s: facts.exists() or s["state"] not in LIVE, seconds=60)
            assert facts.exists(), begun["detail"]
            self.facts: dict[str, Any] = json.loads(facts.read_text())
            if driver is not None:
                driver.hold(self.facts["pid"], self.facts["held_bytes"])
            self._ltui.wait_for_step(3, seconds=60)
            time.sleep(_SETTLE_S)
            self.snapshot = self._ltui.wait(lambda s: s["gpus"] or s["gpu_note"], seconds=15)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _PlacedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.unlink(missing_ok=True)
        self._ltui.wait(lambda s: s["state"] not in LIVE, seconds=60)

    def supervisor_share(self) -> float | None:
        """Return the share of a core that the run's supervisor takes, in percent."""
        try:
            process = psutil.Process(self.snapshot["supervisor_pid"])
            before = process.cpu_times()
            time.sleep(_COST_S)
            after = process.cpu_times()
        except (psutil.Error, TypeError):
            return None
        used = after.user + after.system - before.user - before.system
        return 100 * used / _COST_S


def judge_place(
    way: str,
    visible: str | None,
    facts: dict[str, Any],
    snapshot: dict[str, Any],
    readings: Sequence[GpuReading],
) -> Iterator[Check]:
    """Judge the snapshot of a run by what its rank says about itself.

    ``facts``: pid, UUID and device of the rank, and the memory that it holds. A rank without a UUID
    is on the CPU.
    """
    uuid = facts["uuid"]
    expected = [r.index for r in readings if uuid and normalize_uuid(r.uuid or "") == uuid]
    gpus = snapshot["gpus"]
    found = [gpu["index"] for gpu in gpus if 0 in gpu["ranks"]]
    yield Check(f"rank, {way}: GPU", found, _numbers(expected), found == expected)
    if expected:
        alone = RankLocation(
            rank=0,
            device="cuda:0",
            visible_devices=visible,
            device_order=os.environ.get("CUDA_DEVICE_ORDER"),
        )
        index = map_ranks(readings, [alone]).get(0)
        # CUDA numbers different models by their speed, so that a number says nothing there.
        several = len({r.name for r in readings}) > 1
        known = None if index is None and several else index == expected[0]
        what = f"rank, {way}: GPU by {VISIBLE} alone"
        yield Check(what, "unknown" if index is None else index, _numbers(expected), known)
    processes = [process for gpu in gpus for process in gpu["processes"] or ()]
    own = [process for process in processes if process["pid"] == facts["pid"]]
    unseen = sum(process["owner"] == "unseen" for process in processes)
    if own:
        owners = [(process["owner"], process["rank"]) for process in own]
        yield Check(f"rank, {way}: owner", owners[0], "rank, 0", owners == [("rank", 0)])
        memory, held = own[0]["memory_bytes"], facts["held_bytes"]
        enough = None if memory is None else memory >= held
        yield Check(f"rank, {way}: memory of its process", memory, f">= {held}", enough)
    else:
        text = f"not among {len(processes)} processes, {unseen} of which are not visible"
        # In a container the driver may name processes by the host's numbers, or none.
        ok = None if unseen or not processes else False
        yield Check(f"rank, {way}: its process", text, "listed", ok)
    kinds = [verdict["kind"] for verdict in snapshot["verdicts"]]
    blamed = [kind for kind in kinds if kind in ("gpu_foreign", "gpu_unseen")]
    yield Check(f"rank, {way}: other programs on its GPU", blamed, "none", not blamed)


def _numbers(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices)) or "none"
