"""From a rank's queue to the history: single, combined and lost values, and the queue files."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from ltui.training.lifecycle.rank_queue_poller import QueuePoller, remove_stored_queues
from ltui.training.rank import metric_records
from ltui.training.rank.channel import Channel
from ltui.training.rank.metric_records import MetricSender
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.state.metric_name_patterns import THROUGHPUT, TOTAL_RANK
from ltui.training.state.record_fold import FoldState, fold_many
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.history_recorder import HistoryRecorder
from ltui.training.tensor_queue.queue_reader import QueueReader
from tests.required import required
from tests.store.histories import begin, run_dir


class Recorded:
    """A rank's channel, and what a supervisor makes of its queue."""

    def __init__(self, folder: Path, queue_bytes: int = 1 << 20) -> None:
        self.run: RunDir = run_dir(folder)
        environment = {
            "LTUI_RUN_DIR": str(self.run.path),
            "LTUI_RUN_ID": self.run.id,
            "LTUI_ATTEMPT": "1",
            "LTUI_QUEUE_BYTES": str(queue_bytes),
        }
        self.channel = Channel(required(RankEnvironment.read(environment)), 0)
        self.sender = MetricSender(self.channel)
        self.store = StoreWriter(self.run.db_path)
        begin(self.store)
        self.fold = FoldState()
        self.open()

    def open(self) -> None:
        """Begin as a supervisor does, also one that follows a killed one."""
        self.queues = QueuePoller(self.run.queue_dir(1), self.store.cursors(1))
        self.recorder = HistoryRecorder(self.store, 1, self.queues)

    def record(self) -> None:
        polls = self.queues.poll().polls
        self.fold = fold_many(self.fold, polls)
        self.recorder.record(polls, Batch(), None, time.time())

    def close(self) -> None:
        self.queues.close()
        self.channel.close()
        self.store.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_every_value_is_in_the_history_and_in_the_best(recorded: Recorded) -> None:
    values = np.random.default_rng(0).normal(size=500).tolist()
    for step, value in enumerate(values, 1):
        recorded.sender.send({"loss": value, "twice": value * 2}, step, 0)
        if step % 100 == 0:
            recorded.record()
    with RunStore(recorded.run) as history:
        rows = [(row.step, row.value) for row in history.export(["loss"])]
    assert rows == list(enumerate(values, 1))
    metric = recorded.fold.ranks[0].metrics["loss"]
    assert (metric.best_min, metric.best_max, metric.last) == (min(values), max(values), values[-1])
    recorded.close()


def test_combined_values_keep_their_extremes_and_are_counted(recorded: Recorded) -> None:
    names = [f"m{n}" for n in range(1500)]
    for step in range(1, 9):
        recorded.sender.send(dict.fromkeys(names, float(step)), step, 0)
        recorded.record()
        recorded.queues.close()
        recorded.open()  # a supervisor that is replaced counts each value once
    assert recorded.recorder.combined_values == 8 * 1500
    with RunStore(recorded.run) as history:
        rows = list(history.export(["m7"]))
        curve = history.curve("m7", max_points=1)
    exported = [(r.first_step, r.step, r.value, r.low, r.high, r.count) for r in rows]
    assert exported == [
        (1, 2, 1.5, 1, 2, 2), (3, 4, 3.5, 3, 4, 2), (5, 6, 5.5, 5, 6, 2), (7, 8, 7.5, 7, 8, 2),
    ]  # fmt: skip
    assert (curve.mean[0], curve.low[0], curve.high[0], curve.count[0]) == (4.5, 1, 8, 8)
    metric = recorded.fold.ranks[0].metrics["m7"]
    assert (metric.best_min, metric.best_max, metric.last, metric.step) == (1, 8, 8, 8)
    recorded.close()


def test_closed_windows_weigh_combined_values(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_records, "MAX_VALUES", 1)
    for step in range(1, 200):
        recorded.sender.send({"a": float(step), "b": 0.0}, step, 0)
    recorded.sender.send({"a": 1000.0}, 199, 0)
    recorded.sender.flush()
    recorded.record()
    with contextlib.closing(sqlite3.connect(recorded.run.db_path)) as db:
        first = db.execute(
            "SELECT first_step, last_step, value_n, value_mean, value_low, value_high "
            "FROM sample_windows JOIN names ON names.id = name_id "
            "WHERE name = 'a' AND level = 64 ORDER BY win LIMIT 1"
        ).fetchone()
    assert first == (1, 62, 62, 31.5, 1.0, 62.0)
    recorded.close()


def test_records_that_a_full_queue_dropped_are_counted_and_named(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, queue_bytes=1 << 16)
    for step in range(1, 1001):
        if step <= 10 or step == 1000:
            recorded.record()
        recorded.sender.send({"loss": float(step)}, step, 0)
    recorded.record()
    with RunStore(recorded.run) as history:
        steps = [row.step for row in history.export(["loss"])]
        (event,) = [event for event in history.events() if "lost_records" in event.data]
    assert steps == sorted(set(steps))
    assert steps[-1] == 1000
    lost = 1000 - len(steps)
    assert lost > 100
    assert f"{lost:,} of rank 0" in event.text
    assert recorded.recorder.note == f"records lost: {lost}"
    recorded.open()
    assert recorded.recorder.note == f"records lost: {lost}"
    recorded.close()


# The queue files of ended attempts.


def test_a_queue_file_is_removed_when_the_history_has_its_records_and_its_end(
    recorded: Recorded,
) -> None:
    (path,) = recorded.run.queue_dir(1).glob("*.queue")
    recorded.sender.send({"loss": 1.0}, 1, 0)
    recorded.record()
    remove_stored_queues(recorded.run, recorded.store)
    assert path.exists(), "the attempt has not ended"
    recorded.sender.send({"loss": 0.5}, 2, 0)
    recorded.store.end_attempt(1, 1.0)
    remove_stored_queues(recorded.run, recorded.store)
    assert path.exists(), "the last record is nowhere else"
    recorded.record()
    reader = QueueReader(path)  # as of an open dashboard
    remove_stored_queues(recorded.run, recorded.store)
    assert not path.exists()
    assert len(reader.poll().records) == 2
    reader.close()
    recorded.close()


def test_a_queue_file_of_another_rank_process_or_a_damaged_one_is_kept(recorded: Recorded) -> None:
    (path,) = recorded.run.queue_dir(1).glob("*.queue")
    recorded.sender.send({"loss": 1.0}, 1, 0)
    recorded.record()
    recorded.store.end_attempt(1, 1.0)
    restarted = Channel(recorded.channel.environment, 0)
    MetricSender(restarted).send({"loss": 3.0}, 1, 0)
    damaged = path.with_name("rank-00001.queue")
    damaged.write_bytes(b"nothing")
    remove_stored_queues(recorded.run, recorded.store)
    assert path.exists()
    assert damaged.exists()
    restarted.close()
    recorded.close()


def test_throughput_measured_while_the_disk_is_full_is_written_later(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queues of the ranks do not hold it, unlike their records."""

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def measure(step: int) -> None:
        point = (TOTAL_RANK, step, THROUGHPUT, step, 0, time.time(), 8.0)
        recorded.recorder.record({}, Batch(samples=[point]), None, time.time())

    with monkeypatch.context() as disk:
        disk.setattr(recorded.store, "commit", full)
        measure(1)
        measure(2)
    assert "disk full" in required(recorded.recorder.note)
    monkeypatch.setattr(recorded.recorder, "_retry_at", 0.0)
    measure(3)  # the store works again
    measure(4)
    with RunStore(recorded.run) as history:
        assert history.curve(THROUGHPUT, rank=TOTAL_RANK).steps.tolist() == [1, 2, 3, 4]
        assert history.metric_names() == []
    recorded.close()
