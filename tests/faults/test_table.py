"""Tests of the table of the fault catalogue, and of its exit code."""

from __future__ import annotations

from tests.faults.catalogue import BY_ID
from tests.faults.quiet import QUIET, HealthyResult
from tests.faults.table import Row, fault_table, misses, summary
from tests.faults.verdicts import Outcome


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
