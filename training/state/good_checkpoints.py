"""Which checkpoints are good: undamaged, with finite weights, and from before the first NaN loss.

Pure. Every resume, restart and piece of advice chooses by these rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot, Verdict
from ltui.training.state.verdicts import VerdictKind

FINITE = "finite"
"""``CheckpointInfo.weights`` of a checkpoint whose weights were checked and are finite."""


def bad_loss(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict that the loss is NaN or infinite, if it is active."""
    kind = VerdictKind.NAN_LOSS
    return next((v for v in verdicts if v.kind == kind and v.ended is None), None)


def nan_since(verdicts: Iterable[Verdict]) -> int | None:
    """Return the step since which the loss is NaN or infinite; None if it is finite."""
    verdict = bad_loss(verdicts)
    step = None if verdict is None else verdict.evidence.get("step")
    return step if isinstance(step, int) else None


def badness(checkpoint: CheckpointInfo, since: int | None) -> str | None:
    """Return why a run should not continue from an undamaged checkpoint, or None if it should.

    ``since``: the step since which the loss is NaN.
    """
    if checkpoint.weights not in (None, FINITE):
        return f"has {checkpoint.weights} weights"
    # Finite weights of the step itself are from before it: several batches may be one step.
    first_bad = None if since is None else since + (checkpoint.weights == FINITE)
    if first_bad is not None and checkpoint.global_step >= first_bad:
        return f"is from after the first NaN loss (step {since})"
    return None


def progress_key(checkpoint: CheckpointInfo) -> tuple[bool, int, int, int, float, int]:
    """Return a sort key by which the checkpoint that a resume takes first is the last one.

    Checkpoints that the run has left by a resume from an earlier step come first. The others are
    ordered by attempt, ``fit`` call and step. The time counts only for manifests without an
    attempt, because clocks may be set back.
    """
    attempt, step = checkpoint.attempt or 0, checkpoint.global_step
    return (
        not checkpoint.superseded,
        attempt,
        checkpoint.fit or 0,
        step if attempt else 0,
        checkpoint.saved_at or 0.0,
        step,
    )


def newest_checkpoint(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the undamaged checkpoint with the most progress: the one that a resume takes."""
    return max((c for c in checkpoints if c.ok is not False), key=progress_key, default=None)


def last_good_checkpoint(
    checkpoints: Iterable[CheckpointInfo], since: int | None = None
) -> CheckpointInfo | None:
    """Return the newest good checkpoint. ``since``: the step since which the loss is NaN."""
    return newest_checkpoint(c for c in checkpoints if badness(c, since) is None)


def advice_before_nan(checkpoints: Iterable[CheckpointInfo], since: int | None) -> str:
    """Return ``the last one before the NaN is step 160``, or that there is none."""
    good = last_good_checkpoint(checkpoints, since)
    if good is not None:
        return f"the last checkpoint before the NaN is step {good.global_step}"
    return "there is no checkpoint before the NaN"


def is_resumable(snapshot: RunSnapshot) -> bool:
    """Return whether the run has a good checkpoint, from which a resume can start."""
    return last_good_checkpoint(snapshot.checkpoints, nan_since(snapshot.verdicts)) is not None
