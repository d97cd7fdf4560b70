"""How all ranks of one machine come to act at the same place without a collective.

Every rank passes the same *boundaries* in the same order: the end of each batch in which the
optimizer stepped, and the end of each validation batch. Each rank has one word in shared memory
that says where it is: *passed P* while it runs on from boundary P, *frozen at P* while it waits
there.

No request: a rank that reaches P stores "passed P" and goes on (two memory accesses a boundary). A
request (rank 0 publishes it in the header): a rank that reaches P stores "frozen at P" and looks:

- somebody has passed P: that rank may wait for this one further on, so go on to the next boundary;
- all are frozen at P: act. A rank that never froze at P has no word that says so, hence nobody can
  have passed P once all words have been seen frozen there, and nobody leaves P but by acting;
- a rank has already acted on this request: act too (it may be gone from P by now);
- otherwise wait: the missing ranks need nothing from this one, which has given all that boundary P
  and everything before it take.

Nothing in this rule asks how far the device is: a rank whose host runs ahead of its GPU has queued
its share of every collective up to its boundary. It needs shared memory, hence ranks of one
machine.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from enum import Enum, IntEnum
from pathlib import Path

_PART_BITS, _STEP_BITS = 19, 36
GONE = (1 << 62) + 1
"""Word of a rank that takes no part any more: every other rank goes on."""


STOP_AT_WORD = 2
"""Where in ``BarrierTable.words`` the position of a planned stop is."""
EPOCH_END = (1 << _PART_BITS) - 1
"""The ``part`` of a position between two epochs."""


class Action(IntEnum):
    """What ranks do when they have met."""

    NONE = 0
    STOP = 1
    PAUSE = 2
    CONTINUE = 3
    CHECKPOINT = 4
    PERIODIC = 5
    """A checkpoint that rank 0's clock asked for."""
    BEST = 6
    """A checkpoint because rank 0 has seen a metric at its best."""


class Move(Enum):
    WAIT = "wait"
    PROCEED = "go on"
    ACT = "act"


def position(fit: int, global_step: int, part: int = 0) -> int:
    """A boundary as a number that grows along the run.

    ``fit`` counts the calls of ``fit`` and its like in this process; ``part`` is 0 for the end of a
    training step and ``1 + n`` for the n-th validation batch that follows it.
    """
    if part > EPOCH_END:
        part = EPOCH_END
    return (((fit & 0x3F) << _STEP_BITS) + global_step << _PART_BITS) + part


def frozen(here: int) -> int:
    return 2 * here


def passed(here: int) -> int:
    return 2 * here + 1


def judge(words: Sequence[int], acted: Sequence[int], here: int, request: int) -> Move:
    """The rule above, for a rank frozen at ``here``. ``acted`` must have been read after
    ``words``."""
    if any(number >= request for number in acted):
        return Move.ACT
    mine = frozen(here)
    if any(word > mine for word in words):
        return Move.PROCEED
    return Move.ACT if all(word == mine for word in words) else Move.WAIT


class BarrierTable:
    """The shared words: a header of the request, then a row for every rank.

    Words are 64-bit, aligned and stored by one machine instruction each (``memoryview`` of native
    int64). A row takes a cache line of its own.
    """

    _ROW = 8  # words
    _REQUEST, _CONTROL_ID, _STOP_AT, _STOP_EPOCHS = 0, 1, 2, 3
    _WORD, _ACTED, _RESULT, _PID = 0, 1, 2, 3

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
        self.own_slot = self._row + self._WORD
        self.words[self._row + self._WORD] = 0
        self.words[self._row + self._RESULT] = 0
        self.words[self._row + self._PID] = os.getpid()

    # The request, written by rank 0 alone.

    def request(self) -> tuple[int, Action]:
        """Number of the current request and what it asks; ``(0, NONE)`` before the first."""
        word = self.words[self._REQUEST]
        return word >> 4, Action(word & 15)

    def control_id(self) -> int:
        """Id in the control file of what the current request answers, 0 for rank 0's own."""
        return self.words[self._CONTROL_ID]

    def publish(self, action: Action, control_id: int = 0) -> int:
        number = (self.words[self._REQUEST] >> 4) + 1
        self.words[self._CONTROL_ID] = control_id
        self.words[self._REQUEST] = number << 4 | action
        return number

    def all_acted(self) -> bool:
        """Whether every rank has acted on the current request, so that another may be published."""
        number = self.words[self._REQUEST] >> 4
        return all(acted >= number for acted in self._column(self._ACTED))

    # Where all stop by themselves, written by rank 0 alone, before anybody can be there.

    def plan_stop(self, at: int, epochs: int) -> None:
        """At the first boundary from position ``at`` on, or once ``epochs`` epochs are completed;
        0 for neither."""
        self.words[self._STOP_AT] = at
        self.words[self._STOP_EPOCHS] = epochs

    def stop_planned(self, here: int, epochs_done: int = 0) -> bool:
        """Whether the plan is to stop at the boundary ``here``."""
        at, epochs = self.words[self._STOP_AT], self.words[self._STOP_EPOCHS]
        return 0 < at <= here or 0 < epochs <= epochs_done

    def any_rank_beyond(self, here: int) -> bool:
        """Whether a rank has passed ``here``: that one did not know of the plan in time."""
        return any(word > frozen(here) for word in self._column(self._WORD))

    # The rank's own row.

    def say(self, word: int) -> None:
        self.words[self._row + self._WORD] = word

    def set_acted(self, number: int) -> None:
        self.words[self._row + self._ACTED] = number

    def set_save_result(self, number: int, *, ok: bool) -> None:
        self.words[self._row + self._RESULT] = number << 1 | ok

    # Everybody's rows.

    def judge(self, here: int, number: int) -> Move:
        words = self._column(self._WORD)
        return judge(words, self._column(self._ACTED), here, number)

    def results(self, number: int) -> bool | None:
        """None until every rank has said how ``number`` went for it; then whether it went well for
        all."""
        rows = self._column(self._RESULT)
        if any(row >> 1 < number for row in rows):
            return None
        return all(row & 1 for row in rows)

    def dead_peers(self) -> list[int]:
        """Ranks that had a process and have none now."""
        pids = self._column(self._PID)
        return [rank for rank, pid in enumerate(pids) if pid and not _alive(pid)]

    def close(self) -> None:
        self.words.release()
        self._map.close()

    def _column(self, offset: int) -> list[int]:
        row = self._ROW
        return self.words[row + offset :: row].tolist()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
