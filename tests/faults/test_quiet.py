"""Test that a healthy run gets no verdict. ``make zoo`` runs many kinds for over ten minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.quiet import QUIET, watch_healthy_run


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_healthy_run_with_validation_gets_no_verdict() -> None:
    (quiet,) = (q for q in QUIET if q.id == "to_the_end")
    shorter = replace(quiet, env={**quiet.env, "ZOO_BATCHES": "60"}, seconds=200, ranks=2)
    result = watch_healthy_run(shorter)
    assert result.error is None, result.error
    assert not result.verdicts
