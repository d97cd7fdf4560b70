"""The section ``model_flops``: what is judged."""

from __future__ import annotations

import pytest

from ltui.training.state.run_snapshot import RunSnapshot, RunState, Throughput
from ltui.training.store.history_reader import StoredEvent
from tests.gpu.hardware import model_flops
from tests.gpu.hardware.model_flops import gpt_flops, last_before, shown_rate, shown_utilisation
from tests.gpu.hardware.section import run_section
from tests.gpu.hardware.timed_training import Timing

FORMULA = gpt_flops(width=8, layers=2, context=4, batch=3)
PEAK = 1e12
TIMING = Timing(
    device="NVIDIA H200",
    parameters=1,
    batch=3,
    warm_up=5,
    steps=100,
    seconds=10.0,
    peak_bytes=None,
)


def event(attempt, flops):
    return StoredEvent(0, attempt, 0, 0.0, "flops", "", {"flops": float(flops), "tf32": False})


def snapshot(**fields):
    return RunSnapshot(id="a", name="a", state=fields.pop("state", RunState.RUNNING), **fields)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rehearsal_counts_what_the_formula_says_in_both_attempts(tmp_path):
    checks = run_section("tests.gpu.hardware.model_flops", tmp_path, rehearsal=True, limit_s=280.0)
    ok = {check.what: check.ok for check in checks}
    assert False not in ok.values(), [check for check in checks if check.ok is False]
    assert ok["after attempt 2: operations of a batch by ltui"]


def test_the_formula():
    weights = 2 * 12 * 8**2 + 8 * 256
    product = 2 * 3 * 4 * 4 * 8
    assert FORMULA.fused == 6 * weights * 12 + 2 * 7 * product
    assert FORMULA.separate == 6 * weights * 12 + 2 * 6 * product


@pytest.mark.parametrize(
    ("events", "attempts", "ok"),
    [
        ([event(1, FORMULA.fused)], 1, [True, True]),
        ([event(1, FORMULA.separate)], 1, [True, True]),
        ([event(1, FORMULA.fused), event(2, FORMULA.fused)], 2, [True, True]),
        ([event(1, FORMULA.fused + 1)], 1, [True, False]),
        ([event(1, FORMULA.fused), event(1, FORMULA.fused)], 1, [False, True]),
        ([event(1, FORMULA.fused)], 2, [False, True]),
        ([], 1, [False]),
    ],
)
def test_the_count_must_be_the_formula_once_in_each_attempt(events, attempts, ok):
    found = model_flops.counted(events, FORMULA, attempts=attempts)
    assert [check.ok for check in found if check.ok is not None] == ok


@pytest.mark.parametrize(
    ("share", "ok"), [(0.5, True), (0.509, True), (0.511, False), (0.489, False), (None, False)]
)
def test_the_utilisation_must_be_that_of_the_script(share, ok):
    shown = snapshot(model_flop_utilisation=share)
    assert shown_utilisation(shown, int(0.05 * PEAK), TIMING, PEAK).ok is ok


def test_a_utilisation_above_one_is_off():
    shown = snapshot(model_flop_utilisation=1.01)
    assert shown_utilisation(shown, int(0.101 * PEAK), TIMING, PEAK).ok is False


def test_without_a_peak_none_may_be_shown():
    assert shown_utilisation(snapshot(), 1, TIMING, None).ok is True
    assert shown_utilisation(snapshot(model_flop_utilisation=0.1), 1, TIMING, None).ok is False
    assert shown_utilisation(None, 1, TIMING, None).ok is False


@pytest.mark.parametrize(("rate", "ok"), [(10.05, True), (10.2, False), (None, False)])
def test_the_rate_must_be_that_of_the_script(rate, ok):
    shown = snapshot(throughput=Throughput(steps_per_s=rate))
    assert shown_rate(shown, TIMING, rehearsal=False).ok is ok


def test_the_last_snapshot_of_the_measured_steps_is_compared():
    measured = [snapshot(global_step=step) for step in (7, 100, 105, 106)]
    ended = snapshot(global_step=100, state=RunState.STOPPED)
    assert last_before([*measured, ended], 105) is measured[2]
    assert last_before([snapshot()], 105) is None
