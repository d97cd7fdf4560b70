"""The judgement of the section ``stop_and_resume``: one wrong bit, megabyte or step is off."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot, RunState
from tests.gpu.hardware import stop_and_resume
from tests.gpu.hardware.check import Check
from tests.gpu.hardware.conditions import Conditions
from tests.gpu.hardware.stop_and_resume import (
    MOST_PARAMETERS,
    Lines,
    Readings,
    continued_check,
    large_checks,
    layers_for,
    paused_checks,
    same_bits,
)

GIB = 1 << 30
STEPS: Lines = [{"step": n, "loss": (1.0 / n).hex()} for n in range(1, 6)]
END: Lines = [{"weights": "a1", "optimizer": "b2", "scaler": "c3", "random": "d4"}]
WORKS = Readings(used_mib=3000.0, utilisation_percent=98.0, power_w=520.0)
IDLE = Readings(used_mib=3000.0, utilisation_percent=0.0, power_w=110.0)
STOPPED = RunSnapshot(
    id="r",
    name="n",
    state=RunState.STOPPED,
    checkpoints=(CheckpointInfo(path="c", global_step=9, ok=True, size_bytes=8_000_000_000),),
    checkpoint_seconds=(16.0,),
)


def _found(checks: list[Check]) -> dict[str, Check]:
    return {check.what.partition(": ")[2]: check for check in checks}


def _same(parts: Lines, *, judged: bool = True) -> list[tuple[object, bool | None]]:
    found = same_bits("16-mixed", [*STEPS, *END], parts, judged=judged)
    return [(check.measured, check.ok) for check in found]


def test_every_loss_and_every_state_must_be_equal() -> None:
    assert _same([*STEPS, *END]) == [("5 equal", True), ("nothing", True)]
    last_bit = {"step": 4, "loss": (1.0 / 4).hex().replace("p-2", "1p-2")}
    assert _same([*STEPS[:3], last_bit, STEPS[4], *END])[0] == ("differs from step 4 on", False)
    assert _same([*STEPS[:3], STEPS[2], *STEPS[3:], *END])[0][1] is False
    assert _same([*STEPS[:4], *END])[0] == ("4 steps instead of 5", False)
    assert _same([*STEPS, {**END[0], "scaler": "c4"}])[1] == ("scaler", False)
    assert [ok for _, ok in _same([])] == [False, False]
    assert [ok for _, ok in _same([*STEPS[:4], *END], judged=False)] == [None, None]
    assert [check.ok for check in same_bits("k", [], [], judged=True)] == [False, False]


def test_a_pause_keeps_memory_and_leaves_the_device_idle() -> None:
    assert {check.ok for check in paused_checks(WORKS, [IDLE, IDLE])} == {True, None}
    for wrong, what in (
        (
            dataclasses.replace(IDLE, used_mib=700.0),
            "memory in use before and during the pause, MiB",
        ),
        (dataclasses.replace(IDLE, utilisation_percent=40.0), "highest utilisation, percent"),
        (dataclasses.replace(IDLE, power_w=530.0), "power before, and lowest during it, W"),
    ):
        found = _found(list(paused_checks(WORKS, [wrong])))
        assert [name for name, check in found.items() if check.ok is False] == [what]


def test_readings_that_are_refused_are_not_judged() -> None:
    assert {check.ok for check in paused_checks(Readings(), [Readings()])} == {None}


def test_the_next_step_follows_a_pause() -> None:
    assert continued_check((3, 3), 5, STEPS).ok is True
    assert continued_check((3, 4), 5, STEPS).ok is False
    assert continued_check((5, 5), 5, STEPS).ok is False
    assert continued_check((3, 3), 5, [*STEPS[:3], *STEPS[2:]]).ok is False


def test_a_large_checkpoint_must_be_verified() -> None:
    found = _found(list(large_checks(STOPPED, 640_000_000, 40.0)))
    assert found["verified"].ok is True
    assert found["size, GB"].measured == 8.0
    assert found["MB/s while saving, with flush and checksum"].measured == 500.0
    for ok in (False, None):
        bad = replace(STOPPED, checkpoints=(replace(STOPPED.checkpoints[0], ok=ok),))
        assert _found(list(large_checks(bad, 1, 1.0)))["verified"].ok is False
    without = replace(STOPPED, checkpoints=(), checkpoint_seconds=())
    assert _found(list(large_checks(without, 1, 1.0)))["verified"].ok is False


def test_the_model_follows_the_memory_that_is_free() -> None:
    much = {"device_bytes": 139 * GIB, "host_bytes": 128 * GIB, "disk_bytes": 64 * GIB}
    assert layers_for(**much) == MOST_PARAMETERS // 8192**2
    assert layers_for(**{**much, "device_bytes": 7 * GIB}) == 2
    assert layers_for(**{**much, "disk_bytes": GIB}) == 0


def test_a_part_that_fails_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no shared memory")

    monkeypatch.setattr(stop_and_resume, "start_script", refuse)
    monkeypatch.setattr(stop_and_resume, "_train_whole", lambda *_: None)
    deadline = time.monotonic() + 600.0
    conditions = Conditions(folder=tmp_path, home=tmp_path, rehearsal=True, deadline=deadline)
    found = list(stop_and_resume.checks(conditions))
    assert [check.ok for check in found] == [False, False, False, False, None]
    assert "no shared memory" in str(found[0].measured)
