"""Starting another attempt of a run that ended, and deleting a run.

Everything that a person can get wrong is a ``ProblemError`` here, and leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.kill_processes import kill_run_processes
from ltui.training.lifecycle.launch_run import home_not_writable
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_status import is_abandoned, resolve_snapshot
from ltui.training.lifecycle.shim_files import shim_identity
from ltui.training.lifecycle.start_checks import check_start
from ltui.training.lifecycle.start_supervisor import (
    START_S,
    SupervisorKilledError,
    adopt,
    shim_restarts_supervisor,
    start_supervisor,
)
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.checkpoint_manifest import (
    ResumeChoice,
    choose_checkpoint,
    list_checkpoints,
    verify,
)
from ltui.training.store.run_directory import RunDir

_LEAVING_S = 3.0
"""A supervisor that has just recorded the end of its run is gone within this."""


def resume(run_dir: RunDir, *, spec: RunSpec | None = None, checkpoint: Path | None = None) -> None:
    """Start another attempt from ``checkpoint`` or the last whole one.

    ``spec`` replaces the run's own. ``ProblemError`` where the run is live, or has nothing to
    resume from.
    """
    _wait_until_left(run_dir)
    _have_the_end_recorded(run_dir)
    snapshot = resolve_snapshot(run_dir)
    if snapshot.state in LIVE:
        raise ProblemError(_still_live(run_dir, snapshot.state))
    before = run_dir.read_spec()
    same = spec is None or spec.overrides == before.overrides
    if snapshot.state is RunState.FINISHED and same and checkpoint is None:
        raise ProblemError(
            Problem(
                where=run_dir.id,
                what="the run is finished.",
                remedy=(
                    "To train longer: --set trainer.max_epochs=..."
                    if before.command is None
                    else "To train longer, start a command with a later end with `ltui exec`."
                ),
            )
        )
    step, path, skipped = _resume_point(run_dir, checkpoint)
    check_start(spec or before)
    arguments = ["--resume-from", str(path), "--resume-step", str(step)]
    arguments += [f"--skipped={words}" for words in skipped]
    aside: Path | None = None
    try:
        install_rank_package(run_dir.home)
        if spec is not None:
            aside = _next_spec(run_dir, spec)
            changed = spec.overrides[len(before.overrides) :]
            arguments += [f"--change={override}" for override in changed]
            arguments += ["--spec", str(aside)]
        start_supervisor(run_dir, arguments)
    except OSError as error:
        raise home_not_writable(run_dir.home, error) from error
    except SupervisorKilledError:
        if not shim_restarts_supervisor(run_dir):
            raise
    finally:
        if aside is not None:
            shutil.rmtree(aside.parent, ignore_errors=True)


def _have_the_end_recorded(run_dir: RunDir) -> None:
    """Of an attempt that nobody saw end, with what its ranks had still to tell."""
    if not is_abandoned(run_dir):
        return
    try:
        adopt(run_dir)
    except ProblemError:
        if lock_holder(run_dir.lock_path) is None:
            kill_run_processes(run_dir)
    _wait_until_left(run_dir, START_S)


def delete(run_dir: RunDir) -> None:
    """Remove a run with everything in it. ``ProblemError`` where it is live."""
    _wait_until_left(run_dir)
    try:
        state = resolve_snapshot(run_dir).state
    except ProblemError:
        # Damaged, or of a newer ltui: it can still be deleted, unless something of it runs.
        state = RunState.RUNNING if lock_holder(run_dir.lock_path) else RunState.LOST
    if state in LIVE:
        raise ProblemError(
            Problem(where=run_dir.id, what=f"the run is {state.value}.", remedy="Stop it first.")
        )
    try:
        # Out of sight at one stroke: a half deleted run is no run.
        hidden = run_dir.path.with_name(f".deleted-{run_dir.id}")
        run_dir.path.rename(hidden)
        RunDir(hidden).remove_stale_socket()
        shutil.rmtree(hidden)
    except OSError as error:
        raise ProblemError(
            Problem(where=str(run_dir.path), what=f"it cannot be deleted ({error.strerror}).")
        ) from error


def _next_spec(run_dir: RunDir, spec: RunSpec) -> Path:
    """The changed specification, aside until the new supervisor holds the run."""
    aside = RunDir(run_dir.path / f".spec-{os.getpid()}-{time.monotonic_ns()}")
    aside.path.mkdir(mode=0o700)
    aside.write_spec(spec)
    return aside.spec_path


def _resume_point(run_dir: RunDir, checkpoint: Path | None) -> tuple[int, Path, tuple[str, ...]]:
    """Step and path of the checkpoint to resume from, and in words the newer ones passed over."""
    if checkpoint is None:
        choice = choose_checkpoint(run_dir.checkpoints_dir)
        if choice.taken is None:
            raise ProblemError(_nothing_to_resume(run_dir, choice))
        skipped = tuple(choice.skip_reasons())
        return choice.taken.global_step, Path(choice.taken.path), skipped
    wanted = checkpoint.absolute()
    for info in list_checkpoints(run_dir.checkpoints_dir):
        if Path(info.path).name == wanted.name:
            if verify(info).ok:
                return info.global_step, Path(info.path), ()
            raise ProblemError(
                Problem(
                    where=str(checkpoint),
                    what="it is damaged: size or checksum differ from its manifest.",
                    remedy="Resume from another one; ltui show lists them.",
                )
            )
    raise ProblemError(Problem(where=str(checkpoint), what="the run has no such checkpoint."))


def _nothing_to_resume(run_dir: RunDir, choice: ResumeChoice) -> Problem:
    broken = len(list_checkpoints(run_dir.checkpoints_dir))
    what = (
        "there is nothing to resume from: no checkpoint was completed."
        if not broken
        else f"none of its {broken} checkpoints is complete ({'; '.join(choice.skip_reasons())})."
    )
    return Problem(where=run_dir.id, what=what, remedy="Start it again as a new run.")


def _still_live(run_dir: RunDir, state: RunState) -> Problem:
    return Problem(
        where=run_dir.id,
        what=f"the run is {state.value}, so it cannot be resumed.",
        remedy=f"ltui attach {run_dir.id} shows it.",
    )


def _wait_until_left(run_dir: RunDir, seconds: float = _LEAVING_S) -> None:
    """Give a supervisor that is only leaving the moment it needs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        holder = lock_holder(run_dir.lock_path)
        if holder is None or _stays_live(run_dir):
            return
        time.sleep(0.05)


def _stays_live(run_dir: RunDir) -> bool:
    """Whether its supervisor is there to stay, as far as it says: it may only look at the end."""
    snapshot = resolve_snapshot(run_dir)
    if snapshot.state not in LIVE:
        return False
    shim = shim_identity(run_dir)
    return snapshot.state is RunState.QUEUED or (shim is not None and shim.alive())
