"""The log of a dashboard that has crashed."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from ltui.training.store.run_directory import open_private_log
from ltui.widgets.sanitise import clean_line

LOG_NAME = "dashboard.log"
MOST_BYTES = 1 << 20
"""Size from which the log begins anew."""


def log_crash(home: Path, error: BaseException) -> str | None:
    """Write a traceback to the log, and return the sentence for the terminal; None if the log
    cannot be written."""
    path = home / LOG_NAME
    try:
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink()
        with open_private_log(path) as log:
            text = "".join(traceback.format_exception(error))
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n".encode())
    except OSError:
        return None
    reason = clean_line(f"{type(error).__name__}: {error}", 200)
    return f"The dashboard has crashed ({reason}). Training continues. The traceback is in {path}"
