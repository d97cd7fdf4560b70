"""Step consensus: all ranks act at the same place without a collective.

Every rank passes the same *boundaries* in the same order: the end of each batch in which the
optimizer stepped, of each validation batch, and of each epoch. Each rank has one word in shared
memory with its state: *passed P* while it runs after boundary P, *waiting at P* while it waits
there.

Without a request, a rank that reaches P stores "passed P" and continues. That takes two memory
accesses for each boundary. Rank 0 publishes a request in the header. Then a rank that reaches P
stores that it has read the request, stores "waiting at P" and reads the rows of all ranks:

- A rank has passed P. It may wait for this rank further on, so this rank proceeds to the next
  boundary.
- All ranks have read the request and wait at P. This rank acts. A rank that did not wait at P has
  not stored that it did, so no rank can have passed P once all states are "waiting at P", and a
  rank leaves P only by acting.
- A rank has already acted on this request. This rank acts too, because the other may have left P.
- Otherwise this rank waits. The missing ranks need nothing from it, because it has already done its
  part of everything up to P.

The rule does not depend on how far the device is. A rank that runs ahead of its GPU has queued its
part of every collective up to its boundary.

The rule holds as well if a rank reads old values of other rows. Every word of a row only grows, and
each conclusion above is about something that remains true. So every node of a run has a table with
the rows of all ranks, and ``nodes/barrier_mirror.py`` copies the rows of the other nodes' ranks
into it. A late copy delays a decision and never changes it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from enum import Enum, IntEnum
from pathlib import Path

_PART_BITS, _STEP_BITS, _FIT_BITS = 19, 30, 12
LAST_STEP = (1 << _STEP_BITS) - 1
"""A step after every step of a fit."""
DEPARTED = (1 << 62) + 1
"""State of a rank that takes part no more. Every other rank proceeds without it."""


STOP_AT_WORD = 2
"""Index in ``BarrierTable.words`` of the position of a planned stop."""
EPOCH_END = (1 << _PART_BITS) - 1
"""The ``part`` of a position between two epochs."""


class Action(IntEnum):
    """An action of all ranks at a boundary at which all of them wait."""

    NONE = 0
    STOP = 1
    PAUSE = 2
    CONTINUE = 3
    CHECKPOINT = 4
    PERIODIC = 5
    """A checkpoint that rank 0's clock requested."""
    BEST = 6
    """A checkpoint because rank 0 saw a best value of the metric."""


class Move(Enum):
    """The next step of a rank that waits at a boundary."""

    WAIT = "wait"
    PROCEED = "proceed"
    ACT = "act"


def boundary_position(fit: int, global_step: int, part: int = 0) -> int:
    """Return a boundary as a number that grows along the run.

    ``fit`` counts the calls of ``fit``, ``validate``, ``test`` and ``predict`` in this process.
    ``part`` is 0 for the end of a training step and ``1 + n`` for the n-th validation batch that
    follows it.
    """
    if part > EPOCH_END:
        part = EPOCH_END
    fit &= (1 << _FIT_BITS) - 1
    return ((fit << _STEP_BITS) + global_step << _PART_BITS) + part


def waiting_state(position: int) -> int:
    """Return the state "waiting at ``position``"."""
    return 2 * position


def passed_state(position: int) -> int:
    """Return the state "passed ``position``"."""
    return 2 * position + 1


def next_move(
    seen: Sequence[int], states: Sequence[int], acted: Sequence[int], position: int, request: int
) -> Move:
    """Apply the rule of this module for a rank that waits at ``position``.

    Each sequence has one number for each rank. They must be read in the order of the parameters:
    a rank that has seen the request stores its state after that, and that it acted before it
    passes.
    """
    if any(number >= request for number in acted):
        return Move.ACT
    waiting = waiting_state(position)
    if any(state > waiting for state in states):
        return Move.PROCEED
    ready = all(state == waiting for state in states) and all(n >= request for n in seen)
    return Move.ACT if ready else Move.WAIT


class BarrierTable:
    """The shared table: a header with the request, then a row for every rank.

    Words are 64-bit, aligned, and each is stored by one machine instruction (``memoryview`` of
    native int64). A row has a cache line of its own.
    """

    ROW = 8  # words
    REQUEST, CONTROL_ID, STOP_AT, STOP_EPOCHS, PLAN_VERSION, CREATED_NS, UNREACHABLE = range(7)
    """Words of the header. ``PLAN_VERSION`` is odd while rank 0 writes the plan. ``CREATED_NS`` is
    the time of the first rank by CLOCK_MONOTONIC. ``UNREACHABLE`` is written by the supervisor: the
    number of nodes with which no rows can be exchanged now."""
    STATE, ACTED, RESULT, PID, GONE, SEEN = range(6)
    """Words of a row. ``PID`` is 0 for a rank of another node. ``GONE`` is 1 if the agent of its
    node has found that the rank's process has ended. ``SEEN`` is the number of the
    last request that the rank has read at a boundary."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        size = 8 * self.ROW * (1 + world_size)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("q")
        self._row = self.ROW * (1 + rank)
        self.own_slot = self._row + self.STATE
        """Index in ``words`` of this rank's state."""
        for word in (self.STATE, self.RESULT, self.GONE, self.SEEN):
            self.words[self._row + word] = 0
        self.words[self._row + self.PID] = os.getpid()
        if not self.words[self.CREATED_NS]:
            self.words[self.CREATED_NS] = time.monotonic_ns()

    # The request, written only by rank 0.

    def request(self) -> tuple[int, Action]:
        """Return number and action of the current request; ``(0, NONE)`` before the first."""
        word = self.words[self.REQUEST]
        return word >> 4, Action(word & 15)

    def control_id(self) -> int:
        """Return the id of the control file's request that the current one answers.

        It is 0 for a request of rank 0 itself.
        """
        return self.words[self.CONTROL_ID]

    def publish(self, action: Action, control_id: int = 0) -> int:
        """Publish the next request and return its number."""
        number = (self.words[self.REQUEST] >> 4) + 1
        self.words[self.CONTROL_ID] = control_id
        self.words[self.REQUEST] = number << 4 | action
        return number

    def can_publish(self) -> bool:
        """Return True if the next request may be published.

        Every rank must have acted on the current one. While a node can't be reached, a request
        would make the other nodes wait for it.
        """
        return not self.words[self.UNREACHABLE] and self.all_acted()

    def all_acted(self) -> bool:
        """Return True if every rank acted on the current request, or takes part no more."""
        number = self.words[self.REQUEST] >> 4
        acted, states = self._column(self.ACTED), self._column(self.STATE)
        return all(a >= number or s == DEPARTED for a, s in zip(acted, states, strict=True))

    # The planned stop, written only by rank 0 and before any rank can be there.

    def plan_stop(self, stop_at: int, epochs: int) -> None:
        """Plan a stop at the first boundary from position ``stop_at`` on, or after some epochs.

        ``epochs`` is the number of completed epochs. 0 means no limit for either.
        """
        odd = self.words[self.PLAN_VERSION] + 1 | 1
        self.words[self.PLAN_VERSION] = odd
        self.words[self.STOP_AT] = stop_at
        self.words[self.STOP_EPOCHS] = epochs
        self.words[self.PLAN_VERSION] = odd + 1

    def is_stop_planned(self, position: int, epochs_done: int = 0) -> bool:
        """Return True if the plan is to stop at this boundary.

        While a node can't be reached, the stop is due at a later boundary.
        """
        stop_at, epochs = self.words[self.STOP_AT], self.words[self.STOP_EPOCHS]
        is_due = 0 < stop_at <= position or 0 < epochs <= epochs_done
        return is_due and not self.words[self.UNREACHABLE]

    def any_rank_beyond(self, position: int) -> bool:
        """Return True if a rank has passed ``position``: it did not read the plan in time."""
        return any(state > waiting_state(position) for state in self._column(self.STATE))

    # The rank's own row.

    def set_state(self, state: int) -> None:
        """Store this rank's state."""
        self.words[self._row + self.STATE] = state

    def set_seen(self, number: int) -> None:
        """Store that this rank has read the request with this number, before it waits for it."""
        self.words[self._row + self.SEEN] = number

    def set_acted(self, number: int) -> None:
        """Store that this rank acted on the request with this number."""
        self.words[self._row + self.ACTED] = number

    def set_save_result(self, number: int, *, ok: bool) -> None:
        """Store how saving the checkpoint with this number ended on this rank."""
        self.words[self._row + self.RESULT] = number << 1 | ok

    # The rows of all ranks.

    def next_move(self, position: int, number: int) -> Move:
        """Return what this rank, which waits at ``position``, does about request ``number``."""
        seen, states = self._column(self.SEEN), self._column(self.STATE)
        return next_move(seen, states, self._column(self.ACTED), position, number)

    def save_results(self, number: int) -> bool | None:
        """Return True if all ranks saved checkpoint ``number``; None until each has a result."""
        rows = self._column(self.RESULT)
        if any(row >> 1 < number for row in rows):
            return None
        return all(row & 1 for row in rows)

    def dead_peers(self) -> list[int]:
        """Return the ranks whose process has ended.

        The process of another node's rank is observed by the agent there.
        """
        pids, gone = self._column(self.PID), self._column(self.GONE)
        return [r for r, pid in enumerate(pids) if gone[r] or (pid and not is_alive(pid))]

    def close(self) -> None:
        """Unmap the table."""
        self.words.release()
        self._map.close()

    def _column(self, offset: int) -> list[int]:
        row = self.ROW
        return self.words[row + offset :: row].tolist()


def table_name(restarts: int, world_size: int, worker_group: int) -> str:
    """Return the name of the table's file.

    Ranks that start together have the same world size and ``worker_group`` on every node, and
    another table than those before them. The number of restarts may differ between nodes.
    """
    return f"agree-{restarts}-{world_size}-{worker_group}.bin"


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
