"""Another run's checkpoint as the beginning of a new one, as people name it: ``RUN`` or
``RUN:STEP``."""

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
    """The checkpoint that a resume of ``RUN`` would take, or the last whole one of ``STEP``.

    Reads it all. ``ProblemError`` where there is none.
    """
    run_dir, step = _named(home, text)
    if step is None:
        taken = checkpoint_to_resume(run_dir.checkpoints_dir)
        if taken is None:
            raise ProblemError(_without(text))
        return run_dir, taken
    for info in _of_step(run_dir, step):
        if verify(info).ok:
            return run_dir, info
    raise ProblemError(_without_step(run_dir, text, step))


def likely_start_checkpoint(home: Path, text: str) -> tuple[RunDir, CheckpointInfo]:
    """What ``find_start_checkpoint`` will give unless its checksums are wrong, at once."""
    run_dir, step = _named(home, text)
    found = furthest_checkpoint(run_dir.checkpoints_dir) if step is None else None
    if step is not None:
        found = next((c for c in _of_step(run_dir, step) if c.ok is not False), None)
    if found is None:
        raise ProblemError(_without(text) if step is None else _without_step(run_dir, text, step))
    return run_dir, found


def _named(home: Path, text: str) -> tuple[RunDir, int | None]:
    name, colon, step = text.rpartition(":")
    if colon and step.isdecimal():
        return find_run(home, name), int(step)
    return find_run(home, text), None


def _of_step(run_dir: RunDir, step: int) -> list[CheckpointInfo]:
    """The last one saved first."""
    known = list_checkpoints(run_dir.checkpoints_dir)
    return [info for info in reversed(known) if info.global_step == step]


def _without(text: str) -> Problem:
    return Problem(where=f"--from {text}", what="this run has no complete checkpoint.")


def _without_step(run_dir: RunDir, text: str, step: int) -> Problem:
    known = list_checkpoints(run_dir.checkpoints_dir)
    steps = ", ".join(str(s) for s in sorted({c.global_step for c in known if c.ok is not False}))
    return Problem(
        where=f"--from {text}",
        what=f"it has no complete checkpoint of step {step}.",
        remedy=f"There are checkpoints of steps {steps}." if steps else None,
    )
