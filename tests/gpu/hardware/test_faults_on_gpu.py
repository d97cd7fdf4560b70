"""The judgement of the section ``faults``: a wrong verdict, a hung end or held memory is off."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import Verdict
from tests.faults.fault import Fault
from tests.faults.verdicts import Outcome, is_right
from tests.gpu.hardware import faults
from tests.gpu.hardware.check import Check
from tests.gpu.hardware.conditions import Conditions
from tests.gpu.hardware.faults import (
    cases,
    checks,
    groups,
    memory_check,
    recorder_check,
    verdict_checks,
)
from tests.required import required

ONE_GPU = {(case.fault, case.group): case for case in cases(groups(1), rehearsal=False)}
MEMORY = Verdict(
    kind="out_of_memory",
    level="dead",
    culprits=(1,),
    place="exception, faulty_training.py:38 in _run_out_of_memory",
    cause="rank 1 ran out of GPU memory at faulty_training.py:38 in _run_out_of_memory: tried to"
    " allocate 17.47 GiB while 5.44 GiB of 139.81 GiB was free on GPU 0; PyTorch held 122.31 GiB in"
    " tensors, 0 bytes that was reserved and not used, process 4711 held 0.60 GiB",
)


def _line_in(expected: str) -> str:
    return required(re.search(r":(\d+)", expected))[1]


def _verdict_check(verdict: Verdict, *, held: bool = True) -> Check:
    case = ONE_GPU["out_of_memory", "shared"]
    fault = Fault(id="f", title="t", expected=(case.expected,))
    outcome = Outcome(fault, culprit_s=0.1, cause_s=0.2, held=held, last=(verdict,))
    if not is_right(case.expected, verdict):
        outcome.cause_s = None
    first, *_ = verdict_checks("t", case, outcome)
    return first


def test_the_verdict_is_judged_by_rank_words_and_line() -> None:
    line = _line_in(str(ONE_GPU["out_of_memory", "shared"].expected.words))
    right = replace(MEMORY, cause=MEMORY.cause.replace(":38", f":{line}"))
    check = _verdict_check(right)
    assert check.ok is True
    assert "process 4711 held 0.60 GiB" in str(check.measured)
    assert _verdict_check(right, held=False).ok is False
    assert _verdict_check(replace(right, culprits=(0,))).ok is False
    assert _verdict_check(replace(right, level="stalled")).ok is False
    assert _verdict_check(replace(right, cause=right.cause.replace(f":{line}", ":3"))).ok is False
    assert _verdict_check(replace(right, cause=right.cause.split(";")[0])).ok is False


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
    assert recorder_check("t", evidence(4, 0)).ok is False
    assert recorder_check("t", evidence()).ok is False
    assert recorder_check("t", {"evidence": None}).ok is False


def test_memory_that_a_run_leaves_is_off() -> None:
    assert memory_check("t", 500.0, 140_000.0, 520.0).ok is True
    assert memory_check("t", 500.0, 140_000.0, 140_000.0).ok is False
    assert memory_check("t", None, None, None).ok is None


def test_a_case_that_fails_or_has_no_time_left_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conditions(seconds: float) -> Conditions:
        deadline = time.monotonic() + seconds
        return Conditions(folder=tmp_path, home=tmp_path, rehearsal=True, deadline=deadline)

    def refuse(*_: object) -> None:
        raise OSError("no shared memory")

    monkeypatch.setattr(faults, "_try", refuse)
    for seconds, text in ((600.0, "OSError: no shared memory"), (1.0, "not tried, no time left")):
        found = list(checks(conditions(seconds)))
        assert [(check.measured, check.ok) for check in found] == [(text, False)] * 5
