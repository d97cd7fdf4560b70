"""The thread between a run and its screen. It posts one to four frames per second, and errors as
frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from ltui.app.live.frame import Frame
from ltui.training.state.run_snapshot import RunSnapshot, RunState

FASTEST_S, SLOWEST_S = 0.25, 1.0
"""Least and most seconds between two frames."""
MAX_CPU_FRACTION = 0.02
"""Fraction of a CPU core that frames may use: reading and drawing them and writing to the
terminal."""
_SMOOTHING = 0.2
"""Weight of the last frame in the mean cost of a frame."""


class FramePacer:
    """Chooses the time between frames so that a dashboard uses a limited fraction of a CPU core.

    A frame costs more with more ranks, and on a slow or busy processor.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0

    def period_s(self, cpu_s: float) -> float:
        """Return the seconds until the next frame. ``cpu_s`` is the CPU time of the process for
        the last frame."""
        # A single expensive frame, such as the first one, must not slow down the next ones.
        cost_s = min(cpu_s, MAX_CPU_FRACTION * SLOWEST_S)
        self._cost_s += _SMOOTHING * (cost_s - self._cost_s)
        return min(SLOWEST_S, max(FASTEST_S, self._cost_s / MAX_CPU_FRACTION))


class Poller(Protocol):
    """The source of frames: ``run_poller.RunPoller``, or a fake in a test."""

    def poll(self, now: float, now_ns: int) -> Frame: ...
    def close(self) -> None: ...


class PollerThread:
    """Calls ``post`` with a frame at each tick until ``stop``. ``post`` must not block."""

    def __init__(
        self, make_poller: Callable[[], Poller], post: Callable[[Frame], None], *, run_id: str
    ) -> None:
        self._make_poller, self._post = make_poller, post
        self._stopped = threading.Event()
        self._woken = threading.Event()
        self._last = Frame(
            snapshot=RunSnapshot(
                id=run_id, name=run_id, state=RunState.QUEUED, saves_checkpoints=None
            ),
            now=time.time(),
            supervisor_answers=False,
            snapshot_at=time.time(),
        )
        self._error_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"feed {run_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it ends within a tick."""
        self._stopped.set()
        self._woken.set()

    def wake(self) -> None:
        """Ask for the next frame at once, because a screen requests other curves."""
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        poller: Poller | None = None
        pace, cpu_before = FramePacer(), time.process_time()
        try:
            while not self._stopped.is_set():
                began = time.monotonic()
                try:
                    poller = poller or self._make_poller()
                    self._last = poller.poll(time.time(), time.monotonic_ns())
                    self._error_since = None
                    self._post_frame(self._last)
                except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
                    self._post_frame(self._error_frame(error))
                cpu = time.process_time()
                period, cpu_before = pace.period_s(cpu - cpu_before), cpu
                spent = time.monotonic() - began
                # After a poll that waited long for files or the supervisor, rest for as long.
                rest = max(spent, 0.02)
                self._stopped.wait(rest)
                self._woken.wait(max(0.0, period - spent - rest))
                self._woken.clear()
        finally:
            if poller is not None:
                poller.close()

    def _error_frame(self, error: Exception) -> Frame:
        now = time.time()
        self._error_since = self._error_since or now
        text = str(error) or type(error).__name__
        return replace(self._last, now=now, error=text, error_since=self._error_since)

    def _post_frame(self, frame: Frame) -> None:
        if not self._stopped.is_set():
            self._post(frame)
