"""Which checkpoints of a snapshot a resume can start from. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot


def good_checkpoints(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the checkpoints that are not known to be damaged."""
    return [checkpoint for checkpoint in checkpoints if checkpoint.ok is not False]


def last_good_checkpoint(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the good checkpoint with the highest step, the newest one of that step."""
    return max(
        good_checkpoints(checkpoints),
        key=lambda checkpoint: (checkpoint.global_step, checkpoint.saved_at or 0.0),
        default=None,
    )


def is_resumable(snapshot: RunSnapshot) -> bool:
    """Return whether the run has a checkpoint that a resume can start from."""
    return bool(good_checkpoints(snapshot.checkpoints))
