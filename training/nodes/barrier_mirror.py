"""Copy the rows of the step consensus (``rank/coordination/step_consensus.py``) between nodes.

Every node has a table with rows for all ranks. A rank writes the row of its own in the table of its
node; this module writes the other rows. The head merges what the agents send and sends the result
to all of them. A copy may be late, repeated, or overtaken by a later one. It is merged as follows:

- Every word of a row only grows, so the larger value is kept.
- A rank stores what it has seen, then its state, then that it acted, then its next state. So a copy
  reads in the order seen, state, acted, and stores in the opposite order. Whoever reads a row of
  the copy never concludes more than a reader of the row itself could have.
- Rank 0's request is read before the rows and stored after them. Nobody sees a request with a row
  of rank 0 that is older than it.
- The planned stop is a small record with a version, and the newer version is kept. It is read after
  the rows and stored before them. Nobody sees rank 0 at a boundary without the plan that it
  followed there.
- The row of a rank whose process runs on this node is never written.

A table belongs to the workers that were started together. It is recognised by the world size and
the worker group in its name; the copy of another table is ignored.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from ltui.training.lifecycle.rank_queue_poller import DIR_SETTLED_NS
from ltui.training.rank.coordination.step_consensus import DEPARTED, BarrierTable, is_alive

_NAME = re.compile(r"agree-\d+-(\d+)-(\d+)\.bin")
_OPEN_READ_S = 0.02
"""Seconds for which the answer to "are rows needed" is reused, for many nodes at once."""
_PROCESS_CHECK_S = 0.5
"""Least seconds between two checks that the processes of this node's ranks are alive."""
_ROW = BarrierTable.ROW
SEEN, STATE, ACTED, RESULT, GONE, PID = (
    BarrierTable.SEEN,
    BarrierTable.STATE,
    BarrierTable.ACTED,
    BarrierTable.RESULT,
    BarrierTable.GONE,
    BarrierTable.PID,
)
_COLUMNS = (SEEN, STATE, ACTED, RESULT, GONE)
"""Words of a row that are copied, in the order in which they are read."""


class Words(Protocol):
    """The words of a table: a ``memoryview`` of int64."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __len__(self) -> int: ...


class StopPlanCopy(NamedTuple):
    """The planned stop in a table. Version 0 is no plan."""

    version: int = 0
    stop_at: int = 0
    epochs: int = 0


class TableCopy(Struct, frozen=True):
    """Header and some rows of a table. The columns are in the order of ``ranks``."""

    request: int
    """Number and action of rank 0's request as one word; 0 if rank 0's row is not included."""
    control_id: int
    plan: StopPlanCopy
    ranks: Sequence[int]
    columns: Sequence[Sequence[int]]
    """One column for each of ``_COLUMNS``."""


class TableKey(NamedTuple):
    """By which the tables of one start of the workers are recognised on every node."""

    world_size: int
    worker_group: int


def read_rows(words: Words, ranks: Iterable[int]) -> TableCopy:
    """Copy the rows of ``ranks``, and the header if rank 0 is among them."""
    ranks = list(ranks)
    has_header = 0 in ranks
    request = words[BarrierTable.REQUEST] if has_header else 0
    control_id = words[BarrierTable.CONTROL_ID] if has_header else 0
    columns = [[words[_ROW * (1 + rank) + word] for rank in ranks] for word in _COLUMNS]
    return TableCopy(
        request, control_id, _read_plan(words) if has_header else StopPlanCopy(), ranks, columns
    )


def merge_rows(words: Words, copy: TableCopy) -> None:
    """Store what is newer in ``copy``."""
    plan = copy.plan
    if plan.version > words[BarrierTable.PLAN_VERSION]:
        words[BarrierTable.STOP_AT], words[BarrierTable.STOP_EPOCHS] = plan.stop_at, plan.epochs
        words[BarrierTable.PLAN_VERSION] = plan.version
    rows = [_ROW * (1 + rank) for rank in copy.ranks]
    for word, values in zip(reversed(_COLUMNS), reversed(copy.columns), strict=True):
        for row, value in zip(rows, values, strict=True):
            if value > words[row + word] and not words[row + PID]:
                words[row + word] = value
    if copy.request >> 4 > words[BarrierTable.REQUEST] >> 4:
        words[BarrierTable.CONTROL_ID] = copy.control_id
        words[BarrierTable.REQUEST] = copy.request


def pack_copy(key: TableKey, copy: TableCopy, *, is_waiting: bool = False) -> bytes:
    """Return the frame of a copy.

    ``is_waiting`` says that ranks of the sender may wait for the rows of other nodes.
    """
    # The rows of many ranks are mostly equal, so they take a few hundred bytes.
    return zlib.compress(msgspec.msgpack.encode((key, copy, is_waiting)), 1)


def unpack_copy(frame: bytes) -> tuple[TableKey, TableCopy, bool]:
    """Return the table, the copy, and if the sender's ranks may wait for rows.

    Raises ``ValueError`` if the frame is not valid.
    """
    try:
        stream = zlib.decompressobj()
        key, copy, is_waiting = _FRAME.decode(stream.decompress(frame, _FRAME_BYTES))
    except (ValueError, RecursionError, zlib.error) as error:
        raise ValueError("a copy of the barrier table is damaged") from error
    if (
        not stream.eof
        or [len(column) for column in copy.columns] != [len(copy.ranks)] * len(_COLUMNS)
        or any(not 0 <= rank < key.world_size for rank in copy.ranks)
    ):
        raise ValueError("a copy of the barrier table is damaged")
    return key, copy, is_waiting


_FRAME = msgspec.msgpack.Decoder(tuple[TableKey, TableCopy, bool])
_FRAME_BYTES = 64 << 20
"""Maximum size of a frame that is not compressed; 100,000 ranks need a tenth of it."""


def needs_exchange(words: Words) -> bool:
    """Return True if ranks wait, or may soon wait, for the rows of other nodes.

    The rows should then be exchanged many times a second. There is an open request, or ranks have
    saved a checkpoint and others not yet, or ranks wait at a planned stop.
    """
    number = words[BarrierTable.REQUEST] >> 4
    is_planned = words[BarrierTable.STOP_AT] or words[BarrierTable.STOP_EPOCHS]
    results = _column(words, RESULT)
    if not is_planned and max(results) == min(results) and min(_column(words, ACTED)) >= number:
        return False  # The usual case, without a look at each row.
    saves, numbers, waits = set[int](), set[int](), False
    for state, acted, result, gone in zip(
        *(_column(words, word) for word in (STATE, ACTED, RESULT, GONE)), strict=True
    ):
        if state != DEPARTED and not gone:
            numbers.add(acted)
            saves.add(result >> 1)
            waits = waits or (state > 0 and not state & 1)
    return min(numbers, default=number) < number or len(saves) > 1 or (bool(is_planned) and waits)


def missing_ranks(words: Words, *, is_requested: bool = False) -> list[int]:
    """Return the ranks for which the others wait; empty if none waits for another.

    They wait until all have read the open request, then until all have saved the checkpoint.
    ``is_requested``: rank 0 is to publish a request, but may itself wait in a collective for ranks
    that have passed fewer boundaries.
    """
    number = words[BarrierTable.REQUEST] >> 4
    seen, states, acted, results, gone = (_column(words, word) for word in _COLUMNS)
    ranks = [r for r, state in enumerate(states) if state != DEPARTED and not gone[r]]
    furthest = max((states[r] for r in ranks), default=0)
    if any(acted[r] < number for r in ranks):
        is_awaited = any(seen[r] >= number and not states[r] & 1 for r in ranks)
        late = [r for r in ranks if states[r] < furthest or (is_awaited and seen[r] < number)]
        return [r for r in late if acted[r] < number]
    saves = max((results[r] >> 1 for r in ranks), default=0)
    unsaved = [r for r in ranks if results[r] >> 1 < saves]
    return unsaved or [r for r in ranks if is_requested and states[r] < furthest]


class BarrierMirror:
    """The newest barrier table of one attempt on this node, for its supervisor or agent.

    ``source`` is the number of the other node in each call. Safe to use from threads.
    """

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir`` is the folder of the attempt's queues. The table need not exist yet."""
        self._dir = queue_dir
        self._dir_changed_ns = -1
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        self._words: memoryview | None = None
        self._key = TableKey(0, 0)
        self._merged: dict[int, bytes] = {}
        self._waiting_sources: set[int] = set()
        self._processes_read_s = self._open_read_s = 0.0
        self._is_open = False
        self._exported = b"", b""
        self._lock = threading.Lock()

    def request(self) -> list[int] | None:
        """Return the words that rank 0 writes for all ranks; None if there is no table."""
        with self._lock:
            words = self._table()
            return None if words is None else words[:4].tolist()

    def is_open(self) -> bool:
        """Return True if ranks may be waiting for copies, so that these should be fast."""
        with self._lock:
            return self._needs_exchange(self._table())

    def export(self, source: int = 0) -> bytes:
        """Return a frame for another node; empty if there is no table yet.

        It has the rows of this node. The node of rank 0 sends the rows of all ranks while ranks
        wait for them, here or on the other node, and else only rank 0's.
        """
        with self._lock:
            words = self._table()
            if words is None or self._map is None:
                return b""
            self._observe_processes(words)
            is_open = self._needs_exchange(words)
            pids = _column(words, PID)
            if not pids[0]:
                own = [rank for rank, pid in enumerate(pids) if pid]
                return pack_copy(self._key, read_rows(words, own), is_waiting=is_open)
            if not is_open and source not in self._waiting_sources:
                return pack_copy(self._key, read_rows(words, [0]), is_waiting=is_open)
            content = self._map[:]
            if content != self._exported[0]:
                frame = pack_copy(self._key, read_rows(words, range(len(pids))), is_waiting=is_open)
                self._exported = content, frame
            return self._exported[1]

    def merge(self, frame: bytes, source: int = 0) -> bool:
        """Merge a frame of another node. Return False if this node has no such table (yet).

        Raises ``ValueError`` if the frame is not valid.
        """
        with self._lock:
            words = self._table()
            if words is None or not frame:
                return False
            if frame == self._merged.get(source):
                return True
            key, copy, is_waiting = unpack_copy(frame)
            if key != self._key:
                return False
            merge_rows(words, copy)
            self._merged[source] = frame
            (self._waiting_sources.add if is_waiting else self._waiting_sources.discard)(source)
            if is_waiting or copy.request:
                self._open_read_s = 0.0  # This node's answer to "are rows needed" may change.
            return True

    def missing_ranks(self, *, is_requested: bool = False) -> list[int]:
        """Return the ranks for which the others wait, as the function ``missing_ranks``."""
        with self._lock:
            words = self._table()
            if words is None or not (is_requested or self._needs_exchange(words)):
                return []
            return missing_ranks(words, is_requested=is_requested)

    def set_unreachable(self, nodes: int) -> None:
        """Store with how many nodes no rows can be exchanged now.

        The head calls it with the number of silent nodes, an agent with 1 while the head is silent.
        Rank 0 publishes no request meanwhile, because the other nodes would wait for it.
        """
        with self._lock:
            words = self._table()
            if words is not None and words[BarrierTable.UNREACHABLE] != nodes:
                words[BarrierTable.UNREACHABLE] = nodes

    def close(self) -> None:
        """Unmap the table. A second call has no effect."""
        with self._lock:
            self._unmap()

    def _needs_exchange(self, words: memoryview | None) -> bool:
        now_s = time.monotonic()
        if now_s - self._open_read_s > _OPEN_READ_S:
            self._open_read_s = now_s
            self._is_open = words is not None and needs_exchange(words)
        return self._is_open

    def _unmap(self) -> None:
        if self._words is not None and self._map is not None:
            self._words.release()
            self._map.close()
        self._path = self._words = self._map = None
        self._dir_changed_ns = -1

    def _table(self) -> memoryview | None:
        """Return the words of the newest table; None if no rank has created one."""
        with contextlib.suppress(OSError):
            changed_ns = os.stat(self._dir).st_mtime_ns
            if changed_ns != self._dir_changed_ns and self._open_newest():
                # A file that is created within the same tick of the clock does not change the time.
                is_old = time.time_ns() - changed_ns > DIR_SETTLED_NS
                self._dir_changed_ns = changed_ns if is_old else -1
        return self._words

    def _open_newest(self) -> bool:
        """Open the newest table. Return False if a table is just being created."""
        newest: tuple[int, Path, TableKey] | None = None
        complete = True
        for name in os.listdir(self._dir):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            path, key = self._dir / name, TableKey(int(match[1]), int(match[2]))
            with path.open("rb") as file:
                header = file.read(8 * _ROW)
                size = os.fstat(file.fileno()).st_size
            created_ns = int.from_bytes(header[8 * BarrierTable.CREATED_NS :][:8], "little")
            if size < 8 * _ROW * (1 + key.world_size) or not created_ns:
                complete = False
            elif newest is None or created_ns > newest[0]:
                newest = created_ns, path, key
        if newest is not None and newest[1] != self._path:
            self._unmap()
            _, self._path, self._key = newest
            with self._path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 8 * _ROW * (1 + self._key.world_size))
            self._words = memoryview(self._map).cast("q")
            self._merged.clear()
            self._waiting_sources.clear()
            self._exported, self._open_read_s = (b"", b""), 0.0
        return complete

    def _observe_processes(self, words: memoryview) -> None:
        """Store which ranks of this node have ended, for the ranks of the other nodes."""
        now_s = time.monotonic()
        if now_s - self._processes_read_s < _PROCESS_CHECK_S:
            return
        self._processes_read_s = now_s
        for rank, pid in enumerate(_column(words, PID)):
            if pid and not is_alive(pid):
                words[_ROW * (1 + rank) + GONE] = 1


def _column(words: Words, word: int) -> list[int]:
    """Return one word of each row."""
    if isinstance(words, memoryview):
        column: list[int] = words[_ROW + word :: _ROW].tolist()
        return column
    return [words[at] for at in range(_ROW + word, len(words), _ROW)]


def _read_plan(words: Words) -> StopPlanCopy:
    version = words[BarrierTable.PLAN_VERSION]
    plan = StopPlanCopy(version, words[BarrierTable.STOP_AT], words[BarrierTable.STOP_EPOCHS])
    if version & 1 or words[BarrierTable.PLAN_VERSION] != version:
        return StopPlanCopy()  # Rank 0 is writing it.
    return plan
