"""The judgement of the sections ``stop_and_resume`` and ``faults``: one wrong bit, megabyte, step,
or verdict is off."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot, RunState, Verdict
from tests.faults.fault import Fault
from tests.faults.verdicts import Outcome, is_right
from tests.gpu.hardware import faults, stop_and_resume
from tests.gpu.hardware.check import Conditions, off
from tests.gpu.hardware.faults import cases, groups, memory_check, recorder_check, verdict_checks
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
from tests.required import required

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


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"used_mib": 700.0}, "pause: memory in use before and during the pause, MiB"),
        ({"utilisation_percent": 40.0}, "pause: highest utilisation, percent"),
        ({"power_w": 530.0}, "pause: power before, and lowest during it, W"),
    ],
)
def test_a_pause_keeps_memory_and_leaves_the_device_idle(
    change: dict[str, float], what: str
) -> None:
    assert {check.ok for check in paused_checks(WORKS, [IDLE, IDLE])} == {True, None}
    assert off(paused_checks(WORKS, [dataclasses.replace(IDLE, **change)])) == [what]
    # Readings that are refused are not judged.
    assert {check.ok for check in paused_checks(Readings(), [Readings()])} == {None}


def test_the_next_step_follows_a_pause() -> None:
    assert continued_check((3, 3), 5, STEPS).ok is True
    assert continued_check((3, 4), 5, STEPS).ok is False
    assert continued_check((5, 5), 5, STEPS).ok is False
    assert continued_check((3, 3), 5, [*STEPS[:3], *STEPS[2:]]).ok is False


def test_a_large_checkpoint_must_be_verified() -> None:
    found = {check.what: check for check in large_checks(STOPPED, 640_000_000, 40.0)}
    assert found["large checkpoint: verified"].ok is True
    assert found["large checkpoint: size, GB"].measured == 8.0
    rate = found["large checkpoint: MB/s while saving, with flush and checksum"]
    assert rate.measured == 500.0
    for change in ({"ok": False}, {"ok": None}, None):
        kept = () if change is None else (replace(STOPPED.checkpoints[0], **change),)
        bad = replace(STOPPED, checkpoints=kept, checkpoint_seconds=())
        assert off(large_checks(bad, 1, 1.0)) == ["large checkpoint: verified"]


def test_the_model_follows_the_memory_that_is_free() -> None:
    much = {"device_bytes": 139 * GIB, "host_bytes": 128 * GIB, "disk_bytes": 64 * GIB}
    assert layers_for(**much) == MOST_PARAMETERS // 8192**2
    assert layers_for(**{**much, "device_bytes": 7 * GIB}) == 2
    assert layers_for(**{**much, "disk_bytes": GIB}) == 0


def _conditions(folder: Path, seconds: float) -> Conditions:
    deadline = time.monotonic() + seconds
    return Conditions(folder=folder, home=folder, rehearsal=True, deadline=deadline)


def test_a_part_that_fails_or_has_no_time_left_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no shared memory")

    monkeypatch.setattr(stop_and_resume, "start_script", refuse)
    monkeypatch.setattr(stop_and_resume, "_train_whole", lambda *_: None)
    found = list(stop_and_resume.checks(_conditions(tmp_path, 600.0)))
    assert [check.ok for check in found] == [False, False, False, False, None]
    assert "no shared memory" in str(found[0].measured)
    monkeypatch.setattr(faults, "_try", refuse)
    for seconds, text in ((600.0, "OSError: no shared memory"), (1.0, "not tried, no time left")):
        found = list(faults.checks(_conditions(tmp_path, seconds)))
        assert [(check.measured, check.ok) for check in found] == [(text, False)] * 5


# -- faults ----------------------------------------------------------------------------------------

ONE_GPU = {(case.fault, case.group): case for case in cases(groups(1), rehearsal=False)}
MEMORY = ONE_GPU["out_of_memory", "shared"]
LINE = required(re.search(r":(\d+)", str(MEMORY.expected.words)))[0]
RIGHT = Verdict(
    kind="out_of_memory",
    level="dead",
    culprits=(1,),
    place=f"exception, faulty_training.py{LINE} in _run_out_of_memory",
    cause=f"rank 1 ran out of GPU memory at faulty_training.py{LINE} in _run_out_of_memory: tried"
    " to allocate 17.47 GiB while 5.44 GiB of 139.81 GiB was free on GPU 0; PyTorch held 122.31 GiB"
    " in tensors, 0 bytes that was reserved and not used, process 4711 held 0.60 GiB",
)


@pytest.mark.parametrize(
    ("change", "held", "right"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"culprits": (0,)}, True, False),
        ({"level": "stalled"}, True, False),
        (
            {"cause": RIGHT.cause.replace(LINE, ":3"), "place": "exception"},
            True,
            False,
        ),
        ({"cause": RIGHT.cause.split(";")[0]}, True, False),
    ],
)
def test_the_verdict_is_judged_by_rank_words_and_line(
    change: dict[str, Any], held: bool, right: bool
) -> None:
    verdict = replace(RIGHT, **change)
    fault = Fault(id="f", title="t", expected=(MEMORY.expected,))
    outcome = Outcome(fault, culprit_s=0.1, cause_s=0.2, held=held, last=(verdict,))
    if not is_right(MEMORY.expected, verdict):
        outcome.cause_s = None
    check, *_ = verdict_checks("t", MEMORY, outcome)
    assert check.ok is right
    assert not right or "process 4711 held 0.60 GiB" in str(check.measured)


def test_a_run_without_a_verdict_is_off() -> None:
    case = ONE_GPU["hung_kernel_later", "alone"]
    outcome = Outcome(Fault(id="f", title="t", expected=(case.expected,)), error="never struck")
    first, *seconds = verdict_checks("t", case, outcome)
    assert (first.measured, first.ok) == (["never struck"], False)
    assert [check.measured for check in seconds] == [None, None]


def test_the_groups_follow_the_number_of_gpus() -> None:
    assert groups(1)["alone"].devices == ("cuda:0",)
    assert groups(8)["alone"].devices == ("cuda:0", "cuda:1")
    assert groups(8)["shared"].devices == ("cuda:0", "cuda:0")
    assert {(c.fault, c.expected.culprits) for c in cases(groups(2), rehearsal=False)} >= {
        ("killed", (1,)),
        ("hung_kernel_later", ()),
        ("left_out", (0,)),
    }
    assert len(ONE_GPU) == 10
    assert len({c.fault for c in cases(groups(0), rehearsal=True)}) == 5


def test_every_rank_must_have_recorded_collectives() -> None:
    def evidence(*counts: int) -> dict[str, Any]:
        ranks: dict[str, Any] = {
            str(r): {"collectives": [{"op": "all_reduce", "seq": 7, "retired": False}] * n}
            for r, n in enumerate(counts)
        }
        return {"evidence": {"ranks": ranks}}

    right = recorder_check("t", evidence(1, 1))
    assert right.ok is True
    assert "[1, 1] entries; unfinished: all_reduce #7, all_reduce #7" in right.measured
    for wrong in (evidence(4, 0), evidence(), {"evidence": None}):
        assert recorder_check("t", wrong).ok is False


def test_memory_that_a_run_leaves_is_off() -> None:
    assert memory_check("t", 500.0, 140_000.0, 520.0).ok is True
    assert memory_check("t", 500.0, 140_000.0, 140_000.0).ok is False
    assert memory_check("t", None, None, None).ok is None
