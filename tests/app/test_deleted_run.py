"""The screen of a run whose directory goes away, by a deletion elsewhere, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.app.live.frame import Frame
from ltui.app.live.run_poller import PollerThread, RunPoller
from ltui.app.presentation.run_view import note_lines
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.find_run import find_deleted, move_to_bin, restore
from tests.stored_runs import stored_run
from tests.waiting import wait_for


@pytest.mark.parametrize("opened_before", [True, False])
def test_it_says_so_and_how_to_get_the_run_back(private_home: Path, opened_before: bool) -> None:
    run_dir = stored_run(private_home, "calm-fox-1a2b")
    posted: list[Frame] = []

    def until(wanted: Callable[[Frame], object]) -> Frame:
        seen = len(posted)
        return wait_for(
            lambda: posted[-1] if len(posted) > seen else None,
            wanted=lambda frame: frame is not None and wanted(frame),
        )  # type: ignore[return-value]

    feed = PollerThread(lambda: RunPoller(run_dir), posted.append, run_id=run_dir.id)
    if not opened_before:
        move_to_bin(run_dir)
    feed.start()
    try:
        if opened_before:
            until(lambda f: f.error is None and f.snapshot.state is RunState.FINISHED)
            move_to_bin(run_dir)
        gone = until(lambda f: f.error)
        time.sleep(2.0)
        since = posted.index(gone)
        said = {note_lines(frame) for frame in posted[since:]}
        assert said == {
            (
                "The run's directory is gone: it was deleted. "
                "To bring it back: ltui restore calm-fox-1a2b",
            )
        }
        assert not {frame.snapshot.state for frame in posted[since:]} & LIVE
        restore(find_deleted(private_home, run_dir.id))
        until(lambda f: f.error is None and f.snapshot.state is RunState.FINISHED)
    finally:
        feed.stop()
        feed.join(60)
