"""Give every rank its own log if the user's command does not use ltui itself.

All processes of such a command inherit one ``engine.log``. Once a rank's number is known, its
further output goes to ``rank-00003.log`` in the same folder. Output that the command redirected
elsewhere stays there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping


def redirect_rank_log(environ: Mapping[str, str], rank: int) -> None:
    """Redirect this process's standard output and error to its rank's log. Raises ``OSError``."""
    folder = environ.get("LTUI_LOG_DIR")
    if not folder:
        return
    try:
        shared_log = os.stat(os.path.join(folder, "engine.log"))
    except FileNotFoundError:
        return
    inherited = [fd for fd in (1, 2) if _writes_to(fd, shared_log)]
    if not inherited:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream is closed or None
            stream.flush()
    path = os.path.join(folder, f"rank-{rank:05d}.log")
    rank_log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for fd in inherited:
            os.dup2(rank_log, fd)
    finally:
        os.close(rank_log)


def _writes_to(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False
