"""A log of its own for every rank of a command that knows nothing of ltui.

All processes of such a command write to the one ``engine.log`` that they inherited. Once a rank
knows its number, what it writes from then on goes to ``rank-00003.log`` beside it. Output that the
user's command has sent elsewhere stays where it was sent.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping


def redirect_rank_log(environ: Mapping[str, str], rank: int) -> None:
    """Point this process's standard output and error at its rank's log. Raises ``OSError``."""
    folder = environ.get("LTUI_LOG_DIR")
    if not folder:
        return
    try:
        shared = os.stat(os.path.join(folder, "engine.log"))
    except FileNotFoundError:
        return
    inherited = [fd for fd in (1, 2) if _writes_to(fd, shared)]
    if not inherited:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # closed, or none at all
            stream.flush()
    path = os.path.join(folder, f"rank-{rank:05d}.log")
    own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for fd in inherited:
            os.dup2(own, fd)
    finally:
        os.close(own)


def _writes_to(fd: int, shared: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), shared)
    except OSError:
        return False
