"""Step consensus: all ranks of one machine act at the same place without a collective.

Every rank passes the same *boundaries* in the same order: the end of each batch in which the
optimizer stepped, and the end of each validation batch. Each rank has one word in shared memory
with its state: *passed P* while it runs after boundary P, *waiting at P* while it waits there.

Without a request, a rank that reaches P stores "passed P" and continues. That takes two memory
accesses for each boundary. Rank 0 publishes a request in the header. Then a rank that reaches P
stores "waiting at P" and reads the states of all ranks:

- A rank has passed P. It may wait for this rank further on, so this rank proceeds to the next
  boundary.
- All ranks wait at P. This rank acts. A rank that did not wait at P has not stored that it did, so
  no rank can have passed P once all states are "waiting at P", and a rank leaves P only by acting.
- A rank has already acted on this request. This rank acts too, because the other may have left P.
- Otherwise this rank waits. The missing ranks need nothing from it, because it has already done its
  part of everything up to P.

The rule does not depend on how far the device is. A rank that runs ahead of its GPU has queued its
part of every collective up to its boundary. The rule needs shared memory, and therefore ranks of
one machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import Enum, IntEnum
from pathlib import Path

_PART_BITS, _STEP_BITS = 19, 36
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
    return (((fit & 0x3F) << _STEP_BITS) + global_step << _PART_BITS) + part


def waiting_state(position: int) -> int:
    """Return the state "waiting at ``position``"."""
    return 2 * position


def passed_state(position: int) -> int:
    """Return the state "passed ``position``"."""
    return 2 * position + 1


def next_move(states: Sequence[int], acted: Sequence[int], position: int, request: int) -> Move:
    """Apply the rule of this module for a rank that waits at ``position``.

    ``states`` and ``acted`` have one number for each rank. ``acted`` must be read after ``states``.
    """
    if any(number >= request for number in acted):
        return Move.ACT
    waiting = waiting_state(position)
    if any(state > waiting for state in states):
        return Move.PROCEED
    return Move.ACT if all(state == waiting for state in states) else Move.WAIT


class BarrierTable:
    """The shared table: a header with the request, then a row for every rank.

    Words are 64-bit, aligned, and each is stored by one machine instruction (``memoryview`` of
    native int64). A row has a cache line of its own.
    """

    _ROW = 8  # words
    _REQUEST, _CONTROL_ID, _STOP_AT, _STOP_EPOCHS = 0, 1, 2, 3
    _STATE, _ACTED, _RESULT, _PID = 0, 1, 2, 3

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        size = 8 * self._ROW * (1 + world_size)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("q")
        self._row = self._ROW * (1 + rank)
        self.own_slot = self._row + self._STATE
        """Index in ``words`` of this rank's state."""
        self.words[self._row + self._STATE] = 0
        self.words[self._row + self._RESULT] = 0
        self.words[self._row + self._PID] = os.getpid()

    # The request, written only by rank 0.

    def request(self) -> tuple[int, Action]:
        """Return number and action of the current request; ``(0, NONE)`` before the first."""
        word = self.words[self._REQUEST]
        return word >> 4, Action(word & 15)

    def control_id(self) -> int:
        """Return the id of the control file's request that the current one answers.

        It is 0 for a request of rank 0 itself.
        """
        return self.words[self._CONTROL_ID]

    def publish(self, action: Action, control_id: int = 0) -> int:
        """Publish the next request and return its number."""
        number = (self.words[self._REQUEST] >> 4) + 1
        self.words[self._CONTROL_ID] = control_id
        self.words[self._REQUEST] = number << 4 | action
        return number

    def all_acted(self) -> bool:
        """Return True if every rank acted on the current request, so the next may be published."""
        number = self.words[self._REQUEST] >> 4
        return all(acted >= number for acted in self._column(self._ACTED))

    # The planned stop, written only by rank 0 and before any rank can be there.

    def plan_stop(self, stop_at: int, epochs: int) -> None:
        """Plan a stop at the first boundary from position ``stop_at`` on, or after some epochs.

        ``epochs`` is the number of completed epochs. 0 means no limit for either.
        """
        self.words[self._STOP_AT] = stop_at
        self.words[self._STOP_EPOCHS] = epochs

    def is_stop_planned(self, position: int, epochs_done: int = 0) -> bool:
        """Return True if the plan is to stop at this boundary."""
        stop_at, epochs = self.words[self._STOP_AT], self.words[self._STOP_EPOCHS]
        return 0 < stop_at <= position or 0 < epochs <= epochs_done

    def any_rank_beyond(self, position: int) -> bool:
        """Return True if a rank has passed ``position``: it did not read the plan in time."""
        return any(state > waiting_state(position) for state in self._column(self._STATE))

    # The rank's own row.

    def set_state(self, state: int) -> None:
        """Store this rank's state."""
        self.words[self._row + self._STATE] = state

    def set_acted(self, number: int) -> None:
        """Store that this rank acted on the request with this number."""
        self.words[self._row + self._ACTED] = number

    def set_save_result(self, number: int, *, ok: bool) -> None:
        """Store how saving the checkpoint with this number ended on this rank."""
        self.words[self._row + self._RESULT] = number << 1 | ok

    # The rows of all ranks.

    def next_move(self, position: int, number: int) -> Move:
        """Return what this rank, which waits at ``position``, does about request ``number``."""
        states = self._column(self._STATE)
        return next_move(states, self._column(self._ACTED), position, number)

    def save_results(self, number: int) -> bool | None:
        """Return True if all ranks saved checkpoint ``number``; None until each has a result."""
        rows = self._column(self._RESULT)
        if any(row >> 1 < number for row in rows):
            return None
        return all(row & 1 for row in rows)

    def dead_peers(self) -> list[int]:
        """Return the ranks whose process has ended."""
        pids = self._column(self._PID)
        return [rank for rank, pid in enumerate(pids) if pid and not _is_alive(pid)]

    def close(self) -> None:
        """Unmap the table."""
        self.words.release()
        self._map.close()

    def _column(self, offset: int) -> list[int]:
        row = self._ROW
        return self.words[row + offset :: row].tolist()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
