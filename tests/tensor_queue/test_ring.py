"""The ring and its readers in one process: order, laps, late readers, limits, damage. No torch."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltui.training.tensor_queue import queue_file
from ltui.training.tensor_queue.queue_file import QueueFileError
from ltui.training.tensor_queue.queue_reader import QueueReader, Record
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.tensor_queue.rows import drain, put_row

ROW = 16


def values_of(record: Record) -> list[float]:
    """Return the payload of a record that holds a vector of numbers."""
    assert isinstance(record.array, np.ndarray)
    values: list[float] = record.array.tolist()
    return values


def put_numbered(ring: RingWriter, number: int, *, label_bytes: int = 0, size: int = 0) -> None:
    """A record that says everywhere which one it is: ``expected_of`` knows what must come out."""
    label, payload = expected_of(number, label_bytes, size)
    ring.put(7, number, label, (payload,), dtype=9, layout=1, shape=(size,))


def expected_of(number: int, label_bytes: int, size: int) -> tuple[bytes, bytes]:
    return bytes([number % 251]) * label_bytes, bytes([number % 253]) * size


def test_rows_come_out_as_they_went_in(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 1 << 16)
    reader = QueueReader(tmp_path / "q")
    assert reader.poll().records == ()
    put_row(ring, [float(i) for i in range(ROW)], 1)
    put_row(ring, [], 2)
    (row, empty) = reader.poll().records
    assert (row.seq, row.kind, row.dtype, row.label) == (0, 1, "float64", b"")
    np.testing.assert_array_equal(row.array, np.arange(float(ROW)))
    assert (empty.seq, empty.kind, empty.shape) == (1, 2, (0,))
    assert reader.next_seq == 2
    ring.close()
    reader.close()


def test_the_file_is_private_and_never_seen_half_made(tmp_path: Path) -> None:
    RingWriter.create(tmp_path / "q", (1 << 20) - 100).close()
    status = (tmp_path / "q").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 1 << 20, "the blocks are taken when it is made"
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["q"]
    assert QueueReader(tmp_path / "q").capacity == 1 << 20


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "inside").touch()
    with pytest.raises(OSError, match="q"):
        RingWriter.create(tmp_path / "q", 4096)
    assert {path.name for path in tmp_path.iterdir()} <= {"q", "home"}
    with pytest.raises(ValueError, match="too small"):
        RingWriter.create(tmp_path / "small", 100)


@settings(max_examples=60)
@given(
    capacity=st.sampled_from([4096, 8192, 1 << 16]),
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1500)), min_size=1, max_size=120),
    polls=st.lists(st.integers(0, 119), max_size=12),
    limit=st.integers(1, 50),
)
def test_records_are_read_as_written_and_lost_ones_are_counted(
    tmp_path_factory: pytest.TempPathFactory,
    capacity: int,
    sizes: list[tuple[int, int]],
    polls: list[int],
    limit: int,
) -> None:
    path = tmp_path_factory.mktemp("ring") / "q"
    ring = RingWriter.create(path, capacity)
    reader = QueueReader(path, from_seq=0)
    seen: list[Record] = []
    missed = 0
    for number, (label_bytes, size) in enumerate(sizes):
        put_numbered(ring, number, label_bytes=label_bytes, size=size)
        if number in polls:
            poll = reader.poll(limit)
            assert len(poll.records) <= limit
            seen += poll.records
            missed += poll.missed
    rest, missed_last = drain(reader, limit)
    seen += rest
    for record in seen:
        assert (record.label, record.payload) == expected_of(record.seq, *sizes[record.seq])
        assert record.t_ns == record.seq
    seqs = [record.seq for record in seen]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == len(sizes) - 1, "the newest record is always readable"
    assert len(seen) + missed + missed_last == len(sizes)
    ring.close()
    reader.close()


def test_a_late_reader_starts_at_the_oldest_and_counts_only_what_it_asked_for(
    tmp_path: Path,
) -> None:
    ring = RingWriter.create(tmp_path / "q", 8192)
    for number in range(1000):
        put_row(ring, [number] * ROW, 1)
    late, missed = drain(QueueReader(tmp_path / "q"))
    assert missed == 0
    assert [record.seq for record in late] == list(range(late[0].seq, 1000))
    assert len(late) >= 8192 // 256
    asking, missed = drain(QueueReader(tmp_path / "q", from_seq=10))
    assert [r.seq for r in asking] == [r.seq for r in late]
    assert missed == late[0].seq - 10
    resumed, missed = drain(QueueReader(tmp_path / "q", from_seq=995))
    assert ([r.seq for r in resumed], missed) == ([995, 996, 997, 998, 999], 0)
    ring.close()


def test_a_record_may_fill_the_ring_and_no_more(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    reader = QueueReader(tmp_path / "q")
    put_row(ring, [1.0], 1)
    largest = 4096 - queue_file.RECORD_BYTES - 8
    with pytest.raises(ValueError, match="does not fit the queue's 4096 bytes"):
        put_numbered(ring, 1, size=largest + 1)
    put_numbered(ring, 1, size=largest)
    ((record,), missed) = drain(reader)
    assert (record.seq, record.payload, missed) == (1, expected_of(1, 0, largest)[1], 0)
    put_row(ring, [2.0], 1)
    ((record,), missed) = drain(reader)
    assert (record.seq, missed) == (2, 0)
    ring.close()


def test_records_larger_than_a_readers_chunk(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4 << 20)
    sizes = [10, 300_000, 262_144, 0, 900_000, 262_000, 1, 40_000]
    for number, size in enumerate(sizes):
        put_numbered(ring, number, size=size)
    records, missed = drain(QueueReader(tmp_path / "q", from_seq=0))
    assert [record.payload for record in records] == [
        expected_of(number, 0, size)[1] for number, size in enumerate(sizes)
    ]
    assert missed == 0
    ring.close()


def test_a_skipped_number_is_missed_even_with_nothing_behind_it(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    reader = QueueReader(tmp_path / "q", from_seq=0)
    put_row(ring, [1.0], 1)
    ring.skip()
    poll = reader.poll()
    assert (len(poll.records), poll.missed, reader.next_seq) == (1, 1, 2)
    ring.close()


def test_a_restarted_rank_replaces_its_file_and_the_old_one_can_be_drained(tmp_path: Path) -> None:
    first = RingWriter.create(tmp_path / "q", 4096)
    reader = QueueReader(tmp_path / "q")
    put_row(first, [1.0], 1)
    assert not reader.replaced()
    second = RingWriter.create(tmp_path / "q", 4096)
    put_row(second, [2.0], 1)
    assert reader.replaced()
    assert values_of(reader.poll().records[0])[0] == 1.0
    assert values_of(QueueReader(tmp_path / "q").poll().records[0])[0] == 2.0
    first.close()
    second.close()


# Damage


def written(tmp_path: Path, count: int = 60, capacity: int = 8192) -> bytes:
    path = tmp_path / "whole"
    ring = RingWriter.create(path, capacity)
    for number in range(count):
        put_numbered(ring, number, label_bytes=number % 9, size=(number * 37) % 400)
    ring.close()
    return path.read_bytes()


def check_never_wrong(path: Path, count: int) -> int:
    """Everything delivered is as it was put; only ``QueueFileError`` may be raised."""
    seqs: list[int] = []
    missed = 0
    try:
        reader = QueueReader(path, from_seq=0)
    except QueueFileError:
        return -1
    try:
        reader.pulse()
        records, missed = drain(reader)
    except QueueFileError:
        return -1
    finally:
        reader.close()
    for record in records:
        label, payload = expected_of(record.seq, record.seq % 9, (record.seq * 37) % 400)
        assert (record.label, record.payload, record.kind) == (label, payload, 7)
        seqs.append(record.seq)
    assert seqs == sorted(set(seqs))
    assert len(seqs) + missed <= count
    return len(seqs)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_bytes_anywhere_never_give_a_wrong_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    content = bytearray(written(folder))
    live = st.integers(0, 256) | st.integers(queue_file.RING_AT, len(content) - 1)
    anywhere = live | st.integers(0, len(content) - 1)
    for at, value in data.draw(st.lists(st.tuples(anywhere, st.integers(0, 255)), max_size=8)):
        content[at] = value
    if data.draw(st.booleans()):
        start = data.draw(st.integers(queue_file.RING_AT, len(content) - 200))
        content[start : start + 200] = data.draw(st.binary(min_size=200, max_size=200))
    (folder / "q").write_bytes(content)
    check_never_wrong(folder / "q", 60)


def test_one_damaged_record_costs_one_record(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 1 << 16)
    for number in range(20):
        put_row(ring, [number] * ROW, 1)
    ring.close()
    size = queue_file.align8(queue_file.RECORD_BYTES + 8 + 8 * ROW)
    for damaged in (0, 7, 19):
        for offset in range(0, size, 5):
            content = bytearray((tmp_path / "q").read_bytes())
            content[queue_file.RING_AT + damaged * size + offset] ^= 0x41
            (tmp_path / "bad").write_bytes(content)
            records, missed = drain(QueueReader(tmp_path / "bad", from_seq=0))
            numbers = [record.seq for record in records]
            assert (numbers, missed) == ([n for n in range(20) if n != damaged], 1)


def test_a_torn_commit_leaves_the_one_before(tmp_path: Path) -> None:
    content = bytearray(written(tmp_path, count=8))
    newest = queue_file.SLOTS_AT[8 & 1]
    content[newest : newest + 8] = (9).to_bytes(8, "little")
    (tmp_path / "q").write_bytes(content)
    records, missed = drain(QueueReader(tmp_path / "q", from_seq=0))
    assert ([record.seq for record in records], missed) == (list(range(7)), 0)


@pytest.mark.parametrize("size", [600, 1000])
def test_what_the_writer_reserved_is_void_though_it_still_looks_whole(
    tmp_path: Path, size: int
) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    for number in range(60):
        put_row(ring, [number] * ROW, 1)
    before, _ = drain(QueueReader(tmp_path / "q"))
    ring._reserve(size)
    after, missed = drain(QueueReader(tmp_path / "q", from_seq=before[0].seq))
    assert after[-1].seq == 59
    assert 0 < missed < len(before)
    assert [r.seq for r in after] == list(range(before[0].seq + missed, 60))
    ring.close()


def test_records_of_an_earlier_lap_are_never_taken_for_new_ones(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    size = queue_file.align8(queue_file.RECORD_BYTES + 8 + 8 * ROW)
    for number in range(2 * 4096 // size + 3):
        put_row(ring, [number] * ROW, 1)
    ring.close()
    content = bytearray((tmp_path / "q").read_bytes())
    reader = QueueReader(tmp_path / "q")
    newest = reader.poll().records[-1].seq
    _, position, _ = max(queue_file.SLOT.unpack_from(content, at) for at in queue_file.SLOTS_AT)
    # As if four more had been committed where whole records of the lap before still stand.
    committed = (newest + 5, position + 4 * size)
    for at in queue_file.SLOTS_AT:
        queue_file.SLOT.pack_into(content, at, *committed, queue_file.check_word(*committed))
    (tmp_path / "q").write_bytes(content)
    poll = reader.poll()
    assert (poll.records, poll.missed) == ((), 4)


def test_a_file_of_a_newer_layout_is_refused_by_name(tmp_path: Path) -> None:
    content = bytearray(written(tmp_path))
    struct.pack_into("<I", content, 8, queue_file.LAYOUT_VERSION + 1)
    (tmp_path / "q").write_bytes(content)
    with pytest.raises(QueueFileError, match="newer ltui"):
        QueueReader(tmp_path / "q")


@pytest.mark.parametrize("content", [b"", b"x", b"LTUIRING", bytes(9000), b"GIF89a" * 999])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "q").write_bytes(content)
    with pytest.raises(QueueFileError, match="not a tensor queue"):
        QueueReader(tmp_path / "q")


def test_a_truncated_file_is_an_error_before_and_while_it_is_read(tmp_path: Path) -> None:
    content = written(tmp_path)
    (tmp_path / "short").write_bytes(content[:-1])
    with pytest.raises(QueueFileError, match="truncated"):
        QueueReader(tmp_path / "short")
    for kept in (0, 100, queue_file.PULSE_AT + 10, queue_file.RING_AT + 64):
        (tmp_path / "q").write_bytes(content)
        reader = QueueReader(tmp_path / "q")
        os.truncate(tmp_path / "q", kept)
        with pytest.raises(QueueFileError, match="truncated"):
            drain(reader)
        if kept < queue_file.RING_AT:
            with pytest.raises(QueueFileError, match="truncated"):
                reader.pulse()
        reader.close()


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        QueueReader(tmp_path / "none")
