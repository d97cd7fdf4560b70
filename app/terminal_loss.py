"""Ends the dashboard where its terminal went and no signal said so: under nohup, say."""

from __future__ import annotations

import os
import signal
import threading

POLL_INTERVAL_S = 1.0


def exit_with_terminal(handle: int = 0) -> None:
    """Watch the terminal behind ``handle`` until it is gone, then end this process.

    At once and without a farewell: there is nobody to see it, and drawing to it would block or
    fail. Runs go on; the dashboard owns nothing of theirs.
    """
    threading.Thread(target=_watch, args=(handle,), name="terminal", daemon=True).start()


def _watch(handle: int) -> None:
    pause = threading.Event()
    while os.isatty(handle):
        pause.wait(POLL_INTERVAL_S)
    os._exit(128 + signal.SIGHUP)
