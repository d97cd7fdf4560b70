"""Warnings about configurations that may freeze a run, printed before it starts."""

from __future__ import annotations

import shutil
import sys

from ltui.app.launch.local_machine import usable_cores
from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import Problem
from ltui.training.state.freeze_checks import precheck
from ltui.widgets.sanitise import clean_line

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its size is read


def freeze_warnings(spec: RunSpec) -> list[Problem]:
    """Return the warnings with their place in the configuration; none for a user's command."""
    if spec.config is None:
        return []
    warnings = precheck(
        spec.config,
        ranks=spec.nproc,
        cores=usable_cores(),
        shared_memory_bytes=_shared_memory_bytes(),
    )
    return [Problem(where=path, what=c.what, remedy=c.remedy) for path, c in warnings]


def _shared_memory_bytes() -> int | None:
    """Return the size of the file system through which loader workers pass batches, if any."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        return None


def print_warnings(warnings: list[Problem]) -> None:
    """Print the warnings on standard error, one per line."""
    for warning in warnings:
        sys.stderr.write(f"warning: {clean_line(str(warning), 1000)}\n")
