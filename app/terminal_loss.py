"""End the dashboard when its terminal closes without a signal, for example under nohup."""

from __future__ import annotations

import os
import signal
import threading

POLL_INTERVAL_S = 1.0
"""Seconds between two checks of the terminal."""


def exit_with_terminal(handle: int = 0) -> None:
    """Watch the terminal behind ``handle``, and end this process when it closes.

    The process exits at once and prints nothing: drawing to a closed terminal would block or fail.
    Runs keep running; the dashboard owns none of their processes.
    """
    threading.Thread(target=_watch_terminal, args=(handle,), name="terminal", daemon=True).start()


def _watch_terminal(handle: int) -> None:
    pause = threading.Event()
    while os.isatty(handle):
        pause.wait(POLL_INTERVAL_S)
    os._exit(128 + signal.SIGHUP)
