"""The control block ``control.bin``: how a stop, a pause or a checkpoint is asked for and agreed
upon.

A request area and a plan area (the supervisor writes), a decision area (rank 0 writes) and one
signal byte (any rank's signal handler raises it). Standard library only. No lock: every area has
one writer, two slots used in turn, and a CRC-32, so that a writer killed half way leaves the value
before.

One word of eight bytes changes whenever anything does, and every writer owns bytes of its own in
it: ``poll`` compares that word and is done. Ranks acknowledge through the pulse
(``decision_done``).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct

_MAGIC = b"LTUICTRL"
_VERSION = 1
_FILE_BYTES = 4096
_FIXED = Struct("<8sI")
_WORD_AT = 64
_REQUEST_GENERATION_AT = _WORD_AT
_DECISION_GENERATION_AT = _WORD_AT + 4
_SIGNAL_AT = _WORD_AT + 6
_PLAN_GENERATION_AT = _WORD_AT + 7
_REQUESTS_AT = 1024
_DECISIONS_AT = 2048
_PLANS_AT = 3072
_SLOT_STEP = 256
_SLOT = Struct("<QqqqI")
"""Generation, id, command, global step (-1 for a request), CRC-32 of what is before it."""
_BODY = Struct("<Qqqq")


class ControlFileError(ValueError):
    """Not a control file, truncated, or of a newer layout."""


class Command(IntEnum):
    """What is asked of all ranks. Wire numbers: append, never renumber."""

    NONE = 0
    STOP = 1
    """Save a checkpoint, then leave the training loop."""
    PAUSE = 2
    CONTINUE = 3
    CHECKPOINT = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What the supervisor wants; ``request_id`` counts up."""

    request_id: int
    kind: Command


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do once they have completed ``at_global_step``."""

    decision_id: int
    kind: Command
    at_global_step: int


@dataclass(frozen=True, slots=True)
class StopPlan:
    """Where the ranks are to stop by themselves, without a further request."""

    plan_id: int
    at_global_step: int | None = None
    """Once they have completed so many steps."""
    after_epochs: int | None = None
    """Once they have completed so many epochs, with all that belongs to the last."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """One reading of the block."""

    request: Request | None
    decision: Decision | None
    signal: int
    """Number of the last signal that a rank received and nobody cleared; 0: none."""
    plan: StopPlan | None = None


class ControlFile:
    """One process's door to the control block."""

    __slots__ = ("_decisions", "_mapped", "_pid", "_plans", "_requests", "_view", "seen", "word")

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._view = memoryview(mapped)
        self.word = self._view[_WORD_AT : _WORD_AT + 8].cast("Q")
        """Of one element, which differs from ``seen`` where ``poll`` has something to answer."""
        self._pid = os.getpid()
        self.seen = -1
        self._requests = _Area(_REQUESTS_AT)
        self._decisions = _Area(_DECISIONS_AT)
        self._plans = _Area(_PLANS_AT)

    @classmethod
    def open(cls, path: Path) -> ControlFile:
        """Map the file, made first (mode 0600, in one move) where there is none: whoever comes
        first.

        ``ControlFileError`` where what stands there is something else.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            _make(path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(path, fd)
            return cls(mmap.mmap(fd, _FILE_BYTES))
        finally:
            os.close(fd)

    def poll(self) -> ControlState | None:
        """The block's state where anything changed since the last such answer, else ``None``.

        The first call answers. Costs one load and one comparison where nothing changed.
        """
        word = self.word[0]
        if word == self.seen:
            return None
        state = self.read()
        # A slot that is not there yet although its generation is: ask again at the next poll.
        if (
            self._requests.has(word, 32)
            and self._decisions.has(word >> 32, 16)
            and self._plans.has(word >> 56, 8)
        ):
            self.seen = word
        return state

    def read(self) -> ControlState:
        """The block's state now."""
        request = self._requests.read(self._view)
        decision = self._decisions.read(self._view)
        plan = self._plans.read(self._view)
        return ControlState(
            Request(request[0], Command(request[1])) if request else None,
            Decision(decision[0], Command(decision[1]), decision[2]) if decision else None,
            self._view[_SIGNAL_AT],
            _stop_plan(self._plans.generation, plan),
        )

    def request(self, kind: Command, request_id: int) -> None:
        """Ask the ranks. The supervisor alone calls this."""
        generation = self._requests.write(self._view, request_id, kind, -1)
        self._view[_REQUEST_GENERATION_AT : _REQUEST_GENERATION_AT + 4].cast("I")[0] = (
            generation & 0xFFFFFFFF
        )

    def plan(self, at_global_step: int | None, after_epochs: int | None) -> None:
        """Where the ranks are to stop from now on; nowhere where both are None. The supervisor
        alone calls this."""
        epochs = -1 if after_epochs is None else after_epochs
        step = -1 if at_global_step is None else at_global_step
        generation = self._plans.write(self._view, epochs & _UNSIGNED, Command.STOP, step)
        self._view[_PLAN_GENERATION_AT] = generation & 0xFF

    def decide(self, decision_id: int, kind: Command, at_global_step: int) -> None:
        """Bind all ranks. Rank 0 alone calls this."""
        generation = self._decisions.write(self._view, decision_id, kind, at_global_step)
        self._view[_DECISION_GENERATION_AT : _DECISION_GENERATION_AT + 2].cast("H")[0] = (
            generation & 0xFFFF
        )

    def raise_signal(self, signum: int) -> None:
        """From a rank's signal handler: one byte is stored. Does nothing in a forked child.

        DataLoader workers inherit the rank's handlers and are ended by signals in the normal
        course.
        """
        if os.getpid() == self._pid:
            self._view[_SIGNAL_AT] = signum

    def clear_signal(self) -> None:
        """Rank 0 has taken the signal up."""
        self._view[_SIGNAL_AT] = 0

    def close(self) -> None:
        """Unmap; twice is harmless. The file stays."""
        self.word.release()
        self._view.release()
        self._mapped.close()


class _Area:
    """Two slots used in turn by one writer; the newest whole one counts."""

    __slots__ = ("_at", "_kept", "generation")

    def __init__(self, at: int) -> None:
        self._at = at
        self._kept: tuple[int, int, int] | None = None
        self.generation = 0

    def read(self, view: memoryview) -> tuple[int, int, int] | None:
        """(id, command, step) as last written whole; ``None`` before the first."""
        for slot in (0, 1):
            raw = bytes(view[self._at + slot * _SLOT_STEP :][: _SLOT.size])
            generation, *value, crc = _SLOT.unpack(raw)
            whole = generation and zlib.crc32(raw[: _BODY.size]) == crc
            if whole and generation > self.generation and value[1] in _COMMANDS:
                self.generation = generation
                self._kept = (value[0], value[1], value[2])
        return self._kept

    def has(self, generation: int, bits: int) -> bool:
        """Whether what was read last is at least as new as ``generation``, of which few bits
        count."""
        behind = (generation - self.generation) & ((1 << bits) - 1)
        return behind == 0 or behind >= 1 << (bits - 1)

    def write(self, view: memoryview, number: int, kind: int, step: int) -> int:
        """Write the slot whose turn it is; the new generation."""
        self.read(view)
        generation = self.generation + 1
        body = _BODY.pack(generation, number, kind, step)
        at = self._at + (generation & 1) * _SLOT_STEP
        view[at : at + _SLOT.size] = body + zlib.crc32(body).to_bytes(4, "little")
        self.generation, self._kept = generation, (number, int(kind), step)
        return generation


_UNSIGNED = (1 << 63) - 1


def _stop_plan(plan_id: int, value: tuple[int, int, int] | None) -> StopPlan | None:
    if value is None:
        return None
    epochs, _, step = value
    return StopPlan(plan_id, None if step < 0 else step, None if epochs == _UNSIGNED else epochs)


_COMMANDS = frozenset(int(command) for command in Command)


def _make(path: Path) -> None:
    fd, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        page = bytearray(_FILE_BYTES)
        _FIXED.pack_into(page, 0, _MAGIC, _VERSION)
        os.pwrite(fd, page, 0)
        # A link fails where another process was first; a rename would replace its file.
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        os.unlink(made)


def _check(path: Path, fd: int) -> None:
    fixed = os.pread(fd, _FIXED.size, 0)
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise ControlFileError(f"{path} is not a control file")
    version = _FIXED.unpack(fixed)[1]
    if version > _VERSION:
        raise ControlFileError(f"{path} has layout {version}, written by a newer ltui")
    if os.fstat(fd).st_size < _FILE_BYTES:
        raise ControlFileError(f"{path} is truncated")
