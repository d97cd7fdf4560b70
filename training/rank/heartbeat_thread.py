"""The heartbeat thread of a rank.

Twice a second it writes that Python code runs in this process, and which collective was enqueued
last. It also answers the supervisor's requests for evidence with stacks and collectives.

It costs the training thread nothing but the GIL for some microseconds. If its heartbeat becomes
old, a thread holds the GIL or the process is stopped, which is evidence too. It never raises, never
uses the device and adds no collective.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltui.training.rank import stack_dump_setup
from ltui.training.rank.channel import current_channel
from ltui.training.rank.flight_recorder import UNKNOWN, Counts, FlightRecorder
from ltui.training.rank.stack_sampler import ExitLock, frames_of, sample
from ltui.training.shared.record_types import Phase
from ltui.training.shared.regular_files import write_private_json
from ltui.training.tensor_queue.heartbeat_table import (
    BEAT_S,
    JOINED,
    RECORDED,
    SIGNAL_HANDLER_OURS,
    HeartbeatSlot,
)

_JOIN_CHECK_S = 2.0
"""Seconds between checks for a process group while the process has joined none."""
_MAX_THREADS, _MAX_FRAMES = 64, 80
"""Threads, and frames of each, that are sent as evidence."""
_SECOND_STACK_S = 0.1
"""Seconds between two stacks of the main thread, which show if it moves between lines."""

_LOOKS, _LOOK_S = 12, 0.0004
"""Maximum number of looks at the main thread by which it is seen whether it moves, and the seconds
between them."""
_RAN_NS = 500_000
"""Nanoseconds of processor time after which a thread with small operators is somewhere else."""
_COMPUTES = frozenset({int(Phase.FORWARD), int(Phase.COMPUTE)})
"""Phases in which the main thread computes and runs Python. An optimizer may update all parameters
in one call."""
_BACKWARD = frozenset({"_engine_run_backward", "backward"})
"""Innermost Python functions of a backward pass."""


class HeartbeatThread:
    """The heartbeat thread of one rank. ``start`` it once for each process."""

    def __init__(self, run_dir: Path, attempt: int, rank: int) -> None:
        """Raises ``OSError``."""
        self.rank = rank
        self.pid = os.getpid()
        self.slot = HeartbeatSlot(run_dir / "queue" / str(attempt), rank)
        self._folder = run_dir / "evidence" / str(attempt)
        self._recorder = FlightRecorder()
        self._joined = False
        """True if this process has joined a process group."""
        self._join_check_due = 0.0
        self._counts = UNKNOWN
        self._beat_lock = ExitLock()
        """Held during a heartbeat."""
        self._answered = self.slot.evidence_request()
        self._sampled = self.slot.sample_request()[0]
        self._main = threading.main_thread().ident
        self._main_native = threading.main_thread().native_id
        self._thread = threading.Thread(target=self._run, name="ltui-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a failure here must not disturb training
            if not stack_dump_setup.is_handler_installed():
                stack_dump_setup.install_handler()
        while True:
            is_locked = self._beat_lock.acquire()
            with contextlib.suppress(Exception):
                self._beat()
                request = self.slot.evidence_request()
                if request > self._answered:
                    self._write_evidence(request)
                    self._answered = request
                    self._beat()
                self._sample()
            if is_locked:
                self._beat_lock.release()
            time.sleep(BEAT_S)

    def _sample(self) -> None:
        """Begin to sample the main thread if the supervisor has requested it anew."""
        number, ranks = self.slot.sample_request()
        is_new, self._sampled = number > self._sampled, number
        if is_new and self.rank in ranks:
            arguments = (self._main or 0, self._folder, number)
            threading.Thread(
                target=sample, args=arguments, name="ltui-sampler", daemon=True
            ).start()

    def _beat(self) -> None:
        """Write one heartbeat."""
        now_ns = time.monotonic_ns()
        if not self._beat_lock.exits:
            try:
                self._counts = self._read_counts(now_ns * 1e-9)
            except Exception:  # noqa: BLE001  (a heartbeat without counts is still valid)
                self._counts = UNKNOWN
        flags = (
            SIGNAL_HANDLER_OURS * stack_dump_setup.is_handler_installed()
            | JOINED * self._joined
            | RECORDED * self._recorder.is_recording
        )
        thread = threading.get_native_id()
        self.slot.publish(now_ns, thread, *self._counts, self._answered, flags)
        if not self._beat_lock.exits:
            self._count_activity()

    def _count_activity(self) -> None:
        """Count whether the main thread waits in a collective, moves on, or sleeps elsewhere."""
        waits: bool | None = None
        if self._joined and self._recorder.is_recording and self._counts.completed >= 0:
            is_pending = self._counts.enqueued > self._counts.completed
            # The rank computes while a collective is pending that it does not need yet.
            waits = is_pending and _is_asleep(self._main_native)
        moved, slept = (None, False) if waits else self._look()
        # It may sleep in a collective if those are not known.
        slept = slept and (waits is False or not self._joined)
        self.slot.count(waits=waits, moved=moved, slept=slept)

    def _look(self) -> tuple[bool | None, bool]:
        """Return whether the main thread moves on while it computes for half a millisecond, and
        whether it sleeps instead.

        None if it does not compute, has no processor, or is in a backward pass, which is one call
        of Python.
        """
        clock = time.pthread_getcpuclockid(self._main or 0)
        first, began_ns, ran_ns = self._place(), time.clock_gettime_ns(clock), 0
        for _ in range(_LOOKS):
            time.sleep(_LOOK_S)
            place = self._place()
            if first is None or place is None:
                return None, False
            if place != first:
                return True, False
            ran_ns = time.clock_gettime_ns(clock) - began_ns
            if ran_ns >= _RAN_NS:
                return False, False
        return None, not ran_ns and _is_asleep(self._main_native)

    def _place(self) -> tuple[Any, int] | None:
        """Return the call that the main thread is in, and its instruction, if it computes.

        Another call of the same function has another frame.
        """
        channel = current_channel()
        frame = sys._current_frames().get(self._main or 0)
        phase = None if channel is None else channel.pulse.mark[0]
        if frame is None or phase not in _COMPUTES or frame.f_code.co_name in _BACKWARD:
            return None
        return frame, frame.f_lasti

    def _read_counts(self, now_s: float) -> Counts:
        if self._joined or now_s >= self._join_check_due:
            self._join_check_due = now_s + _JOIN_CHECK_S
            self._joined = self._recorder.refresh()
        return self._recorder.counts() if self._joined else UNKNOWN

    def _write_evidence(self, request: int) -> None:
        """Write the stacks of all threads and the last collectives to this rank's file."""
        missing = []
        first_stack = frames_of(sys._current_frames().get(self._main or 0), _MAX_FRAMES)
        time.sleep(_SECOND_STACK_S)
        threads = self._stacks()
        collectives: list[dict[str, Any]] = []
        enqueued: dict[str, int] = {}
        groups: dict[str, list[int]] = {}
        if self._beat_lock.exits:
            missing.append("the process is exiting")
        else:
            try:
                self._joined = self._recorder.refresh()
                if self._recorder.missing is not None:
                    missing.append(self._recorder.missing)
                else:
                    collectives, enqueued = self._recorder.collectives()
            except Exception as error:  # noqa: BLE001  (another version's format)
                missing.append(f"the flight recorder gave {type(error).__name__}: {error}")
            finally:
                groups = self._recorder.groups()
        document = {
            "question": request,
            "rank": self.rank,
            "pid": self.pid,
            "taken_ns": time.monotonic_ns(),
            "joined": self._joined,
            "threads": threads,
            "earlier_main": first_stack,
            "collectives": collectives,
            "last_enqueued": enqueued,
            "groups": groups,
            "missing": missing,
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_json(self._folder / f"rank-{self.rank:05d}.json", document)

    def _stacks(self) -> list[dict[str, Any]]:
        """Return the stacks of all threads except this one."""
        threads_by_id = {t.ident: t for t in threading.enumerate()}
        stacks = []
        for ident, frame in list(sys._current_frames().items())[:_MAX_THREADS]:
            thread = threads_by_id.get(ident)
            if thread is self._thread:
                continue
            stacks.append(
                {
                    "name": thread.name if thread is not None else f"thread {ident}",
                    "native_id": thread.native_id if thread is not None else None,
                    "main": ident == self._main,
                    "frames": frames_of(frame, _MAX_FRAMES),
                }
            )
        return stacks


def _is_asleep(thread: int | None) -> bool:
    """Return True if a thread of this process does not want to run."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "R"
    except (OSError, IndexError):
        return False


_current: HeartbeatThread | None = None


def start_heartbeat_thread(run_dir: Path, attempt: int, rank: int) -> HeartbeatThread | None:
    """Return the heartbeat thread of this process. Start it on first use.

    Return None if its file can't be created.
    """
    global _current
    existing = _current
    if existing is not None and (existing.pid, existing.rank) == (os.getpid(), rank):
        return existing
    _current = None
    with contextlib.suppress(OSError):
        _current = HeartbeatThread(run_dir, attempt, rank)
        _current.start()
    return _current


def publish_barriers(strategy: Any, slot: HeartbeatSlot) -> None:
    """Publish in ``slot`` in which of Lightning's named barriers the rank is."""
    barrier: Callable[..., Any] = strategy.barrier
    pid = os.getpid()

    @functools.wraps(barrier)
    def published_barrier(name: Any = None, *args: Any, **kwargs: Any) -> Any:
        in_rank = os.getpid() == pid
        if in_rank:
            slot.enter_barrier(str(name or "a barrier"), time.monotonic_ns())
        try:
            return barrier(name, *args, **kwargs)
        finally:
            if in_rank:
                slot.leave_barrier()

    strategy.barrier = published_barrier
