"""Tests of faults of many kinds in real runs: the right rank, place and cause is reported.

``make zoo`` runs all of them and measures the seconds; here nothing is timed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.faults.catalogue import BY_ID
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
        ("exc_one_rank",),
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
