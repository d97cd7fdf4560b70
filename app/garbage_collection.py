"""Pause the garbage collector while the dashboard starts.

Importing Textual creates some hundred thousand objects that live until the process ends. The
collector would traverse all of them several times before the first screen is drawn, which takes a
quarter of the start.
"""

from __future__ import annotations

import gc
import threading

RESUME_AFTER_S = 2.0
"""Seconds without garbage collection: longer than a start takes."""


def pause_during_start() -> None:
    """Switch the collector off now, and on again after ``RESUME_AFTER_S``."""
    gc.disable()
    timer = threading.Timer(RESUME_AFTER_S, resume)
    timer.daemon = True
    timer.start()


def resume() -> None:
    """Switch the collector on, and exclude the existing objects: they live until the end anyway."""
    gc.freeze()
    gc.enable()
