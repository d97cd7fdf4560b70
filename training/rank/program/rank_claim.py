"""Which process is a rank: the first one that trains as it.

Programs that a rank starts (an evaluation, a tokenizer) inherit the variables that name the rank.
So a process claims its rank by a lock on a file beside the rank's queue. The lock is one of
``fcntl.lockf``, which belongs to the process alone and ends with it: neither a forked worker nor a
killed rank keeps it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_claims: dict[Path, int] = {}
"""Claimed file -> its descriptor, which stays open: closing it would give the lock up."""


def claim_rank(queue_dir: Path, rank: int) -> bool:
    """Return False if another live process is this rank. Raises ``OSError``."""
    queue_dir.mkdir(parents=True, exist_ok=True)
    path = queue_dir / f"rank-{rank:05d}.claim"
    if path in _claims:
        return True
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _claims[path] = file
    return True
