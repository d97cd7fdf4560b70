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

_HOT = Struct("<QHB?xxxxqqqqdqqqq")
"""Counter, phase, outcome, telemetry on, epoch, batch, global step, changed_ns, changed_wall_s,
heartbeat_ns, decision done, two unused numbers."""
_UNUSED = (-1, -1)
_HOT_FIELDS = (
    *("phase", "outcome", "telemetry_ok", "epoch", "batch", "global_step", "changed_ns"),
    *("changed_wall_s", "heartbeat_ns", "decision_done"),
)
"""Names in ``PulseState`` of the fields after the counter."""
_IDENTITY = Struct("<qqiiii")
"""Pid, start ticks, rank, local rank, world size, restarts."""
_CRC = Struct("<I")
_BODY_BYTES = _HOT.size + _IDENTITY.size
_SLOT_BYTES = 512
"""Size of a slot, with space for future fields. The rest of the page is unused."""
_MARK_AT = 2 * _SLOT_BYTES
_MARK = Struct("<qqqq")
PULSE_BYTES = _MARK_AT + 64

_PROGRESS_FIELDS = frozenset({"phase", "epoch", "batch", "global_step"})
_STATUS_FIELDS = frozenset({"outcome", "decision_done", "telemetry_ok"})
_IDENTITY_FIELDS = ("pid", "start_ticks", "rank", "local_rank", "world_size", "restarts")


class PulseWriter:
    """The rank's writer of its pulse. One thread at a time; it never blocks, locks or does I/O."""

    __slots__ = (
        "_checks",
        "_counter",
        "_identity",
        "_identity_slots",
        "_muted",
        "_slots",
        "batch",
        "changed_ns",
        "changed_wall_s",
        "current_phase",
        "decision_done",
        "epoch",
        "global_step",
        "mark",
        "outcome",
        "telemetry_ok",
    )

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
        self.current_phase: int = Phase.UNKNOWN
        self.outcome: int = Outcome.RUNNING
        self.telemetry_ok = True
        self.epoch = self.batch = self.global_step = 0
        self.changed_ns = 0
        self.changed_wall_s = 0.0
        self.decision_done = 0
        self._identity = {**dict.fromkeys(_IDENTITY_FIELDS, 0), "world_size": 1}
        self._identity_slots = 0
        """Number of slots that contain the current identity, including the last written one."""

    def set(self, **changes: int) -> None:
        """Change fields of ``PulseState`` by name and publish them together.

        ``changed_ns`` is updated if phase, epoch, batch or global step change their value.
        """
        now_ns = time.monotonic_ns()
        moved = False
        renamed = False
        for name, value in changes.items():
            if name in _PROGRESS_FIELDS:
                attribute = "current_phase" if name == "phase" else name
                moved = moved or getattr(self, attribute) != value
                setattr(self, attribute, value)
            elif name in _STATUS_FIELDS:
                setattr(self, name, value)
            elif name in self._identity:
                self._identity[name] = value
                renamed = True
            else:
                raise TypeError(f"the pulse has no field {name!r} to set")
        if renamed:
            self._identity_slots = 0
        if moved:
            self.changed_ns = now_ns
            self.changed_wall_s = time.time()
        self._publish(now_ns)

    def beat(self) -> None:
        """Renew only ``heartbeat_ns``: the rank is alive and has not advanced, for example because
        it is paused."""
        self._publish(time.monotonic_ns())

    def mute(self) -> None:
        """Disable all writes, because this process is a forked child of the rank."""
        self._muted = True
        for view in (self.mark, *self._checks, *self._slots):
            view.release()

    def _publish(self, now_ns: int) -> None:
        if self._muted:
            return
        counter = self._counter = self._counter + 1
        turn = counter & 1
        slot = self._slots[turn]
        _HOT.pack_into(
            slot,
            0,
            counter,
            self.current_phase,
            self.outcome,
            self.telemetry_ok,
            self.epoch,
            self.batch,
            self.global_step,
            self.changed_ns,
            self.changed_wall_s,
            now_ns,
            self.decision_done,
            *_UNUSED,
        )
        if self._identity_slots < 2:
            slot[_HOT.size :] = _IDENTITY.pack(*self._identity.values())
            self._identity_slots += 1
        self._checks[turn][0] = zlib.crc32(slot)


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
    counter, *values = _HOT.unpack_from(body)[: -len(_UNUSED)]
    if counter == 0 or zlib.crc32(body) != crc:
        return None
    fields = dict(zip(_HOT_FIELDS, values, strict=True))
    fields |= zip(_IDENTITY_FIELDS, _IDENTITY.unpack_from(body, _HOT.size), strict=True)
    # A newer rank package may write a phase or an outcome that this reader does not have.
    phase, outcome = fields["phase"], fields["outcome"]
    fields["phase"] = Phase(phase) if phase in set(Phase) else Phase.UNKNOWN
    fields["outcome"] = Outcome(outcome) if outcome in set(Outcome) else Outcome.RUNNING
    return counter, PulseState(**fields)
