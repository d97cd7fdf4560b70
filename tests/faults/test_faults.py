"""Tests of faults of many kinds in real runs: the right rank, place and cause is reported.

``make zoo`` runs all of them and healthy runs, and measures the seconds; here nothing is timed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.faults.catalogue import BY_ID
from tests.faults.quiet import QUIET, HealthyResult, watch_healthy_run
from tests.faults.table import Row, fault_table, misses, summary
from tests.faults.verdicts import Outcome, run_fault

PATIENCE_S = 90.0
_FIELDS = {
    "kind", "level", "culprits", "waiting", "place", "cause", "remedy", "confidence", "began",
    "ended", "evidence",
}  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "ids",
    [
        ("sigkill", "data_gil"),
        pytest.param(("worker_stop", "rank0_barrier"), marks=pytest.mark.slow),
        pytest.param(("two_faults", "nan"), marks=pytest.mark.slow),
        pytest.param(("group_order", "child_program"), marks=pytest.mark.slow),
        pytest.param(("exc_one_rank",), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_a_verdict_names_rank_place_and_cause(ids: tuple[str, ...]) -> None:
    faults = [replace(BY_ID[i], patience_s=PATIENCE_S, hold_s=1.0) for i in ids]
    with ThreadPoolExecutor(max_workers=len(faults)) as pool:
        outcomes = list(pool.map(run_fault, faults))
    for outcome in outcomes:
        _assert_right(outcome)


def _assert_right(outcome: Outcome) -> None:
    text = f"{outcome.fault.id}: {outcome.last}"
    assert outcome.error is None, f"{text}\n{outcome.error}"
    assert outcome.cause_s is not None, f"never right: {text}"
    assert not outcome.wrong, f"falsely accused: {outcome.wrong}"
    assert outcome.held, f"was right and did not stay so: {text}"
    assert outcome.shown is not None
    for verdict in outcome.shown["verdicts"]:
        assert verdict.keys() >= _FIELDS
        assert all(type(r) is int for r in (*verdict["culprits"], *verdict["waiting"]))
        assert not set(verdict["culprits"]) & set(verdict["waiting"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_healthy_run_with_validation_gets_no_verdict() -> None:
    (quiet,) = (q for q in QUIET if q.id == "to_the_end")
    shorter = replace(quiet, env={**quiet.env, "ZOO_BATCHES": "60"}, seconds=200, ranks=2)
    result = watch_healthy_run(shorter)
    assert result.error is None, result.error
    assert not result.verdicts


# -- the table of the catalogue, and its exit code -------------------------------------------------


def _row(fault_id: str, *seconds: float | None, **fields: object) -> Row:
    fault = BY_ID[fault_id]
    made = [Outcome(fault, culprit_s=s, cause_s=s, **fields) for s in seconds]  # type: ignore[arg-type]
    return Row(fault, made)


def test_every_miss_is_counted_and_reported() -> None:
    rows = [
        _row("sigstop", 1.2),
        _row("data_sleep", 4.0, 4.4),
        _row("sigkill", 3.0),  # later than its second
        _row("nan", None),
        _row("data_gil", 4.1, wrong=["frozen [0]"]),
        _row("term_forward", 7.0),
        _row("netdown", None, skipped="no namespaces"),
    ]
    assert misses(rows) == ["sigkill", "nan", "data_gil"]
    table = fault_table(rows, {})
    assert "| SIGSTOP to a rank | 1.2 |" in table
    assert "| stuck in the dataset | 4.2 (most 4.4) |" in table
    assert "| loss is NaN from one rank | MISSED |" in table
    assert "| SIGTERM to one rank | no fault: stops with a checkpoint |" in table
    assert "| network down between the ranks | skipped: no namespaces |" in table
    text = summary(rows, [HealthyResult(QUIET[0], watched_s=90.0)])
    assert "Faults: 6, runs of them: 7; right culprit 5, right cause 5; skipped 1." in text
    assert "median 4.0, most 4.4" in text
    assert "later than their bound: sigkill, nan, data_gil." in text
    assert "Quiet zoo: 1 runs, 1.5 minutes of training; no verdict." in text


def test_a_verdict_on_a_healthy_run_is_reported() -> None:
    loud = HealthyResult(QUIET[1], watched_s=30.0, verdicts=["slow straggler"])
    assert f"NOT quiet: {QUIET[1].id}" in summary([], [loud])
