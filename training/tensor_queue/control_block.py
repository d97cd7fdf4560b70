"""The control block ``control.bin``: requests to stop, pause or save, and the ranks' decisions.

The supervisor writes the request area and the plan area, rank 0 writes the decision area, and the
signal handler of any rank sets the signal byte. Standard library only. There is no lock: every area
has one writer, two alternating slots and a CRC-32, so that a writer killed in the middle of a write
leaves the previous value intact.

One word of eight bytes changes whenever anything else changes, and each writer owns separate bytes
of it. ``poll`` only compares that word if nothing changed. Ranks acknowledge a decision in their
pulse (``decision_done``).
"""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Literal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a stop, in every process of a run.

SLURM sends one of them to all processes of a job step. The shim, which imports nothing of ltui, has
a copy.
"""
_MAGIC = b"LTUICTRL"
_VERSION = 1
_FILE_BYTES = 4096
_FIXED = Struct("<8sI")
_WORD_AT = 64
_SIGNAL_AT = _WORD_AT + 6
_PROFILE_AT = _WORD_AT + 8
_REQUESTS_AT = 1024
_DECISIONS_AT = 2048
_PLANS_AT = 3072
_SLOT_STEP = 256
_SLOT = Struct("<QqqqI")
"""Generation, id, command, global step (-1 for a request), CRC-32 of the fields before it."""
_BODY = Struct("<Qqqq")


class ControlFileError(ValueError):
    """The file is no control file, is truncated, or has a newer layout."""


class Command(IntEnum):
    """Command to all ranks. Wire numbers: append, never renumber."""

    NONE = 0
    STOP = 1
    """Save a checkpoint, then leave the training loop."""
    PAUSE = 2
    CONTINUE = 3
    CHECKPOINT = 4


@dataclass(frozen=True, slots=True)
class Request:
    """Request of the supervisor. ``request_id`` increases with each request."""

    request_id: int
    kind: Command


@dataclass(frozen=True, slots=True)
class Decision:
    """Command that all ranks carry out once they have completed ``at_global_step``."""

    decision_id: int
    kind: Command
    at_global_step: int


@dataclass(frozen=True, slots=True)
class StopPlan:
    """Stop condition: the ranks stop there by themselves, without a further request."""

    plan_id: int
    at_global_step: int | None = None
    """Number of completed steps after which the ranks stop."""
    after_epochs: int | None = None
    """Number of completed epochs after which the ranks stop, including the last epoch's validation
    and callbacks."""


@dataclass(frozen=True, slots=True)
class ControlState:
    """Contents of the control block at one time."""

    request: Request | None
    decision: Decision | None
    signal: int
    """Number of the last signal that a rank received and that has not been cleared; 0 if none."""
    plan: StopPlan | None = None


class ControlFile:
    """Access of one process to the control block."""

    __slots__ = (
        "_decisions",
        "_mapped",
        "_pid",
        "_plans",
        "_requests",
        "_view",
        "last_word",
        "profile_word",
        "word",
    )

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._view = memoryview(mapped)
        self.word = self._view[_WORD_AT : _WORD_AT + 8].cast("Q")
        """View of one element. It differs from ``last_word`` if ``poll`` has a change to report."""
        self.profile_word = self._view[_PROFILE_AT : _PROFILE_AT + 8].cast("Q")
        """View of the number of the last profile that the supervisor has requested."""
        self._pid = os.getpid()
        self.last_word = -1
        # Bytes 0 to 3, 4 to 5 and 7 of the word are the lowest bytes of the areas' generations.
        self._requests = _Area(self._view, _REQUESTS_AT, 0, 4)
        self._decisions = _Area(self._view, _DECISIONS_AT, 4, 2)
        self._plans = _Area(self._view, _PLANS_AT, 7, 1)

    @classmethod
    def open(cls, path: Path) -> ControlFile:
        """Map the file. The first process creates it atomically with mode 0600.

        Raises ``ControlFileError`` if the file at ``path`` is no control file.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            _create(path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_header(path, fd)
            return cls(mmap.mmap(fd, _FILE_BYTES))
        finally:
            os.close(fd)

    def poll(self) -> ControlState | None:
        """Return the state of the block if it changed since the last call, else ``None``.

        The first call returns the state. A call costs one load and one comparison if nothing
        changed.
        """
        word = self.word[0]
        if word == self.last_word:
            return None
        state = self.read()
        # A slot may not be visible yet although its generation is: read it again at the next poll.
        areas = self._requests, self._decisions, self._plans
        if all(area.is_current(word) for area in areas):
            self.last_word = word
        return state

    def read(self) -> ControlState:
        """Return the current state of the block."""
        request = self._requests.read()
        decision = self._decisions.read()
        plan = self._plans.read()
        return ControlState(
            Request(request[0], Command(request[1])) if request else None,
            Decision(decision[0], Command(decision[1]), decision[2]) if decision else None,
            self._view[_SIGNAL_AT],
            _stop_plan(self._plans.generation, plan),
        )

    def request(self, kind: Command, request_id: int) -> None:
        """Send a request to the ranks. Only the supervisor calls this."""
        self._requests.write(request_id, kind, -1)

    def plan(self, at_global_step: int | None, after_epochs: int | None) -> None:
        """Replace the stop condition of the ranks, or remove it if both arguments are None.

        Only the supervisor calls this.
        """
        epochs = -1 if after_epochs is None else after_epochs
        step = -1 if at_global_step is None else at_global_step
        self._plans.write(epochs & _NO_EPOCHS, Command.STOP, step)

    def decide(self, decision_id: int, kind: Command, at_global_step: int) -> None:
        """Write a decision that binds all ranks. Only rank 0 calls this."""
        self._decisions.write(decision_id, kind, at_global_step)

    def raise_signal(self, signum: int) -> None:
        """Store the number of a received signal. A rank's signal handler calls this.

        It does nothing in a forked child: DataLoader workers inherit the rank's handlers, and
        signals regularly end them.
        """
        if os.getpid() == self._pid:
            self._view[_SIGNAL_AT] = signum

    def clear_signal(self) -> None:
        """Clear the signal after rank 0 has turned it into a request."""
        self._view[_SIGNAL_AT] = 0

    def close(self) -> None:
        """Unmap the file and keep it on disk. A second call has no effect."""
        self.word.release()
        self.profile_word.release()
        self._view.release()
        self._mapped.close()


class _Area:
    """Two slots that one writer uses alternately. The newest valid slot counts.

    ``size`` bytes of the word from ``offset`` on are the lowest bytes of the generation. They are
    one value of memory, which is stored at once.
    """

    __slots__ = ("_at", "_offset", "_size", "_value", "_view", "generation")

    def __init__(self, view: memoryview, at: int, offset: int, size: int) -> None:
        self._view, self._at = view, at
        self._offset, self._size = offset, size
        self._value: tuple[int, int, int] | None = None
        self.generation = 0

    def read(self) -> tuple[int, int, int] | None:
        """Return (id, command, step) of the newest valid slot; ``None`` before the first write."""
        for slot in (0, 1):
            raw = bytes(self._view[self._at + slot * _SLOT_STEP :][: _SLOT.size])
            generation, *value, crc = _SLOT.unpack(raw)
            valid = generation and zlib.crc32(raw[: _BODY.size]) == crc
            if valid and generation > self.generation and value[1] in _COMMANDS:
                self.generation = generation
                self._value = (value[0], value[1], value[2])
        return self._value

    def is_current(self, word: int) -> bool:
        """Return True if the last read value is at least as new as the generation in ``word``."""
        bits = 8 * self._size
        behind = ((word >> 8 * self._offset) - self.generation) & ((1 << bits) - 1)
        return behind == 0 or behind >= 1 << (bits - 1)

    def write(self, number: int, kind: int, step: int) -> None:
        """Write the slot that is next in turn, then its generation in the word."""
        self.read()
        generation = self.generation + 1
        body = _BODY.pack(generation, number, kind, step)
        at = self._at + (generation & 1) * _SLOT_STEP
        self._view[at : at + _SLOT.size] = body + zlib.crc32(body).to_bytes(4, "little")
        self.generation, self._value = generation, (number, int(kind), step)
        at = _WORD_AT + self._offset
        with self._view[at : at + self._size].cast(_FORMATS[self._size]) as part:
            part[0] = generation & (1 << 8 * self._size) - 1


_FORMATS: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}
"""Struct formats of unsigned integers by their size in bytes."""
_NO_EPOCHS = (1 << 63) - 1
"""Value in place of the number of epochs if there is none: -1 without its sign bit."""


def _stop_plan(plan_id: int, value: tuple[int, int, int] | None) -> StopPlan | None:
    if value is None:
        return None
    epochs, _, step = value
    return StopPlan(plan_id, None if step < 0 else step, None if epochs == _NO_EPOCHS else epochs)


_COMMANDS = frozenset(int(command) for command in Command)


def _create(path: Path) -> None:
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        page = bytearray(_FILE_BYTES)
        _FIXED.pack_into(page, 0, _MAGIC, _VERSION)
        os.pwrite(fd, page, 0)
        # A link fails if another process was first. A rename would replace its file.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        os.unlink(temporary)


def _check_header(path: Path, fd: int) -> None:
    fixed = os.pread(fd, _FIXED.size, 0)
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise ControlFileError(f"{path} is not a control file")
    version = _FIXED.unpack(fixed)[1]
    if version > _VERSION:
        raise ControlFileError(f"{path} has layout {version}, written by a newer ltui")
    if os.fstat(fd).st_size < _FILE_BYTES:
        raise ControlFileError(f"{path} is truncated")
