"""What the functions of ``ltui_rank`` do in a process that belongs to a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ltui.training.rank.program import program_rank
from ltui.training.rank.program.logged_values import logged_values
from ltui.training.rank.program.tracked_loop import TrackedLoop

on_checkpoint = program_rank.register


def log(values: Mapping[str, Any]) -> None:
    """Log values by name, as those that the program logs by another library."""
    logged_values.record(values)


def track(loop: Iterable[Any], name: str) -> TrackedLoop:
    """Return ``loop`` with a known position."""
    return TrackedLoop(loop, name)
