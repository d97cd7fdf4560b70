"""A lock that a thread of ltui holds while it uses frames of other threads, or torch."""

from __future__ import annotations

import atexit
import os
import threading

_WAIT_S = 5.0
"""Maximum seconds for which the exit of the process waits for the thread."""


class ExitLock:
    """Held by the exit of the process for ever.

    When Python ends, it ends a daemon thread where it next needs the GIL. Within C++ code of torch
    that aborts the process. A thread that holds frames of the main thread may get there: if these
    return meanwhile, it destroys their variables, such as a model.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self.exits = False
        atexit.register(self._end)

    def acquire(self) -> bool:
        """Wait for the lock and take it. Return False if the process exits."""
        return not self.exits and self._lock.acquire(timeout=_WAIT_S)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def _end(self) -> None:
        if os.getpid() == self._pid:  # the lock of a forked child may be held for ever
            self.exits = True
            self._lock.acquire(timeout=_WAIT_S)
