"""Start another attempt of a run that has ended.

User errors are reported as ``ProblemError`` and leave no files behind.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.freeze_code import freeze_code, remove_frozen
from ltui.training.lifecycle.launch_run import check_start, home_not_writable
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_processes import latest_attempt
from ltui.training.lifecycle.run_status import nan_step, recover_run, resolve_snapshot, stays_live
from ltui.training.lifecycle.supervisor_client import START_S, AttemptPlan, start_supervisor
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE, CheckpointInfo, RunState
from ltui.training.store.find_run import find_run
from ltui.training.store.frozen_code import (
    changed_files,
    code_to_run,
    differs_text,
    frozen_command,
    listed,
    read_frozen,
)
from ltui.training.store.history_queries import first_replaced_step
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_checkpoints import (
    ResumeChoice,
    choose_checkpoint,
    furthest_checkpoint,
    list_checkpoints,
    verify,
)
from ltui.training.store.run_directory import RunDir


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


def replaced_steps(run_dir: RunDir, checkpoints: Iterable[CheckpointInfo]) -> dict[str, str]:
    """Return a sentence for each checkpoint from which a resume takes steps from the curves.

    The keys are the paths of the checkpoints.
    """
    try:
        with RunStore(run_dir) as store:
            last, spans = store.last_step(), store.spans()
    except ProblemError:
        return {}
    sentences = {}
    for checkpoint in checkpoints:
        first = checkpoint.global_step + 1
        if checkpoint.superseded and checkpoint.attempt is not None:
            first = min(first, first_replaced_step(spans, checkpoint.attempt))
        if first <= last:
            steps = f"Steps {first} to {last} are" if first < last else f"Step {first} is"
            sentences[checkpoint.path] = f"{steps} then no longer part of the run's curves."
    return sentences


def _parse(home: Path, text: str) -> tuple[RunDir, int | None]:
    """Split ``RUN`` or ``RUN:STEP`` into the run and the step."""
    name, colon, step = text.rpartition(":")
    if colon and step.isdecimal():
        return find_run(home, name), int(step)
    return find_run(home, text), None


_EXIT_S = 3.0
"""Seconds within which a supervisor exits after it has recorded the end of its run."""


def resume(
    run_dir: RunDir,
    *,
    spec: RunSpec | None = None,
    checkpoint: Path | None = None,
    because: str | None = None,
    code_of_now: bool = False,
    queued_attempt: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Start another attempt from ``checkpoint``, or from the last good one.

    ``spec`` replaces the stored specification. ``because`` is the reason if no person resumes the
    run. ``code_of_now`` freezes the code as it is now, and the attempt trains with this copy; the
    sentence that is returned says which files differ. With ``queued_attempt``, the run queue starts
    this attempt, in the ``environment`` of the process that asked. Raises ``ProblemError`` if the
    run is live, or if there is nothing to resume from.
    """
    before = run_dir.read_spec()
    changed = spec is not None and spec.overrides != before.overrides
    allow_finished = changed or checkpoint is not None or because is not None
    queued = queued_attempt is not None
    check_resumable(run_dir, allow_finished=allow_finished, queued=queued)
    step, path, skipped = resume_point(run_dir, checkpoint)
    check_start(_with_frozen_command(run_dir, spec or before, code_of_now=code_of_now))
    told = None
    plan = AttemptPlan(
        resume_from=path,
        resume_step=step,
        skipped=skipped,
        restarted_because=because,
        queued_attempt=queued_attempt,
    )
    new_spec_path: Path | None = None
    copy: int | None = None
    is_started = False
    try:
        install_rank_package(run_dir.home)
        if code_of_now:
            spec, told = _freeze_again(run_dir, spec or before)
            copy = spec.code_copy
        if spec is not None:
            new_spec_path = _write_new_spec(run_dir, spec)
            new = spec.overrides[len(before.overrides) :]
            plan = replace(plan, changes=new, spec_path=new_spec_path)
        start_supervisor(run_dir, plan, environment)
        is_started = True
    except OSError as error:
        raise home_not_writable(run_dir.home, error) from error
    finally:
        if new_spec_path is not None:
            shutil.rmtree(new_spec_path.parent, ignore_errors=True)
        if copy is not None and not is_started:
            _undo_freezing(run_dir, before, copy)
    return told


def _freeze_again(run_dir: RunDir, spec: RunSpec) -> tuple[RunSpec, str]:
    """Freeze the code of now for the next attempt. Return its specification, and what differs."""
    number = max(latest_attempt(run_dir) or 1, spec.code_copy) + 1
    before = read_frozen(run_dir, spec.code_copy) if spec.freeze else None
    frozen = freeze_code(run_dir, spec, number)
    changed = [] if before is None else changed_files(run_dir, before, frozen)
    told = frozen.text()
    if before is not None:
        told += f"; {differs_text(before.number, len(changed))}"
    if changed:
        told += f": {listed(changed, len(changed))}"
    return spec.with_changes(freeze=True, code_copy=number), f"{told}."


def _undo_freezing(run_dir: RunDir, before: RunSpec, number: int) -> None:
    """Remove the copy of an attempt that was not started, unless its supervisor did not answer."""
    if lock_holder(run_dir.lock_path) is None and (latest_attempt(run_dir) or 0) < number:
        run_dir.write_spec(before)  # the supervisor may have replaced it
        remove_frozen(run_dir, number)


def _with_frozen_command(run_dir: RunDir, spec: RunSpec, *, code_of_now: bool) -> RunSpec:
    """Return ``spec`` with the files of the copy that it will use, since the originals may be
    gone. Raises ``ProblemError`` if the copy is."""
    frozen = None if code_of_now else code_to_run(run_dir, spec)
    if frozen is None or spec.command is None:
        return spec
    return spec.with_changes(command=frozen_command(run_dir, frozen, spec.command, spec.cwd))


def check_resumable(run_dir: RunDir, *, allow_finished: bool, queued: bool = False) -> None:
    """Raise ``ProblemError`` if the run is live, or if it is finished and that is not allowed.

    With ``queued``, it may wait in the run queue.
    """
    wait_for_supervisor_exit(run_dir)
    # The end of an abandoned attempt includes the records that are still in its queues.
    recover_run(run_dir, START_S)
    snapshot = resolve_snapshot(run_dir, in_queue=not queued)
    if snapshot.state in LIVE:
        what = f"the run is {snapshot.state.value}, so it cannot be resumed."
        remedy = f"ltui attach {run_dir.id} shows it."
        raise ProblemError(Problem(run_dir.id, what, remedy, code="still-running"))
    if snapshot.state is RunState.FINISHED and not allow_finished:
        remedy = (
            "To train longer: --set trainer.max_epochs=..."
            if snapshot.command is None
            else "To train longer, start its command with a later end: ltui exec -- COMMAND."
        )
        raise ProblemError(Problem(run_dir.id, "the run is finished.", remedy, code="finished"))


def _write_new_spec(run_dir: RunDir, spec: RunSpec) -> Path:
    """Write the changed specification to a temporary folder. The new supervisor moves it."""
    temporary = RunDir(run_dir.path / f".spec-{os.getpid()}-{time.monotonic_ns()}")
    temporary.path.mkdir(mode=0o700)
    temporary.write_spec(spec)
    return temporary.spec_path


def resume_point(run_dir: RunDir, checkpoint: Path | None) -> tuple[int, Path, tuple[str, ...]]:
    """Return step and path of the checkpoint to resume from, and the skipped newer checkpoints."""
    if checkpoint is None:
        choice = choose_checkpoint(run_dir.checkpoints_dir, nan_step(run_dir))
        if choice.taken is None:
            raise ProblemError(_nothing_to_resume(run_dir, choice))
        return choice.taken.global_step, Path(choice.taken.path), choice.skipped
    requested = checkpoint.absolute()
    for info in list_checkpoints(run_dir.checkpoints_dir):
        if Path(info.path).name == requested.name:
            if verify(info).ok:
                return info.global_step, Path(info.path), ()
            raise ProblemError.of(
                where=str(checkpoint),
                what="it is damaged: size or checksum differ from its manifest.",
                remedy="Resume from another one; ltui show lists them.",
            )
    raise ProblemError.of(where=str(checkpoint), what="the run has no such checkpoint.")


def _nothing_to_resume(run_dir: RunDir, choice: ResumeChoice) -> Problem:
    """Return the problem of a run without a good checkpoint."""
    remedy = "Start it again as a new run."
    if choice.undamaged:
        remedy += " To resume from another checkpoint all the same: --from STEP."
    what = f"there is nothing to resume from: {choice.why_none()}."
    return Problem(where=run_dir.id, what=what, remedy=remedy, code="no-checkpoint")


def wait_for_supervisor_exit(run_dir: RunDir) -> None:
    """Wait for a supervisor that is exiting. Return at once if it stays, or if there is none."""
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline:
        holder = lock_holder(run_dir.lock_path)
        if holder is None or stays_live(run_dir):
            return
        time.sleep(0.05)
