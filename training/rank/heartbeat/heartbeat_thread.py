"""The witness: a thread of the rank that says twice a second that Python runs here, and which
collective was enqueued last; and that answers the supervisor's question with stacks and
collectives.

It costs the training thread nothing but the GIL for some microseconds. Where its beat grows old,
something holds the GIL (or the process is stopped): that is evidence too. It never raises, never
touches the device, adds no collective.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltui.training.rank.heartbeat import stack_dump_setup
from ltui.training.rank.heartbeat.flight_recorder import UNKNOWN, FlightRecorder
from ltui.training.tensor_queue.heartbeat_table import (
    JOINED,
    RECORDED,
    SIGNAL_HANDLER_OURS,
    HeartbeatSlot,
)

BEAT_S = 0.5
_LOOK_AGAIN_S = 2.0
"""How often a process that has joined no group is asked again whether it has."""
_THREADS, _FRAMES = 64, 80
_AGAIN_S = 0.1
"""Between two looks at the main thread, which tell one line from many."""

Frames = list[tuple[str, int, str]]


class HeartbeatThread:
    """One rank's witness thread. ``start`` it once a process."""

    def __init__(self, run_dir: Path, attempt: int, rank: int) -> None:
        """Raises ``OSError``."""
        self.rank = rank
        self.pid = os.getpid()
        self.slot = HeartbeatSlot(run_dir / "queue" / str(attempt), rank)
        self._folder = run_dir / "evidence" / str(attempt)
        self._recorder = FlightRecorder()
        self._joined = False
        self._look_due = 0.0
        self._answered = self.slot.evidence_request()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="ltui-witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a witness that fails is silent, nothing more
            if not stack_dump_setup.is_handler_installed():
                stack_dump_setup.begin()
        while True:
            with contextlib.suppress(Exception):
                self._beat()
                question = self.slot.evidence_request()
                if question > self._answered:
                    self._answer(question)
                    self._answered = question
                    self._beat()
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        counts = UNKNOWN
        with contextlib.suppress(Exception):  # the beat goes on without
            if self._joined or now_ns * 1e-9 >= self._look_due:
                self._look_due = now_ns * 1e-9 + _LOOK_AGAIN_S
                self._joined = self._recorder.look()
            if self._joined:
                counts = self._recorder.counts()
        flags = (
            SIGNAL_HANDLER_OURS * stack_dump_setup.is_handler_installed()
            | JOINED * self._joined
            | RECORDED * self._recorder.recorded
        )
        thread = threading.get_native_id()
        self.slot.publish(now_ns, thread, *counts, self._answered, flags)

    def _answer(self, question: int) -> None:
        missing = []
        first = _frames_of(sys._current_frames().get(self._main or 0))
        time.sleep(_AGAIN_S)
        threads = self._stacks()
        collectives: list[dict[str, Any]] = []
        enqueued: dict[str, int] = {}
        self._joined = self._recorder.look()
        if self._recorder.missing is not None:
            missing.append(self._recorder.missing)
        else:
            try:
                collectives, enqueued = self._recorder.entries(), self._recorder.last_enqueued()
            except Exception as error:  # noqa: BLE001  (another version's answer)
                missing.append(f"the flight recorder gave {type(error).__name__}: {error}")
        document = {
            "question": question,
            "rank": self.rank,
            "pid": self.pid,
            "taken_ns": time.monotonic_ns(),
            "joined": self._joined,
            "threads": threads,
            "earlier_main": first,
            "collectives": collectives,
            "last_enqueued": enqueued,
            "groups": self._recorder.groups(),
            "missing": missing,
        }
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"rank-{self.rank:05d}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document), encoding="utf-8")
        os.replace(part, path)

    def _stacks(self) -> list[dict[str, Any]]:
        known = {t.ident: t for t in threading.enumerate()}
        found = []
        for ident, frame in list(sys._current_frames().items())[:_THREADS]:
            thread = known.get(ident)
            if thread is self._thread:
                continue
            found.append(
                {
                    "name": thread.name if thread is not None else f"thread {ident}",
                    "native_id": thread.native_id if thread is not None else None,
                    "main": ident == self._main,
                    "frames": _frames_of(frame),
                }
            )
        return found


def _frames_of(frame: Any) -> Frames:
    """Innermost first."""
    frames: Frames = []
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


_current: HeartbeatThread | None = None


def start_heartbeat_thread(run_dir: Path, attempt: int, rank: int) -> HeartbeatThread | None:
    """The process's witness, started on first use; None where its file can't be made."""
    global _current
    known = _current
    if known is not None and (known.pid, known.rank) == (os.getpid(), rank):
        return known
    _current = None
    with contextlib.suppress(OSError):
        _current = HeartbeatThread(run_dir, attempt, rank)
        _current.start()
    return _current


def publish_barriers(strategy: Any, slot: HeartbeatSlot) -> None:
    """Show which of Lightning's named barriers the rank stands in."""
    barrier: Callable[..., Any] = strategy.barrier
    pid = os.getpid()

    @functools.wraps(barrier)
    def named(name: Any = None, *args: Any, **kwargs: Any) -> Any:
        ours = os.getpid() == pid
        if ours:
            slot.enter_barrier(str(name or "a barrier"), time.monotonic_ns())
        try:
            return barrier(name, *args, **kwargs)
        finally:
            if ours:
                slot.leave_barrier()

    strategy.barrier = named
