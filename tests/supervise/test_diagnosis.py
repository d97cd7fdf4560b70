"""A diagnosis at any time: healthy, without a supervisor that answers, and after the end."""

from __future__ import annotations

import os
import re
import signal

import pytest

from ltui.app.diagnosis.request_diagnosis import request_diagnosis
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE

from .conftest import Runs


@pytest.mark.slow
def test_a_run_can_be_diagnosed_at_any_time(runs: Runs) -> None:
    run = runs.training()
    healthy = request_diagnosis(run).diagnosis
    assert healthy.verdicts == ()
    assert healthy.headline.startswith("Healthy")
    assert healthy.evidence is not None
    assert set(healthy.evidence.ranks) == {0, 1}

    holder = lock_holder(run.lock_path)
    assert holder is not None
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        hung = request_diagnosis(run).diagnosis
    finally:
        os.kill(holder.pid, signal.SIGCONT)
    assert any("does not answer" in text for text in hung.missing)

    os.kill(holder.pid, signal.SIGKILL)
    answer = request_diagnosis(run)
    assert answer.snapshot.state in LIVE
    assert answer.diagnosis.headline.startswith("Healthy")

    pid = runs.until(run, lambda s: len(s.ranks) == 2).ranks[1].pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    runs.ended(run)
    ended = request_diagnosis(run).diagnosis
    # The engine kills the other in the same moment, so that it may be named too.
    assert all(1 in v.culprits for v in ended.verdicts)
    assert {v.level for v in ended.verdicts} == {"dead"}
    assert re.search(r"ranks? (0 and )?1\b.*(SIGKILL|gone|killed)", ended.headline)
