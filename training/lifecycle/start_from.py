"""Find the checkpoint that a person names: of another run from which a new one starts (``--from
RUN[:STEP]``), or of the run that is resumed (``--from STEP``)."""

from __future__ import annotations

from pathlib import Path

from ltui.training.lifecycle.run_status import nan_step
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.run_checkpoints import (
    choose_checkpoint,
    furthest_checkpoint,
    list_checkpoints,
    verify,
)
from ltui.training.store.run_directory import RunDir, find_run


def find_start_checkpoint(
    home: Path, text: str, *, verified: bool = True
) -> tuple[RunDir, CheckpointInfo]:
    """Return the run and the checkpoint that ``text`` names. Raise ``ProblemError`` if none.

    ``RUN`` means the checkpoint that a resume of the run would use. ``RUN:STEP`` means the last
    verified checkpoint of that step. The whole checkpoint is read to verify its checksums; without
    ``verified``, all checksums are assumed to be right.
    """
    run_dir, step = _parse(home, text)
    folder = run_dir.checkpoints_dir
    if step is None:
        since = nan_step(run_dir)
        choice = choose_checkpoint(folder, since) if verified else None
        checkpoint = choice.taken if choice is not None else furthest_checkpoint(folder, since)
        if checkpoint is None:
            what = "this run has no complete checkpoint."
            if choice is not None and choice.skipped:
                what = f"{choice.why_none()}."
            raise ProblemError.of(where=f"--from {text}", what=what)
        return run_dir, checkpoint
    return run_dir, checkpoint_of_step(run_dir, step, f"--from {text}", verified=verified)


def checkpoint_of_step(
    run_dir: RunDir, step: int, where: str, *, verified: bool = True
) -> CheckpointInfo:
    """Return the undamaged checkpoint of ``step`` that was saved last, whatever its weights are.

    Raise ``ProblemError`` with ``where`` if there is none.
    """
    saved = list_checkpoints(run_dir.checkpoints_dir)
    # The checkpoint that was saved last comes first.
    for checkpoint in reversed(saved):
        if checkpoint.global_step == step:
            ok = verify(checkpoint).ok if verified else checkpoint.ok is not False
            if ok:
                return checkpoint
    steps = ", ".join(str(s) for s in sorted({c.global_step for c in saved if c.ok is not False}))
    raise ProblemError.of(
        where=where,
        what=f"it has no complete checkpoint of step {step}.",
        remedy=f"There are checkpoints of steps {steps}." if steps else None,
    )


def _parse(home: Path, text: str) -> tuple[RunDir, int | None]:
    """Split ``RUN`` or ``RUN:STEP`` into the run and the step."""
    name, colon, step = text.rpartition(":")
    if colon and step.isdecimal():
        return find_run(home, name), int(step)
    return find_run(home, text), None
