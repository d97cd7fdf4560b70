"""What may freeze a run, told before it is started. Nothing is refused for it."""

from __future__ import annotations

import os
import sys

from ltui.app.machine import usable_cores
from ltui.training.problem import Problem
from ltui.training.run.cautions import foresee
from ltui.training.run.spec import RunSpec
from ltui.widgets.sanitise import clean_line

_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (asked for its size alone)


def foreseen(spec: RunSpec) -> list[Problem]:
    """With the place in the configuration; nothing for a command of the user's."""
    if spec.config is None:
        return []
    found = foresee(
        spec.config,
        ranks=spec.nproc,
        cores=usable_cores(),
        shared_memory_bytes=shared_memory_bytes(),
    )
    return [Problem(where=path, what=c.what, remedy=c.remedy) for path, c in found]


def shared_memory_bytes() -> int | None:
    """Size of the file system that loader workers hand over batches in; None where there is
    none."""
    try:
        there = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return there.f_frsize * there.f_blocks


def say(cautions: list[Problem]) -> None:
    """On standard error, one a line."""
    for caution in cautions:
        sys.stderr.write(f"caution: {clean_line(str(caution), 1000)}\n")
