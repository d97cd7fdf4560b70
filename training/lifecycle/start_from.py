"""Find the checkpoint of another run from which a new run starts (``--from RUN[:STEP]``)."""

from __future__ import annotations

from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.run_checkpoints import (
    checkpoint_to_resume,
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
        checkpoint = checkpoint_to_resume(folder) if verified else furthest_checkpoint(folder)
        if checkpoint is None:
            what = "this run has no complete checkpoint."
            raise ProblemError.of(where=f"--from {text}", what=what)
        return run_dir, checkpoint
    saved = list_checkpoints(folder)
    # The checkpoint that was saved last comes first.
    for checkpoint in reversed(saved):
        if checkpoint.global_step == step:
            ok = verify(checkpoint).ok if verified else checkpoint.ok is not False
            if ok:
                return run_dir, checkpoint
    steps = ", ".join(str(s) for s in sorted({c.global_step for c in saved if c.ok is not False}))
    raise ProblemError.of(
        where=f"--from {text}",
        what=f"it has no complete checkpoint of step {step}.",
        remedy=f"There are checkpoints of steps {steps}." if steps else None,
    )


def _parse(home: Path, text: str) -> tuple[RunDir, int | None]:
    """Split ``RUN`` or ``RUN:STEP`` into the run and the step."""
    name, colon, step = text.rpartition(":")
    if colon and step.isdecimal():
        return find_run(home, name), int(step)
    return find_run(home, text), None
