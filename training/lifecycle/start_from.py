"""Find the checkpoint of another run from which a new run starts (``--from RUN[:STEP]``)."""

from __future__ import annotations

from pathlib import Path

from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.checkpoint_manifest import (
    checkpoint_to_resume,
    furthest_checkpoint,
    list_checkpoints,
    verify,
)
from ltui.training.store.run_directory import RunDir, find_run


def find_start_checkpoint(home: Path, text: str) -> tuple[RunDir, CheckpointInfo]:
    """Return the run and the checkpoint that ``text`` names.

    ``RUN`` means the checkpoint that a resume of the run would use. ``RUN:STEP`` means the last
    verified checkpoint of that step. The whole checkpoint is read to verify its checksums. Raises
    ``ProblemError`` if there is none.
    """
    run_dir, step = _parse(home, text)
    if step is None:
        newest = checkpoint_to_resume(run_dir.checkpoints_dir)
        if newest is None:
            raise ProblemError(_no_checkpoint(text))
        return run_dir, newest
    for info in _checkpoints_of_step(run_dir, step):
        if verify(info).ok:
            return run_dir, info
    raise ProblemError(_no_checkpoint_of_step(run_dir, text, step))


def likely_start_checkpoint(home: Path, text: str) -> tuple[RunDir, CheckpointInfo]:
    """Return what ``find_start_checkpoint`` returns if all checksums are right, without reading."""
    run_dir, step = _parse(home, text)
    if step is None:
        checkpoint = furthest_checkpoint(run_dir.checkpoints_dir)
        if checkpoint is None:
            raise ProblemError(_no_checkpoint(text))
        return run_dir, checkpoint
    for checkpoint in _checkpoints_of_step(run_dir, step):
        if checkpoint.ok is not False:
            return run_dir, checkpoint
    raise ProblemError(_no_checkpoint_of_step(run_dir, text, step))


def _parse(home: Path, text: str) -> tuple[RunDir, int | None]:
    """Split ``RUN`` or ``RUN:STEP`` into the run and the step."""
    name, colon, step = text.rpartition(":")
    if colon and step.isdecimal():
        return find_run(home, name), int(step)
    return find_run(home, text), None


def _checkpoints_of_step(run_dir: RunDir, step: int) -> list[CheckpointInfo]:
    """Return the checkpoints of ``step``, the one saved last first."""
    saved = list_checkpoints(run_dir.checkpoints_dir)
    return [info for info in reversed(saved) if info.global_step == step]


def _no_checkpoint(text: str) -> Problem:
    return Problem(where=f"--from {text}", what="this run has no complete checkpoint.")


def _no_checkpoint_of_step(run_dir: RunDir, text: str, step: int) -> Problem:
    saved = list_checkpoints(run_dir.checkpoints_dir)
    steps = ", ".join(str(s) for s in sorted({c.global_step for c in saved if c.ok is not False}))
    return Problem(
        where=f"--from {text}",
        what=f"it has no complete checkpoint of step {step}.",
        remedy=f"There are checkpoints of steps {steps}." if steps else None,
    )
