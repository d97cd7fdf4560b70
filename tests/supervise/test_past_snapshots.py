"""The record of past snapshots of real supervisors equals what they have published."""

from __future__ import annotations

import time

from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.past.reader import PastReader
from ltui.training.store.past.snapshots import past_folder
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.supervise.conftest import Runs


def published_until(run: RunDir, count: int) -> dict[float, RunSnapshot]:
    """Return so many snapshots of a live run, by their times."""
    client = ControlClient(run)
    published: dict[float, RunSnapshot] = {}
    while len(published) < count:
        snapshot = required(client.status())
        published[required(snapshot.taken_at)] = snapshot
        time.sleep(0.1)
    return published


def test_snapshots_of_both_attempts_are_found_in_the_past(runs: Runs) -> None:
    run = runs.training("--save-every", "5")
    published = published_until(run, 12)
    ControlClient(run).request({"cmd": "stop"}, 20.0)
    first = runs.ended(run)
    assert first.state is RunState.STOPPED
    between = time.time()
    resume(run)
    runs.until(run, lambda s: s.attempt == 2 and s.state is RunState.RUNNING)
    published |= published_until(run, 12)
    ControlClient(run).request({"cmd": "stop"}, 20.0)
    runs.ended(run)

    reader = PastReader(past_folder(run))
    reader.refresh()
    equal = []
    for at, snapshot in published.items():
        moment = required(reader.at(at))
        assert 0 <= at - moment.at < 10
        if moment.at == at:
            assert moment.snapshot == snapshot
            equal.append(snapshot.attempt)
        assert moment.log_sizes
    # Each attempt has begun just before, so every tick was recorded.
    assert set(equal) == {1, 2}
    end = required(reader.at(between)).snapshot
    assert (end.state, end.attempt, end.detail) == (RunState.STOPPED, 1, first.detail)
    begin = required(reader.bounds())[0]
    assert required(reader.at(begin)).snapshot.state is RunState.STARTING
    last = required(reader.at(time.time())).snapshot
    assert (last.attempt, last.detail) == (2, resolve_snapshot(run).detail)
    assert reader.damage is None
    assert past_folder(run).stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in past_folder(run).iterdir()} == {0o600}
