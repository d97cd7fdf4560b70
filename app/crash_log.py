"""The log of errors that the dashboard did not expect."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from ltui.training.store.run_directory import open_private_log
from ltui.widgets.sanitise import clean_line

LOG_NAME = "dashboard.log"
MOST_BYTES = 1 << 20
"""Size from which the log begins anew."""


def log_error(home: Path, error: BaseException, happened: str) -> str:
    """Write a traceback to the log, and return the sentence for the user: what has happened.

    If the log cannot be written, the traceback follows the sentence.
    """
    path = home / LOG_NAME
    text = "".join(traceback.format_exception(error))
    reason = clean_line(f"{type(error).__name__}: {error}", 200)
    sentence = f"{happened} ({reason}). Training continues. The traceback"
    try:
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink()
        with open_private_log(path) as log:
            entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n"
            log.write(entry.encode(errors="backslashreplace"))
    except OSError as unwritable:
        return f"{sentence} cannot be written to {path} ({unwritable.strerror}):\n{text}"
    return f"{sentence} is in {path}"
