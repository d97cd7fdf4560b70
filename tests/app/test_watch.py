"""The poller on real files: queues that other processes write, logs, a store not there yet."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ltui.app.live.frame import Frame
from ltui.app.live.metric_history import CurveRequest, LatestCurveRequest
from ltui.app.live.poller_thread import (
    FASTEST_S,
    MAX_CPU_FRACTION,
    SLOWEST_S,
    FramePacer,
    PollerThread,
)
from ltui.app.live.run_poller import RunPoller
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.record_types import StepField
from tests.store.histories import StepRow, begin, snapshot, step_row
from tests.waiting import wait_for

# Writes as a rank does, one command a line: "steps FIRST LAST", "metric STEP VALUE", "pulse STEP".
RANK = """
import json, os, sys, time
from pathlib import Path
from ltui.training.tensor_queue.record_types import RecordKind, Phase, StepField
from ltui.training.tensor_queue.queue_writer import QueueWriter
from ltui.training.rank.channel import own_start_ticks
import torch
from array import array
rank = int(sys.argv[2])
q = QueueWriter.create(Path(sys.argv[1]))
step_row = q.row(RecordKind.STEP, len(StepField))
row, nothing = step_row.fields, memoryview(array("d", [float("nan")] * len(StepField)))
hello = {"rank": rank, "local_rank": rank, "world_size": 2, "pid": os.getpid(), "device": "cpu"}
q.put(None, RecordKind.HELLO, json.dumps(hello).encode())
q.pulse.set(
    pid=os.getpid(), start_ticks=own_start_ticks(), rank=rank, local_rank=rank, world_size=2,
    phase=Phase.SETUP,
)
print("ready", flush=True)
for line in sys.stdin:
    word, *values = line.split()
    if word == "steps":
        for step in range(int(values[0]), int(values[1]) + 1):
            row[:] = nothing
            row[StepField.GLOBAL_STEP], row[StepField.EPOCH], row[StepField.BATCH] = step, 0, step
            row[StepField.SAMPLES], row[StepField.STEP_S], row[StepField.FETCH_S] = 32, 0.1, 0.02
            row[StepField.LOSS], row[StepField.WALL_S] = 1.0 / step, time.time()
            step_row.publish(time.monotonic_ns())
        q.pulse.set(phase=Phase.FORWARD, epoch=0, batch=int(values[1]), global_step=int(values[1]))
    elif word == "metric":
        label = {"names": ["val_loss"], "step": int(values[0]), "epoch": 0, "t": time.time()}
        value = torch.tensor([float(values[1])], dtype=torch.float64)
        q.put(value, RecordKind.METRICS, json.dumps(label).encode())
    print("done", flush=True)
"""


class Writer:
    """One rank's queue, written by a process of its own."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.answer() == "done"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


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


@pytest.fixture
def ranks(run_dir: RunDir) -> Iterator[list[Writer]]:
    writers = [Writer(run_dir.queue_dir(1) / f"rank-{i:05d}.queue", i) for i in range(2)]
    try:
        for writer in writers:
            assert writer.answer() == "ready"
        yield writers
    finally:
        for writer in writers:
            writer.end()


def poll(poller: RunPoller) -> Frame:
    return poller.poll(time.time(), time.monotonic_ns())


def until(poller: RunPoller, true: Callable[[Frame], bool]) -> Frame:
    return wait_for(lambda: poll(poller), wanted=true, period_s=0.1)


def test_live_ranks_are_seen_without_a_supervisor(run_dir: RunDir, ranks: list[Writer]) -> None:
    poller = RunPoller(run_dir)
    try:
        for writer in ranks:
            writer.say("steps 1 20")
        ranks[0].say("metric 20 0.5")
        frame = until(poller, lambda f: "val_loss" in f.curves)
        assert not frame.supervisor_answers
        assert frame.snapshot.state in LIVE
        loss = frame.curves["train/loss"]
        assert loss.steps.tolist() == list(range(1, 21))
        assert loss.mean == pytest.approx(1.0 / np.arange(1, 21))
        assert frame.curves["val_loss"].mean.tolist() == [0.5]
        assert frame.rates[None].mean == pytest.approx([640.0])
        assert set(frame.curve_names) >= {"train/loss", "val_loss", "step/lr", "step/seconds"}
        assert [r.rank for r in frame.snapshot.ranks] == [0, 1]
        assert {r.pid for r in frame.snapshot.ranks} == {w.process.pid for w in ranks}
        assert all(r.phase == "forward" for r in frame.snapshot.ranks)
        assert all(r.age_s is not None and 0 <= r.age_s < 60 for r in frame.snapshot.ranks)
        assert frame.snapshot.global_step == 20

        version = frame.curves_version
        assert poll(poller).curves_version == version
        ranks[0].say("steps 21 21")
        frame = until(poller, lambda f: f.curves_version > version)
        assert frame.curves["train/loss"].steps[-1] == 21
        # Rank 1 has not done step 21: no total may be made of half of it.
        assert frame.rates[None].steps[-1] == 20
    finally:
        poller.close()


def test_an_unfinished_queue_is_no_error_and_is_found_later(run_dir: RunDir) -> None:
    path = run_dir.queue_dir(1) / "rank-00000.queue"
    path.write_bytes(b"")
    poller = RunPoller(run_dir)
    try:
        frame = poll(poller)
        assert frame.error is None
        assert frame.curves == {}
    finally:
        poller.close()


def test_logs_are_followed(run_dir: RunDir) -> None:
    poller = RunPoller(run_dir)
    try:
        (run_dir.logs_dir(1) / "rank-00001.log").write_bytes(b"\x1b[31mhello\x1b[0m\n")
        frame = until(poller, lambda f: f.log_count > 0)
        assert [(line.rank, line.text) for line in frame.log] == [(1, "hello")]
    finally:
        poller.close()


def test_a_damaged_store_is_said_and_the_rest_goes_on(run_dir: RunDir, private_home: Path) -> None:
    posted: list[Frame] = []
    run_dir.db_path.write_bytes(b"this is no database at all" * 100)
    feed = PollerThread(lambda: RunPoller(run_dir), posted.append, run_id=run_dir.id)
    feed.start()
    try:
        deadline = time.monotonic() + 90
        while not any(f.error for f in posted):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        feed.stop()
        feed.join(60)
    shown = next(f for f in posted if f.error)
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
        deadline = time.monotonic() + 90
        while len(posted) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert {f.error for f in posted} == {"nothing works"}
        assert len({f.error_since for f in posted}) == 1
        poller.broken = False
        while posted[-1].error is not None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        feed.stop()
        feed.join(60)
    assert poller.closed


def test_the_dashboard_needs_no_torch() -> None:
    code = (
        "import sys, ltui.app.textual_app, ltui.app.screens.run, ltui.app.screens.home;"
        "import ltui.app.launch.check_and_launch, ltui.app.live.run_requests;"
        "import ltui.training.lifecycle.launch_run;"
        "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ},
    )  # fmt: skip
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
    poller = RunPoller(run_dir, requests)
    try:
        frame = until(poller, lambda f: "train/loss" in f.curves)
        assert "step/memory_bytes" in frame.curve_names
        assert "step/memory_bytes" not in frame.curves
        coarse = frame.curves["train/loss"]
        requests.request = CurveRequest(names=frozenset({"train/loss", "step/memory_bytes"}))
        frame = until(poller, lambda f: "step/memory_bytes" in f.curves)
        assert frame.curves["step/memory_bytes"].mean[-1] == 2e9
        requests.request = CurveRequest(names=frozenset({"train/loss"}), steps=(1000, 1999))
        before = frame.curves_version
        frame = until(poller, lambda f: f.curves_version != before)
        fine = frame.curves["train/loss"]
        inside = (fine.steps >= 1000) & (fine.steps <= 1999)
        assert fine.steps[inside].tolist() == list(range(1000, 2000))
        assert np.sum((coarse.steps >= 1000) & (coarse.steps <= 1999)) < 100
        assert np.all(np.diff(fine.steps) > 0)
        requests.request = CurveRequest()
        frame = until(poller, lambda f: len(f.curves["train/loss"]) == len(coarse))
    finally:
        poller.close()


def test_restarted_ranks_are_followed_in_their_new_queue_files(
    run_dir: RunDir, ranks: list[Writer]
) -> None:
    """Torch elastic restarts its workers within one attempt: each rank creates another file."""
    poller = RunPoller(run_dir)
    paths = [run_dir.queue_dir(1) / f"rank-{i:05d}.queue" for i in range(2)]
    try:
        for writer in ranks:
            writer.say("steps 1 20")
        until(poller, lambda f: f.snapshot.global_step == 20 and bool(f.curves))
        inodes = [path.stat().st_ino for path in paths]
        for number in (1, 0):
            restarted = Writer(paths[number], number)
            ranks[number].end()
            ranks[number] = restarted
            assert restarted.answer() == "ready"
        assert all(path.stat().st_ino not in inodes for path in paths)
        for writer in ranks:
            writer.say("steps 11 15")
        frame = until(
            poller,
            lambda f: [r.pid for r in f.snapshot.ranks] == [w.process.pid for w in ranks],
        )
        assert [r.global_step for r in frame.snapshot.ranks] == [15, 15]
        frame = until(poller, lambda f: bool(f.curves))
        assert frame.curves["train/loss"].steps.tolist() == list(range(11, 16))
    finally:
        poller.close()


def test_an_ended_run_keeps_its_state(run_dir: RunDir, ranks: list[Writer]) -> None:
    poller = RunPoller(run_dir)
    try:
        for writer in ranks:
            writer.say("steps 1 5")
        until(poller, lambda f: f.snapshot.state in LIVE and bool(f.curves))
        for writer in ranks:
            writer.end()
        frame = until(poller, lambda f: f.snapshot.state not in LIVE)
        assert frame.snapshot.state in (RunState.LOST, RunState.CRASHED, RunState.FAILED)
        assert frame.curves["train/loss"].steps[-1] == 5
    finally:
        poller.close()


def test_frames_that_cost_more_come_less_often() -> None:
    cheap, costly = FramePacer(), FramePacer()
    assert cheap.period_s(0.001) == costly.period_s(0.5) == FASTEST_S
    for _ in range(30):
        fast, slow = cheap.period_s(0.001), costly.period_s(0.5)
    assert fast == FASTEST_S
    assert slow == pytest.approx(SLOWEST_S, rel=0.01)
    middle = FramePacer()
    for _ in range(30):
        period = middle.period_s(0.01)
    # So that the cost of a frame is the agreed share of the time to the next one.
    assert 0.01 / period == pytest.approx(MAX_CPU_FRACTION, rel=0.01)
