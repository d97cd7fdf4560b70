"""Mirrors of queue files: any order of puts, copies and losses gives the records or a gap."""

from __future__ import annotations

import os
import resource
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltui.training.lifecycle.rank_queue_poller import (
    FILES_FOR_OTHERS,
    QueuePoller,
    allow_queues_of,
    is_dead,
    rank_alive,
)
from ltui.training.nodes.queue_mirror import QueueMirror, QueueMirrors
from ltui.training.nodes.queue_tail import QueueChunk, QueuePosition, QueueTail, QueueTails
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.tensor_queue import queue_file
from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.queue_file import QueueFileError
from ltui.training.tensor_queue.queue_reader import QueueReader, Record
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.required import required
from tests.tensor_queue.rows import drain

NAME = "rank-00003.queue"
HOUR_NS = 3600 * 10**9


class Folders:
    """The queue folders of a node's agent and of the head."""

    def __init__(self, folder: Path) -> None:
        self.source, self.mirror = folder / "agent" / NAME, folder / "head" / NAME
        self.source.parent.mkdir(parents=True)
        self.mirror.parent.mkdir(parents=True)

    def open(self, capacity: int, node: int = 1) -> tuple[RingWriter, QueueTail, QueueMirror]:
        """Return the ring of a rank, its tail, and its mirror at the head."""
        ring = RingWriter.create(self.source, capacity)
        return ring, QueueTail(self.source), QueueMirror(self.mirror, node)

    def mirrored_pulse(self) -> PulseState:
        return required(QueueReader(self.mirror).pulse())


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "run")


def put(ring: RingWriter, number: int, size: int = 40) -> None:
    ring.put(7, number, bytes([number % 251]) * 5, (payload(number, size),), dtype=9, layout=1,
             shape=(size,))  # fmt: skip


def payload(number: int, size: int) -> bytes:
    return bytes([number % 253]) * size


def copy_all(tail: QueueTail, mirror: QueueMirror, limit: int = 1 << 20) -> None:
    """Exchange reports until the mirror has everything."""
    while True:
        before = mirror.position
        chunk = tail.chunk(before, limit)
        if chunk is None:
            return
        mirror.apply(chunk)
        if mirror.position == before:
            return


def test_a_mirror_has_the_same_bytes_at_the_same_positions(folders: Folders) -> None:
    ring, tail, mirror = folders.open(8192)
    for number in range(300):
        put(ring, number, number % 90)
        if number % 7 == 0:
            copy_all(tail, mirror)
    copy_all(tail, mirror)
    source, copy = folders.source.read_bytes(), folders.mirror.read_bytes()
    assert source[queue_file.RING_AT :] == copy[queue_file.RING_AT :]
    assert stat.S_IMODE(folders.mirror.stat().st_mode) == 0o600
    assert [path.name for path in folders.mirror.parent.iterdir()] == [NAME]
    records, _ = drain(QueueReader(folders.mirror))
    assert records[-1].seq == 299


@settings(max_examples=150)
@given(data=st.data())
def test_any_order_of_puts_and_copies_gives_the_records_or_counts_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Chunks are lost, repeated and reordered; acknowledgements are old; processes restart."""
    folders = Folders(tmp_path_factory.mktemp("mirror"))
    ring, tail, mirror = folders.open(data.draw(st.sampled_from([4096, 8192])), node=2)
    sizes: list[int] = []
    seen: list[Record] = []
    missed = 0
    reader: QueueReader | None = None
    in_flight: list[QueueChunk] = []
    acknowledged: QueuePosition | None = None
    actions = [*("put", "tail", "apply") * 2, "again", "acknowledge", "skip", "read", "lose"]
    actions += ["agent restarts", "head restarts"]
    for action in data.draw(st.lists(st.sampled_from(actions), max_size=60)):
        if action == "put":
            for size in data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=8)):
                put(ring, len(sizes), size)
                sizes.append(size)
        elif action == "skip":
            ring.skip()
            sizes.append(-1)
        elif action == "tail":
            limit = data.draw(st.sampled_from([64, 512, 1 << 20]))
            in_flight.append(required(tail.chunk(acknowledged, limit)))
        elif action in ("apply", "again") and in_flight:
            index = data.draw(st.integers(0, len(in_flight) - 1))
            mirror.apply(in_flight[index] if action == "again" else in_flight.pop(index))
        elif action == "lose" and in_flight:
            in_flight.pop()
        elif action == "acknowledge":
            acknowledged = mirror.position
        elif action == "agent restarts":
            tail.close()
            tail = QueueTail(folders.source)
        elif action == "head restarts":
            mirror.close()
            mirror = QueueMirror(folders.mirror, 2)
        elif action == "read" and folders.mirror.exists():
            reader = reader or QueueReader(folders.mirror, from_seq=0)
            poll = reader.poll(data.draw(st.integers(1, 9)))
            seen += poll.records
            missed += poll.missed
    put(ring, len(sizes), 10)
    sizes.append(10)
    copy_all(tail, mirror)
    reader = reader or QueueReader(folders.mirror, from_seq=0)
    rest, missed_last = drain(reader)
    seen += rest
    seqs = [record.seq for record in seen]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == len(sizes) - 1, "the newest record is always readable"
    for record in seen:
        assert record.payload == payload(record.seq, sizes[record.seq])
    assert len(seen) + missed + missed_last == len(sizes)
    for open_file in (ring, reader, tail, mirror):
        open_file.close()


def test_a_slow_connection_loses_nothing_that_the_ring_holds(folders: Folders) -> None:
    ring, tail, mirror = folders.open(1 << 16)
    for number in range(200):
        put(ring, number, 200)
    for _ in range(1000):
        chunk = required(tail.chunk(mirror.position, 512))
        assert len(chunk.data) <= 512
        mirror.apply(chunk)
        if not chunk.data:
            break
    records, missed = drain(QueueReader(folders.mirror, from_seq=0))
    assert ([r.seq for r in records], missed) == (list(range(200)), 0)


def test_what_was_overwritten_while_the_link_was_cut_is_counted(folders: Folders) -> None:
    ring, tail, mirror = folders.open(4096)
    for number in range(10):
        put(ring, number)
    copy_all(tail, mirror)
    reader = QueueReader(folders.mirror, from_seq=0)
    assert len(drain(reader)[0]) == 10
    for number in range(10, 500):
        put(ring, number)
    copy_all(tail, mirror)
    records, missed = drain(reader)
    assert records[-1].seq == 499
    assert missed == records[0].seq - 10 > 0
    assert len(records) > 4096 // 256, "everything that the ring still held"


def test_copies_of_a_rank_that_writes_all_the_time_are_never_torn(folders: Folders) -> None:
    ring, tail, mirror = folders.open(8192)
    count = 30_000

    def write() -> None:
        for number in range(count):
            put(ring, number, number % 200)

    thread = threading.Thread(target=write)
    put(ring, 0)
    mirror.apply(required(tail.chunk(None)))
    reader = QueueReader(folders.mirror, from_seq=0)
    thread.start()
    total = missed = 0
    records: list[Record] = []
    writing = True
    while writing or records:
        writing = thread.is_alive()  # asked first, so that the last records are read too
        mirror.apply(required(tail.chunk(mirror.position, 4096)))
        poll = reader.poll()
        records, missed = list(poll.records), missed + poll.missed
        total += len(records)
        for record in records:
            if record.seq:
                assert record.payload == payload(record.seq - 1, (record.seq - 1) % 200)
    thread.join()
    assert total + missed == count + 1
    assert total > 100


def test_a_restarted_rank_gets_a_new_mirror_after_the_last_records_of_the_old(
    folders: Folders,
) -> None:
    first = RingWriter.create(folders.source, 4096)
    tail, mirror = QueueTail(folders.source), QueueMirror(folders.mirror, 1)
    put(first, 0)
    copy_all(tail, mirror)
    poller = QueuePoller(folders.mirror.parent, {})
    assert [r.seq for r in poller.poll().polls[3].records] == [0]
    put(first, 1)  # the exception that ended the rank
    late = required(tail.chunk(mirror.position))
    second = RingWriter.create(folders.source, 8192)
    put(second, 0)
    put(second, 1)
    seqs = list[int]()
    for _ in range(4):
        mirror.apply(required(tail.chunk(mirror.position)))
        seqs += [r.seq for r in poller.poll().polls[3].records]
    assert seqs == [1, 2, 3]
    # A late copy of the first file changes nothing.
    mirror.apply(late)
    assert mirror.position == QueuePosition(late.file_id, late.end)
    copy_all(tail, mirror)
    assert not poller.poll().polls[3].records
    assert QueueReader(folders.mirror).capacity == 8192
    poller.close()
    first.close()
    second.close()


def test_restarts_while_the_link_is_cut_are_all_mirrored(folders: Folders) -> None:
    tail, mirror = QueueTail(folders.source), QueueMirror(folders.mirror, 1)
    poller = QueuePoller(folders.mirror.parent, {})
    for number in range(3):
        ring = RingWriter.create(folders.source, 4096)
        put(ring, number)
        ring.close()
        assert tail.chunk(None) is not None
    seqs = list[int]()
    for _ in range(8):
        mirror.apply(required(tail.chunk(mirror.position)))
        poll = poller.poll()
        seqs += [r.seq for p in poll.polls.values() for r in p.records]
    assert seqs == [0, 1, 2]
    poller.close()


def test_a_head_that_starts_again_continues_the_file(folders: Folders) -> None:
    ring = RingWriter.create(folders.source, 4096)
    tail = QueueTail(folders.source)
    inode = 0
    for number in range(40):
        mirror = QueueMirror(folders.mirror, 1)
        put(ring, number)
        chunk = required(tail.chunk(mirror.position))
        assert len(chunk.data) < 200, "only the new record"
        mirror.apply(chunk)
        inode = inode or folders.mirror.stat().st_ino
        mirror.close()
    assert folders.mirror.stat().st_ino == inode
    assert drain(QueueReader(folders.mirror))[0][-1].seq == 39


def test_times_are_those_of_this_machine(folders: Folders) -> None:
    ring, tail, mirror = folders.open(4096, node=5)
    pulse = PulseWriter(ring.view)
    pulse.set(pid=os.getpid(), start_ticks=1, rank=3, phase=Phase.FORWARD)
    ring.put(1, 10**12, b"", ())
    chunk = required(tail.chunk(None))
    mirror.apply(chunk, HOUR_NS, -90.0)
    reader, local = QueueReader(folders.mirror), required(QueueReader(folders.source).pulse())
    (record,) = reader.poll().records
    assert (record.t_ns, record.wall_offset_s) == (10**12 + HOUR_NS, -90.0)
    state = required(reader.pulse())
    assert (state.node, local.node) == (5, 0)
    assert state.changed_ns == local.changed_ns + HOUR_NS
    assert state.heartbeat_ns == local.heartbeat_ns + HOUR_NS
    assert state.changed_wall_s == pytest.approx(local.changed_wall_s - 90)
    mirror.apply(chunk, 2 * HOUR_NS, -60.0)
    reader.poll()
    assert required(reader.pulse()).changed_ns == local.changed_ns + 2 * HOUR_NS
    pulse.mute()
    ring.close()


def test_the_pid_of_another_node_is_no_process_here(folders: Folders) -> None:
    ring, tail, mirror = folders.open(4096)
    pulse = PulseWriter(ring.view)
    for pid in (os.getpid(), 2**22 - 1):
        pulse.set(pid=pid, start_ticks=7, rank=3)
        copy_all(tail, mirror)
        mirror.apply(required(tail.chunk(mirror.position)))
        state = folders.mirrored_pulse()
        assert (state.pid, state.outcome) == (pid, Outcome.RUNNING)
        assert not rank_alive(state)
        assert not is_dead(state)
    poll = QueuePoller(folders.mirror.parent, {}).poll()
    assert (poll.dead_ranks, poll.stopped_pids) == (frozenset(), {})
    pulse.mute()
    ring.close()


def test_an_old_pulse_never_replaces_a_newer_one(folders: Folders) -> None:
    ring, tail, mirror = folders.open(4096)
    pulse = PulseWriter(ring.view)
    chunks = []
    for step in range(6):
        pulse.set(global_step=step, pid=1)
        chunks.append(required(tail.chunk(None)))
    for index, newest in ((2, 2), (0, 2), (5, 5), (4, 5), (5, 5)):
        mirror.apply(chunks[index])
        assert folders.mirrored_pulse().global_step == newest
    mirror.close()
    mirror = QueueMirror(folders.mirror, 1)
    mirror.apply(chunks[3])
    assert folders.mirrored_pulse().global_step == 5
    pulse.mute()
    ring.close()


def test_a_rank_that_moves_between_nodes_has_the_file_of_its_last_worker(tmp_path: Path) -> None:
    """After an elastic restart a rank may run on another node, also on the head itself."""
    head = tmp_path / NAME
    rings = {}
    for node in (1, 2):
        (tmp_path / str(node)).mkdir()
        rings[node] = RingWriter.create(tmp_path / str(node) / NAME, 4096)
        put(rings[node], node)
    tails = {node: QueueTail(tmp_path / str(node) / NAME) for node in (1, 2)}
    mirrors = {node: QueueMirror(head, node) for node in (1, 2)}
    chunks = {node: required(tails[node].chunk(None)) for node in (1, 2)}
    for node in (1, 2, 1):
        mirrors[node].apply(chunks[node])
    ((record,), _) = drain(QueueReader(head))
    assert record.payload == payload(2, 40)
    local = RingWriter.create(head, 4096)
    put(local, 9)
    for node in (1, 2):
        again = QueueMirror(head, node)
        chunk = required(tails[node].chunk(None))
        again.apply(chunk)
        assert again.position == QueuePosition(chunk.file_id, chunk.end), "not sent again"
    ((record,), _) = drain(QueueReader(head))
    assert record.payload == payload(9, 40)


def test_a_full_disk_is_an_error_of_one_write(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = RingWriter.create(folders.source, 4096)
    mirrors, tails = QueueMirrors(folders.mirror.parent), QueueTails(folders.source.parent)
    put(ring, 0)
    mirrors.apply(1, tails.chunks(mirrors.positions(1)))
    put(ring, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        mirrors.apply(1, tails.chunks(mirrors.positions(1)))
    assert [r.seq for r in QueueReader(folders.mirror).poll().records] == [0]
    mirrors.apply(1, tails.chunks(mirrors.positions(1)))
    assert [r.seq for r in QueueReader(folders.mirror).poll().records] == [0, 1]
    mirrors.close()
    tails.close()


def test_only_files_that_the_head_has_in_full_are_removed(folders: Folders) -> None:
    ring = RingWriter.create(folders.source, 4096)
    mirrors, tails = QueueMirrors(folders.mirror.parent), QueueTails(folders.source.parent)
    put(ring, 0)
    mirrors.apply(1, tails.chunks(mirrors.positions(1)))
    behind = mirrors.positions(1)
    put(ring, 1)
    mirrors.apply(1, tails.chunks(behind))
    for missing in ({}, behind):
        tails.remove_acknowledged(missing)
        assert folders.source.exists()
    # Workers that were restarted: the head has the records of the first ones.
    again = RingWriter.create(folders.source, 4096)
    put(again, 2)
    tails.remove_acknowledged(mirrors.positions(1))
    assert folders.source.exists()
    mirrors.apply(1, tails.chunks(mirrors.positions(1)))
    tails.remove_acknowledged(mirrors.positions(1))
    assert not folders.source.exists()
    mirrors.close()
    tails.close()


def test_the_files_of_many_ranks_may_be_open_at_once() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
        allow_queues_of(8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
        allow_queues_of(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 3 * 100 + FILES_FOR_OTHERS
        allow_queues_of(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_files_without_an_origin_are_read_as_before(folders: Folders) -> None:
    """Files of earlier versions have zeros where the origin is."""
    ring = RingWriter.create(folders.source, 4096)
    put(ring, 4)
    with folders.source.open("r+b") as file:
        file.seek(queue_file.ORIGIN_AT)
        file.write(bytes(queue_file.ORIGIN.size))
    reader = QueueReader(folders.source)
    (record,) = reader.poll().records
    assert (record.t_ns, record.wall_offset_s) == (4, 0.0)
    tail, mirror = QueueTail(folders.source), QueueMirror(folders.mirror, 1)
    copy_all(tail, mirror)
    np.testing.assert_array_equal(
        QueueReader(folders.mirror).poll().records[0].payload, record.payload
    )


def test_invalid_chunks_are_refused(folders: Folders) -> None:
    good = QueueChunk(1, 2, 4096, 8, 0, 1, bytes(8), b"")
    good.check()
    for change in (
        {"capacity": 100},
        {"reserved": 0},
        {"start": 4},
        {"data": bytes(7)},
        {"file_id": -1},
        {"next_seq": -1},
        {"created_ns": 1 << 63},
    ):
        fields = {name: getattr(good, name) for name in QueueChunk.__struct_fields__} | change
        with pytest.raises(QueueFileError):
            QueueChunk(**fields).check()
    with pytest.raises(ValueError, match="node 0"):
        QueueMirror(folders.mirror, 0)
