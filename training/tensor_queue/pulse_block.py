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
from struct import Struct
from typing import Final

from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.tensor_queue.queue_file import PULSE_AT

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


def parse_pulse(
    block: bytes, node: int = 0, clock_offset_ns: int = 0, wall_offset_s: float = 0.0
) -> PulseState | None:
    """Return the newest valid slot of the pulse block, with the mark applied if that is newer.

    Return ``None`` if there is none yet. The offsets are added to the times.
    """
    slot = _newest_slot(block)
    if slot is None:
        return None
    _, *values = _BODY.unpack_from(slot)
    fields = dict(zip(_FIELDS, values, strict=True))
    phase, since_ns, batch, global_step = _MARK.unpack_from(block, _MARK_AT)
    changed_ns = fields["changed_ns"]
    if since_ns > changed_ns and phase in _PHASES:
        fields["phase"], fields["batch"], fields["global_step"] = phase, batch, global_step
        fields["changed_ns"] = since_ns
        fields["changed_wall_s"] += (since_ns - changed_ns) / 1e9
        fields["heartbeat_ns"] = max(since_ns, fields["heartbeat_ns"])
    # A newer rank package may write a phase or an outcome that this reader does not have.
    fields["phase"] = _PHASES.get(fields["phase"], Phase.UNKNOWN)
    fields["outcome"] = _OUTCOMES.get(fields["outcome"], Outcome.RUNNING)
    if node:
        fields["node"] = node
        fields["changed_ns"] += clock_offset_ns
        fields["changed_wall_s"] += wall_offset_s
        if fields["heartbeat_ns"]:
            fields["heartbeat_ns"] += clock_offset_ns
    return PulseState(**fields)


_PHASES = {int(phase): phase for phase in Phase}
_OUTCOMES = {int(outcome): outcome for outcome in Outcome}


def _newest_slot(block: bytes) -> bytes | None:
    """Return body and CRC of the newest valid slot; ``None`` if there is none."""
    counters = [int.from_bytes(block[at : at + 8], "little") for at in (0, _SLOT_BYTES)]
    for index in (0, 1) if counters[0] >= counters[1] else (1, 0):
        at = index * _SLOT_BYTES
        (crc,) = _CRC.unpack_from(block, at + _BODY_BYTES)
        if counters[index] and zlib.crc32(block[at : at + _BODY_BYTES]) == crc:
            return block[at : at + _BODY_BYTES + _CRC.size]
    return None


class PulseMirror:
    """The pulse block of a mirrored queue file, written from packed pulses of its source."""

    def __init__(self, block: bytes = b"") -> None:
        """``block`` is what the mirror file contains already."""
        self.block = bytearray(block or bytes(PULSE_BYTES))
        """The contents to store in the file."""
        self._newest = 0
        self._packed = b""
        newest = _newest_slot(block) if block else None
        self._progress = (0, 0)
        if newest is not None:
            self._newest = int(not block.startswith(newest))
            self._progress = _progress(newest + block[_MARK_AT : _MARK_AT + _MARK.size])

    def update(self, packed: bytes) -> bool:
        """Take over a packed pulse. Return False if it is older or the same."""
        if len(packed) != PACKED_PULSE_BYTES or packed == self._packed:
            return False
        progress, present = _progress(packed), self._progress
        # A mark of the same time may differ: its phase is stored after its time.
        if progress[0] < present[0] or progress[1] < present[1]:
            return False
        slot = packed[: -_MARK.size]
        if progress[0] > present[0]:
            # The two slots alternate, so that a reader always finds one that is complete.
            self._newest ^= 1
            at = self._newest * _SLOT_BYTES
            self.block[at : at + len(slot)] = slot
        self.block[_MARK_AT : _MARK_AT + _MARK.size] = packed[-_MARK.size :]
        self._progress, self._packed = progress, packed
        return True


def pack_pulse(block: bytes) -> bytes:
    """Return the newest valid slot of the block and the mark; empty if there is no slot yet."""
    slot = _newest_slot(block)
    return b"" if slot is None else slot + block[_MARK_AT : _MARK_AT + _MARK.size]


PACKED_PULSE_BYTES = _BODY_BYTES + _CRC.size + _MARK.size


def _progress(packed: bytes) -> tuple[int, int]:
    """Return the counter of the slot and the time of the mark. Both only grow."""
    counter = int.from_bytes(packed[:8], "little")
    return counter, _MARK.unpack_from(packed, len(packed) - _MARK.size)[1]
