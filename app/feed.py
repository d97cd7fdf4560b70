"""The thread between a run and its screen: four frames a second, the latest wins, errors show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ltui.app.frame import Frame
from ltui.training.run.snapshot import RunSnapshot, RunState

PERIOD_S = 0.25


class Watch(Protocol):
    """What the feed asks: ``watch.RunWatch``, or a test's own."""

    def look(self, now: float, now_ns: int) -> Frame: ...
    def close(self) -> None: ...


class Feed:
    """Calls ``post`` with a frame at each tick until ``stop``. ``post`` must not block."""

    def __init__(
        self, make_watch: Callable[[], Watch], post: Callable[[Frame], None], *, run_id: str
    ) -> None:
        self._make_watch, self._post = make_watch, post
        self._stopped = threading.Event()
        self._last = Frame(
            snapshot=RunSnapshot(id=run_id, name=run_id, state=RunState.QUEUED),
            now=time.time(),
            supervisor_answers=False,
            snapshot_at=time.time(),
        )
        self._error_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"feed {run_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does within a tick."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        watch: Watch | None = None
        try:
            while not self._stopped.is_set():
                began = time.monotonic()
                try:
                    watch = watch or self._make_watch()
                    self._last = watch.look(time.time(), time.monotonic_ns())
                    self._error_since = None
                    self._deliver(self._last)
                except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
                    self._deliver(self._failed(error))
                spent = time.monotonic() - began
                # A look that takes long must not take the whole of a core either.
                self._stopped.wait(max(PERIOD_S - spent, spent, 0.02))
        finally:
            if watch is not None:
                watch.close()

    def _failed(self, error: Exception) -> Frame:
        now = time.time()
        self._error_since = self._error_since or now
        text = str(error) or type(error).__name__
        return replace(self._last, now=now, error=text, error_since=self._error_since)

    def _deliver(self, frame: Frame) -> None:
        if not self._stopped.is_set():
            self._post(frame)
