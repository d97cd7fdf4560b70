"""The sections ``throughput`` and ``model_flops``: what is judged, and how the time is divided."""

from __future__ import annotations

import pytest

from ltui.training.state.run_snapshot import RunSnapshot, RunState, Throughput
from ltui.training.store.history_reader import StoredEvent
from tests.gpu.hardware import model_flops
from tests.gpu.hardware.check import off
from tests.gpu.hardware.model_flops import gpt_flops, last_before, shown_rate, shown_utilisation
from tests.gpu.hardware.section import run_section
from tests.gpu.hardware.throughput import Pair, judged, lengthened
from tests.gpu.hardware.timed_training import GPT_MODEL, RESNET, Plan, Timing, batch_that_fits

RATIO = "gpt: throughput with ltui / without, median of the pairs"
OWN_RATE = "gpt: rate of these steps in ltui's history / the script's, least like 1"
NOISE = "gpt: noise: a run without ltui / the one before it, least to most"
GB = 1e9
FORMULA = gpt_flops(width=8, layers=2, context=4, batch=3)
PEAK = 1e12
TIMING = Timing(
    device="NVIDIA H200", parameters=1, batch=3, warm_up=5, steps=100, seconds=10.0, peak_bytes=None
)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("throughput", OWN_RATE),
        ("model_flops", "after attempt 2: operations of a batch by ltui"),
    ],
    ids=["throughput", "model_flops"],
)
def test_a_rehearsal_agrees_with_ltui(tmp_path, section, known):
    checks = run_section(f"tests.gpu.hardware.{section}", tmp_path, rehearsal=True, limit_s=480.0)
    assert off(checks) == [], checks
    assert {check.what: check.ok for check in checks}[known]


# -- throughput ------------------------------------------------------------------------------------


def results(pairs, rehearsal=False):
    return {check.what: check for check in judged("gpt", pairs, rehearsal=rehearsal)}


def pairs(*ratios, rate_error=0.001):
    return [Pair(1000.0, 1000.0 * ratio, rate_error) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "ok"),
    [
        ((0.996, 0.999, 1.0, 1.001, 0.9), True),  # one disturbed run
        ((0.994, 0.994, 0.994, 1.0, 1.0), False),
        ((1.006, 1.006, 1.006, 1.0, 1.0), False),  # faster: the runs do not do the same
    ],
)
def test_the_median_of_the_pairs_is_judged(ratios, ok):
    assert results(pairs(*ratios))[RATIO].ok is ok
    assert results(pairs(*ratios), rehearsal=True)[RATIO].ok is None


@pytest.mark.parametrize(
    ("error", "shown", "ok"),
    [(0.009, "1.0090", True), (-0.011, "0.9890", False), (None, "1.0010", False)],
)
def test_the_rate_in_the_history_must_agree_in_every_pair(error, shown, ok):
    check = results([*pairs(1.0, 1.0), *pairs(1.0, rate_error=error)])[OWN_RATE]
    assert (check.measured, check.ok) == (shown, ok)


def test_the_noise_is_that_of_the_runs_without_ltui():
    found = results([Pair(100.0, 1.0, 0.0), Pair(101.0, 1.0, 0.0), Pair(99.99, 1.0, 0.0)])
    assert found[NOISE].measured == "0.9900 to 1.0100"
    assert NOISE not in results(pairs(1.0))


@pytest.mark.parametrize(
    ("step_s", "run_s", "warm_up", "steps"),
    [(0.5, 100.0, 10, 20), (0.125, 8.0, 16, 48), (0.125, -5.0, 16, 24), (1.0, 5.0, 10, 10)],
)
def test_a_run_is_as_long_as_the_time_allows(step_s, run_s, warm_up, steps):
    plan = lengthened(Plan(model=RESNET, warm_up=1, steps=1), step_s, run_s)
    assert (plan.warm_up, plan.steps) == (warm_up, steps)


def test_batches_follow_the_free_memory():
    for free_gb, batches in ((139, [32, 256]), (7.5, [4, 32]), (1, [1, 1])):
        assert [batch_that_fits(m, free_gb * GB) for m in (GPT_MODEL, RESNET)] == batches


# -- model FLOP utilisation ------------------------------------------------------------------------


def event(attempt, flops):
    return StoredEvent(0, attempt, 0, 0.0, "flops", "", {"flops": float(flops), "tf32": False})


def snapshot(**fields):
    return RunSnapshot(id="a", name="a", state=fields.pop("state", RunState.RUNNING), **fields)


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
    ("share", "own", "ok"),
    [
        (0.5, 0.5, True),
        (0.509, 0.5, True),
        (0.511, 0.5, False),
        (0.489, 0.5, False),
        (None, 0.5, False),
        (1.01, 1.01, False),
        (None, None, True),  # without a peak none may be shown
        (0.1, None, False),
    ],
)
def test_the_utilisation_must_be_that_of_the_script(share, own, ok):
    shown = snapshot(model_flop_utilisation=share)
    flops, peak = (1, None) if own is None else (round(own / 10 * PEAK), PEAK)
    assert shown_utilisation(shown, flops, TIMING, peak).ok is ok
    assert shown_utilisation(None, flops, TIMING, peak).ok is False


@pytest.mark.parametrize(("rate", "ok"), [(10.05, True), (10.2, False), (None, False)])
def test_the_rate_must_be_that_of_the_script(rate, ok):
    shown = snapshot(throughput=Throughput(steps_per_s=rate))
    assert shown_rate(shown, TIMING, rehearsal=False).ok is ok


def test_the_last_snapshot_of_the_measured_steps_is_compared():
    measured = [snapshot(global_step=step) for step in (7, 100, 105, 106)]
    ended = snapshot(global_step=100, state=RunState.STOPPED)
    assert last_before([*measured, ended], 105) is measured[2]
    assert last_before([snapshot()], 105) is None
