"""The queue between real processes: killed writers, readers of two speeds, forked children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.tensor_queue.children import exit_code, fork, killed_at_every_line, run_child
from tests.tensor_queue.rows import drain, put_row
from tests.tensor_queue.test_ring import values_of
from tests.waiting import wait_for


def write(path: Path, last: int) -> None:
    """Put ``last`` records, each of which says its own number, with a pulse that says it too."""
    ring = RingWriter.create(path, 1 << 15)
    pulse = PulseWriter(ring.view)
    for number in range(last):
        put_row(ring, [number] * (number % 40), 1)
        pulse.set(phase=4 + number % 4, batch=number, epoch=number)


def read(path: Path, pause_s: float, last: int, answer: Path) -> None:
    """Read all records of ``write`` as they come, and write how many were seen and missed."""
    wait_for(path.exists, period_s=0.001)
    reader = QueueReader(path, from_seq=0)
    seen = missed = expected = 0
    deadline = time.monotonic() + 60
    while reader.next_seq < last and time.monotonic() < deadline:
        poll = reader.poll()
        missed += poll.missed
        for record in poll.records:
            assert record.seq >= expected
            assert values_of(record) == [record.seq] * (record.seq % 40)
            expected = record.seq + 1
        seen += len(poll.records)
        pulse = reader.pulse()
        assert pulse is None or pulse.batch == pulse.epoch
        time.sleep(pause_s)
    answer.write_text(json.dumps([seen, missed]))


@contextmanager
def writing_forever(path: Path) -> Iterator[int]:
    """A process that has begun to write to ``path``, until it is killed."""
    writer = fork(lambda: write(path, 1 << 60))
    try:
        wait_for(path.exists, period_s=0.001)
        yield writer
    finally:
        os.kill(writer, signal.SIGKILL)
        exit_code(writer)


def check_numbered(path: Path) -> int:
    """Every record says its own number, without a hole after the oldest; how many there are."""
    reader = QueueReader(path)
    records, missed = drain(reader)
    assert missed == 0
    seqs = [record.seq for record in records]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
    for record in records:
        assert values_of(record) == [record.seq] * (record.seq % 40)
    if seqs:
        pulse = reader.pulse()
        assert pulse is not None or seqs == [0]
        if pulse is not None:
            assert pulse.batch == pulse.epoch
            assert seqs[-1] - 1 <= pulse.batch <= seqs[-1]
    reader.close()
    return len(records)


def test_a_killed_writer_leaves_all_that_it_published(tmp_path: Path) -> None:
    counts = []
    for turn in range(25):
        path = tmp_path / f"q{turn}"
        with writing_forever(path):
            time.sleep(0.001 * (turn % 13))
        counts.append(check_numbered(path))
    assert max(counts) > 50


@pytest.mark.slow
def test_a_writer_killed_at_any_line_of_a_put(tmp_path: Path) -> None:
    def put(ring: RingWriter, numbers: range) -> None:
        for number in numbers:
            put_row(ring, [number] * (number % 40), 1)

    def prepare(path: Path) -> Callable[[], None]:
        ring = RingWriter.create(path, 4096)
        put(ring, range(60))
        return lambda: put(ring, range(60, 63))

    newest = set()
    for path in killed_at_every_line(tmp_path, "ring_writer.py", prepare):
        reader = QueueReader(path)
        records, missed = drain(reader)
        assert missed == 0
        seqs = [record.seq for record in records]
        assert seqs == list(range(seqs[0], seqs[-1] + 1))
        assert all(values_of(r) == [r.seq] * (r.seq % 40) for r in records)
        newest.add(seqs[-1])
        reader.close()
    assert newest == set(range(59, 63))


def test_two_readers_at_different_speeds(tmp_path: Path) -> None:
    path, answers, last = tmp_path / "q", [tmp_path / name for name in ("fast", "slow")], 40_000
    children = [
        fork(partial(read, path, pause_s, last, answer))
        for pause_s, answer in zip((0.0, 0.05), answers, strict=True)
    ]
    children.append(fork(lambda: write(path, last)))
    assert [exit_code(child) for child in children] == [0, 0, 0]
    for answer in answers:
        seen, missed = json.loads(answer.read_text())
        assert seen + missed == last
        assert seen > 0


def test_a_reader_while_its_file_is_lapped_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with writing_forever(path):
        reader = QueueReader(path, from_seq=0)
        seen = missed = 0
        expected = 0
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            poll = reader.poll(100)
            for record in poll.records:
                assert record.seq >= expected
                expected = record.seq + 1
                assert values_of(record) == [record.seq] * (record.seq % 40)
            seen += len(poll.records)
            missed += poll.missed
            assert seen + missed == reader.next_seq
        assert seen > 0
        reader.close()


def test_a_frozen_writer_stops_no_reader(tmp_path: Path) -> None:
    path = tmp_path / "q"
    with writing_forever(path) as writer:
        for _ in range(10):
            time.sleep(0.01)
            os.kill(writer, signal.SIGSTOP)
            check_numbered(path)
            os.kill(writer, signal.SIGCONT)


def test_the_readers_side_needs_no_torch_and_the_ring_no_numpy() -> None:
    program = """
import sys
import ltui.training.tensor_queue.control_block
import ltui.training.tensor_queue.pulse_block
import ltui.training.tensor_queue.ring_writer
assert "numpy" not in sys.modules and "torch" not in sys.modules
import ltui.training.tensor_queue.queue_reader
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_a_forked_child_that_unmaps_leaves_the_file(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    put_row(ring, [1.0], 1)
    run_child(ring.close)
    put_row(ring, [2.0], 1)
    records, missed = drain(QueueReader(tmp_path / "q"))
    assert ([values_of(record)[0] for record in records], missed) == ([1.0, 2.0], 0)
    ring.close()
