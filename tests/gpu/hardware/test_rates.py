"""The section ``throughput``: what is judged, and how the time is divided."""

from __future__ import annotations

import pytest

from tests.gpu.hardware.section import run_section
from tests.gpu.hardware.throughput import Pair, judged, lengthened
from tests.gpu.hardware.timed_training import GPT_MODEL, RESNET, Plan, batch_that_fits

RATIO = "gpt: throughput with ltui / without, median of the pairs"
OWN_RATE = "gpt: rate of these steps in ltui's history / the script's, least like 1"
NOISE = "gpt: noise: a run without ltui / the one before it, least to most"
GB = 1e9


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_rehearsal_measures_the_same_steps_as_ltui(tmp_path):
    checks = run_section("tests.gpu.hardware.throughput", tmp_path, rehearsal=True, limit_s=480.0)
    ok = {check.what: check.ok for check in checks}
    assert False not in ok.values(), [check for check in checks if check.ok is False]
    assert ok[OWN_RATE]


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
    assert [batch_that_fits(model, 139 * GB) for model in (GPT_MODEL, RESNET)] == [32, 256]
    assert [batch_that_fits(model, 7.5 * GB) for model in (GPT_MODEL, RESNET)] == [4, 32]
    assert [batch_that_fits(model, 1 * GB) for model in (GPT_MODEL, RESNET)] == [1, 1]
