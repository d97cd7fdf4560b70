"""Filter and sort the runs of the home screen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ltui.app.live.run_list import RunListEntry
from ltui.app.presentation.headline_metric import headline_metric
from ltui.app.presentation.snapshot_text import program_text
from ltui.app.state_words import state_word, state_words

ORDERS = ("newest first", "name", "preset", "state", "metric")
"""Sort orders. The first one is that of the list: live runs first, then the newest."""


def next_order(order: str) -> str:
    """Return the order that follows ``order``."""
    return ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]


def matches(line: RunListEntry, query: str) -> bool:
    """Return whether all words in ``query`` occur in the run's name, preset, state or detail."""
    run = line.snapshot
    text = f"{line.id} {line.problem or ''}"
    if run is not None:
        text += f" {run.name} {program_text(run)} {state_words(run)} {run.detail or ''}"
    return all(word in text.lower() for word in query.lower().split())


def ordered(lines: Sequence[RunListEntry], order: str) -> list[RunListEntry]:
    """Return the runs in that order. Runs without a value come last, and ties keep their places."""
    if order == "name":
        return sorted(lines, key=lambda line: line.snapshot.name if line.snapshot else line.id)
    if order == "preset":
        return sorted(lines, key=_preset_key)
    if order == "state":
        return sorted(lines, key=_state_key)
    return sorted(lines, key=_metric_key) if order == "metric" else list(lines)


def _preset_key(line: RunListEntry) -> tuple[bool, str]:
    return (line.snapshot is None, program_text(line.snapshot) if line.snapshot else "")


def _state_key(line: RunListEntry) -> tuple[bool, str]:
    return (not line.live, state_word(line.snapshot) if line.snapshot else "~")


def _metric_key(line: RunListEntry) -> tuple[bool, str, float]:
    """Sort by metric name, best value first."""
    shown = headline_metric(line.snapshot) if line.snapshot is not None else None
    if shown is None or not math.isfinite(shown.value):
        return (True, "", 0.0)
    return (False, shown.name, shown.value if shown.lower_is_better else -shown.value)
