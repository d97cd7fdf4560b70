"""The poller on real files: queues that other processes write, logs, a store not there yet."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.live.run_poller import (
    FASTEST_S,
    MAX_CPU_FRACTION,
    SLOWEST_S,
    FramePacer,
    PollerThread,
    RunPoller,
)
from ltui.training.config.run_spec import RunSpec
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.store.histories import StepRow, begin, snapshot, step_row
from tests.waiting import wait_for


@pytest.fixture
def run_dir(private_home: Path) -> RunDir:
    found = RunDir(private_home / "runs" / "calm-fox-1a2b")
    for folder in (found.path, found.logs_dir(1), found.queue_dir(1)):
        folder.mkdir(parents=True)
    found.write_spec(
        RunSpec(
            id="calm-fox-1a2b", name="calm-fox", created_at=time.time(), cwd="/", python="python3"
        )
    )
    return found


@contextmanager
def polled(
    run_dir: RunDir, requests: LatestCurveRequest | None = None
) -> Iterator[Callable[[Callable[[Frame], bool]], Frame]]:
    """Yield a function that polls a run until a frame is as wanted."""
    poller = RunPoller(run_dir, requests or LatestCurveRequest())

    def until(true: Callable[[Frame], bool]) -> Frame:
        def poll() -> Frame:
            return poller.poll(time.time(), time.monotonic_ns())

        return wait_for(poll, wanted=true, period_s=0.1)

    try:
        yield until
    finally:
        poller.close()


def test_a_run_without_a_history_is_no_error_and_its_logs_are_followed(run_dir: RunDir) -> None:
    with polled(run_dir) as until:
        frame = until(lambda _: True)
        assert frame.error is None
        assert frame.curves == {}
        (run_dir.logs_dir(1) / "rank-00001.log").write_bytes(b"\x1b[31mhello\x1b[0m\n")
        frame = until(lambda f: f.log_count > 0)
        assert [(line.rank, line.text) for line in frame.log] == [(1, "hello")]


def test_a_damaged_store_is_said_and_the_rest_goes_on(run_dir: RunDir) -> None:
    posted: list[Frame] = []
    run_dir.db_path.write_bytes(b"this is no database at all" * 100)
    feed = PollerThread(lambda: RunPoller(run_dir), posted.append, run_id=run_dir.id)
    feed.start()
    try:
        shown = wait_for(lambda: next((f for f in posted if f.error), None))
    finally:
        feed.stop()
        feed.join(60)
    assert shown is not None
    assert shown.snapshot.id == run_dir.id


def test_a_feed_whose_watch_fails_tells_so_with_its_age_and_recovers() -> None:
    posted: list[Frame] = []

    class Broken:
        broken = True

        def poll(self, now: float, now_ns: int) -> Frame:
            if self.broken:
                raise RuntimeError("nothing works")
            return posted_good

        def close(self) -> None:
            self.closed = True

    poller = Broken()
    feed = PollerThread(lambda: poller, posted.append, run_id="calm-fox-1a2b")
    posted_good = feed._last
    feed.start()
    try:
        wait_for(lambda: len(posted) >= 3)
        assert {f.error for f in posted} == {"nothing works"}
        assert len({f.error_since for f in posted}) == 1
        poller.broken = False
        wait_for(lambda: posted[-1].error is None)
    finally:
        feed.stop()
        feed.join(60)
    assert poller.closed


def test_the_dashboard_needs_no_torch() -> None:
    code = (
        "import sys, ltui.app.textual_app, ltui.app.screens.run, ltui.app.screens.home;"
        "import ltui.app.launch.build_spec, ltui.app.live.run_requests;"
        "import ltui.training.lifecycle.launch_run;"
        "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_curves_are_read_on_request_and_a_part_in_detail(run_dir: RunDir) -> None:
    store = StoreWriter(run_dir.db_path)
    begin(store)
    for first in range(1, 30_001, 5000):
        rows: list[StepRow] = []
        for step in range(first, first + 5000):
            row = step_row(step, 1.0 / step, 100.0 + step)
            row[StepField.LR] = 0.1
            row[StepField.MEMORY_BYTES] = 2e9
            rows.append((0, step, row))
        store.commit(1, Batch(steps=rows))
    ended = snapshot(id=run_dir.id, name="calm-fox", state=RunState.FINISHED, attempt=1)
    store.write_snapshot(ended)
    store.close()
    requests = LatestCurveRequest()
    with polled(run_dir, requests) as until:
        frame = until(lambda f: "train/loss" in f.curves)
        assert "step/memory_bytes" in frame.curve_names
        assert "step/memory_bytes" not in frame.curves
        coarse = frame.curves["train/loss"]
        requests.request = CurveRequest(names=frozenset({"train/loss", "step/memory_bytes"}))
        frame = until(lambda f: "step/memory_bytes" in f.curves)
        assert frame.curves["step/memory_bytes"].mean[-1] == 2e9
        requests.request = CurveRequest(names=frozenset({"train/loss"}), steps=(1000, 1999))
        before = frame.curves_version
        fine = until(lambda f: f.curves_version != before).curves["train/loss"]
        inside = (fine.steps >= 1000) & (fine.steps <= 1999)
        assert fine.steps[inside].tolist() == list(range(1000, 2000))
        assert np.sum((coarse.steps >= 1000) & (coarse.steps <= 1999)) < 100
        assert np.all(np.diff(fine.steps) > 0)
        requests.request = CurveRequest()
        until(lambda f: len(f.curves["train/loss"]) == len(coarse))


def test_frames_that_cost_more_come_less_often() -> None:
    cheap, middle, costly = FramePacer(), FramePacer(), FramePacer()
    assert cheap.period_s(0.001) == costly.period_s(0.5) == FASTEST_S
    for _ in range(30):
        fast, period, slow = cheap.period_s(0.001), middle.period_s(0.01), costly.period_s(0.5)
    assert fast == FASTEST_S
    assert slow == pytest.approx(SLOWEST_S, rel=0.01)
    # So that the cost of a frame is the agreed share of the time to the next one.
    assert 0.01 / period == pytest.approx(MAX_CPU_FRACTION, rel=0.01)
