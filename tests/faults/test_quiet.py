"""A healthy run is never accused; ``make zoo`` listens to many kinds for more than ten minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.quiet import QUIET, listen


@pytest.mark.timeout(300)
def test_a_run_with_validation_that_comes_to_its_end_is_never_accused() -> None:
    (quiet,) = (q for q in QUIET if q.id == "to_the_end")
    shorter = replace(quiet, env={**quiet.env, "ZOO_BATCHES": "60"}, seconds=200, ranks=2)
    silence = listen(shorter)
    assert silence.error is None, silence.error
    assert not silence.said
