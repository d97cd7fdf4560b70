"""What happened to a run while it trained, as marks for its charts: read from the store."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from ltui.training.config.run_spec import BLOCKING_LEVELS

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import CheckpointInfo
    from ltui.training.store.history_reader import RunStore


class MarkKind(Enum):
    """What a mark stands for."""

    ATTEMPT = "attempt"
    CHANGE = "change"
    STALL = "stall"
    CHECKPOINT = "checkpoint"


class RunMark(Struct, frozen=True):
    """One event of a run, at a step, a time, or both."""

    kind: MarkKind
    text: str
    step: float | None
    at: float | None
    """Unix seconds."""


def stored_marks(store: RunStore) -> list[RunMark]:
    """Return the attempts after the first, changes of the configuration, and stalls."""
    marks = []
    for attempt in store.attempts():
        if attempt.number == 1:
            continue
        step, at = attempt.resumed_step, attempt.started_at
        origin = "from the start" if not step else f"from step {step}"
        marks.append(RunMark(MarkKind.ATTEMPT, f"attempt {attempt.number} {origin}", step or 0, at))
        if attempt.changes:
            changed = f"changed {', '.join(attempt.changes)}"
            marks.append(RunMark(MarkKind.CHANGE, changed, step or 0, at))
    for verdict in store.verdicts():
        if verdict.level in BLOCKING_LEVELS and verdict.began is not None:
            lasted = "" if verdict.ended is None else f" for {verdict.ended - verdict.began:.0f} s"
            text = f"{verdict.level}{lasted}: {verdict.cause}"
            marks.append(RunMark(MarkKind.STALL, text, None, verdict.began))
    return marks


def checkpoint_marks(checkpoints: Sequence[CheckpointInfo]) -> list[RunMark]:
    """Return one mark for each checkpoint that exists."""
    return [
        RunMark(
            MarkKind.CHECKPOINT,
            f"checkpoint of step {info.global_step}{f', {info.reason}' if info.reason else ''}",
            float(info.global_step),
            info.saved_at,
        )
        for info in checkpoints
    ]
