"""The queue between real processes: killed writers, readers of two speeds, forked children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.tensor_queue.children import killed_at_every_line, run_child, start_child
from tests.tensor_queue.rows import drain, put_row
from tests.tensor_queue.test_ring import values_of
from tests.waiting import wait_for

WRITE_FOREVER = """
import sys
from pathlib import Path
from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.tensor_queue.rows import put_row
ring = RingWriter.create(Path(sys.argv[1]), 1 << 15)
pulse = PulseWriter(ring.view)
number = 0
last = int(sys.argv[2])
while number < last:
    size = number % 40
    put_row(ring, [number] * size, 1)
    pulse.set(phase=4 + number % 4, batch=number, epoch=number)
    number += 1
"""

READ = """
import json, sys, time
from pathlib import Path
from ltui.training.tensor_queue.queue_reader import QueueReader
path, pause, last = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
deadline = time.monotonic() + 60
print("ready", flush=True)
while not path.exists():
    time.sleep(0.001)
reader = QueueReader(path, from_seq=0)
seen = missed = polls = 0
expected = 0
while reader.next_seq < last and time.monotonic() < deadline:
    poll = reader.poll()
    polls += 1
    missed += poll.missed
    for record in poll.records:
        assert record.seq >= expected and record.array.tolist() == [record.seq] * (record.seq % 40)
        expected = record.seq + 1
    seen += len(poll.records)
    pulse = reader.pulse()
    assert pulse is None or pulse.batch == pulse.epoch
    time.sleep(pause)
print(json.dumps({"seen": seen, "missed": missed, "polls": polls}))
"""


@contextmanager
def writing_forever(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to write to ``path``, until it is killed."""
    writer = start_child(WRITE_FOREVER, path, 1 << 60)
    try:
        wait_for(path.exists, writer, period_s=0.001)
        yield writer
    finally:
        writer.kill()
        writer.communicate(timeout=30)


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
    program = """
from tests.tensor_queue.rows import put_row
ring = RingWriter.create(Path(sys.argv[1]), 4096)
for number in range(60):
    put_row(ring, [number] * (number % 40), 1)
die_at("ring_writer.py")
for number in range(60, 63):
    put_row(ring, [number] * (number % 40), 1)
"""
    newest = set()
    for path in killed_at_every_line(
        tmp_path, "from ltui.training.tensor_queue.ring_writer import RingWriter", program
    ):
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
    last = 40_000
    path = tmp_path / "q"
    readers = [start_child(READ, path, pause, last) for pause in (0.0, 0.05)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    writer = start_child(WRITE_FOREVER, path, last)
    try:
        answers = [json.loads(reader.communicate(timeout=90)[0]) for reader in readers]
    finally:
        for child in (*readers, writer):
            child.kill()
            child.communicate(timeout=30)
    for answer in answers:
        assert answer["seen"] + answer["missed"] == last
        assert answer["seen"] > 0


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
            os.kill(writer.pid, signal.SIGSTOP)
            check_numbered(path)
            os.kill(writer.pid, signal.SIGCONT)


def test_the_readers_side_needs_no_torch_and_the_ring_no_numpy() -> None:
    program = """
import sys
import ltui.training.tensor_queue.control_block
import ltui.training.tensor_queue.pulse_block
import ltui.training.tensor_queue.ring_writer
assert "numpy" not in sys.modules and "torch" not in sys.modules
import ltui.training.tensor_queue.queue_reader
print("torch" in sys.modules)
"""
    assert run_child(program) == "False\n"


def test_a_forked_child_that_unmaps_leaves_the_file(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    put_row(ring, [1.0], 1)
    child = os.fork()
    if child == 0:
        ring.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    put_row(ring, [2.0], 1)
    records, missed = drain(QueueReader(tmp_path / "q"))
    assert ([values_of(record)[0] for record in records], missed) == ([1.0, 2.0], 0)
    ring.close()
