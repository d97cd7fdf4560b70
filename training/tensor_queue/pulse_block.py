"""The pulse: a fixed block next to the ring that always holds the current status of the rank.

Two slots are written alternately, each with a counter and a CRC-32. A writer that freezes or is
killed in the middle of one leaves the other intact, so the last status of a dead rank can always be
read. A plain sequence lock would stay locked in that case.

The slots are followed by the mark: four words that a training loop stores one by one, several times
per batch. Each store is atomic. Standard library only.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from struct import Struct
from typing import Final

from ltui.training.tensor_queue.file_layout import PULSE_AT
from ltui.training.tensor_queue.record_types import Outcome, Phase, PulseState

_FIELDS = (
    *("phase", "outcome", "telemetry_ok", "epoch", "batch", "global_step", "changed_ns"),
    *("changed_wall_s", "heartbeat_ns", "decision_done", "pid", "start_ticks", "rank"),
    *("local_rank", "world_size", "restarts"),
)
"""Fields of ``PulseState`` in the order in which a slot contains them."""
_BODY = Struct("<QHB?4xqqqqdqq16xqqiiii")
"""A counter, then the fields."""
_CRC = Struct("<I")
_BODY_BYTES = _BODY.size
_SLOT_BYTES = 512
"""Size of a slot, with space for future fields. The rest of the page is unused."""
_MARK_AT = 2 * _SLOT_BYTES
_MARK = Struct("<qqqq")
PULSE_BYTES = _MARK_AT + 64

_SETTABLE_FIELDS = frozenset(_FIELDS) - {"changed_ns", "changed_wall_s", "heartbeat_ns"}


class PulseWriter:
    """The rank's writer of its pulse. One thread at a time; it never blocks, locks or does I/O."""

    __slots__ = ("_checks", "_counter", "_muted", "_slots", "mark", *_FIELDS)

    def __init__(self, view: memoryview) -> None:
        """``view`` is the complete queue file, mapped and writable."""
        at = PULSE_AT + _MARK_AT
        self.mark: Final = view[at : at + _MARK.size].cast("q")
        """(phase, time of its begin in ns, batch, global step). Store batch and step first, then
        the time, then the phase. The mark counts if its time is later than the time of the slots.
        ``mute`` releases it."""
        starts = (PULSE_AT, PULSE_AT + _SLOT_BYTES)
        self._slots: Final = tuple(view[at : at + _BODY_BYTES] for at in starts)
        ends = (PULSE_AT + _BODY_BYTES, PULSE_AT + _SLOT_BYTES + _BODY_BYTES)
        self._checks: Final = tuple(view[at : at + _CRC.size].cast("I") for at in ends)
        self._muted = False
        self._counter = 0
        self.phase: int = Phase.UNKNOWN
        self.outcome: int = Outcome.RUNNING
        self.telemetry_ok = True
        self.epoch = self.batch = self.global_step = self.decision_done = 0
        self.changed_ns = self.heartbeat_ns = 0
        self.changed_wall_s = 0.0
        self.pid = self.start_ticks = self.rank = self.local_rank = self.restarts = 0
        self.world_size = 1

    def set(self, **changes: int) -> None:
        """Change fields of ``PulseState`` by name and publish them together.

        ``changed_ns`` is updated if phase, epoch, batch or global step change their value.
        """
        if unknown := changes.keys() - _SETTABLE_FIELDS:
            raise TypeError(f"the pulse has no field {min(unknown)!r} to set")
        before = self.phase, self.epoch, self.batch, self.global_step
        for name, value in changes.items():
            setattr(self, name, value)
        if before != (self.phase, self.epoch, self.batch, self.global_step):
            self.changed_ns = time.monotonic_ns()
            self.changed_wall_s = time.time()
        self.beat()

    def beat(self) -> None:
        """Renew ``heartbeat_ns``, and publish. The rank is alive, but need not have advanced."""
        self.heartbeat_ns = time.monotonic_ns()
        if self._muted:
            return
        counter = self._counter = self._counter + 1
        slot = self._slots[counter & 1]
        _BODY.pack_into(slot, 0, counter, *(getattr(self, name) for name in _FIELDS))
        self._checks[counter & 1][0] = zlib.crc32(slot)

    def mute(self) -> None:
        """Disable all writes, because this process is a forked child of the rank."""
        self._muted = True
        for view in (self.mark, *self._checks, *self._slots):
            view.release()


def parse_pulse(block: bytes) -> PulseState | None:
    """Return the newest valid slot of the pulse block; ``None`` if there is none yet."""
    slots = [_parse_slot(block, at) for at in (0, _SLOT_BYTES)]
    valid = [slot for slot in slots if slot is not None]
    return _apply_mark(max(valid, key=lambda slot: slot[0])[1], block) if valid else None


def _apply_mark(state: PulseState, block: bytes) -> PulseState:
    """Return ``state`` with the mark's progress, if the mark is newer than ``state``."""
    phase, since_ns, batch, global_step = _MARK.unpack_from(block, _MARK_AT)
    if since_ns <= state.changed_ns or phase not in set(Phase):
        return state
    return replace(
        state,
        phase=Phase(phase),
        batch=batch,
        global_step=global_step,
        changed_ns=since_ns,
        changed_wall_s=state.changed_wall_s + (since_ns - state.changed_ns) / 1e9,
        heartbeat_ns=max(since_ns, state.heartbeat_ns),
    )


def _parse_slot(block: bytes, at: int) -> tuple[int, PulseState] | None:
    body = block[at : at + _BODY_BYTES]
    (crc,) = _CRC.unpack_from(block, at + _BODY_BYTES)
    counter, *values = _BODY.unpack(body)
    if counter == 0 or zlib.crc32(body) != crc:
        return None
    fields = dict(zip(_FIELDS, values, strict=True))
    # A newer rank package may write a phase or an outcome that this reader does not have.
    phase, outcome = fields["phase"], fields["outcome"]
    fields["phase"] = Phase(phase) if phase in set(Phase) else Phase.UNKNOWN
    fields["outcome"] = Outcome(outcome) if outcome in set(Outcome) else Outcome.RUNNING
    return counter, PulseState(**fields)
