"""The limit of open files of this process, which is often 1,024 and too low for as many ranks."""

from __future__ import annotations

import resource
from contextlib import suppress

FILES_FOR_OTHERS = 512
"""Open files of a process besides the queues of ranks."""
_FILES_A_RANK = 3
"""A mirror, its reader, and a reader for records that are read again."""


def allow_queues_of(ranks: int) -> None:
    """Raise the soft limit of open files if the queues of so many ranks need more.

    The hard limit of the system stays. Beyond it, opening a queue fails with an error.
    """
    needed = _FILES_A_RANK * ranks + FILES_FOR_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
