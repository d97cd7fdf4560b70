"""Start a new run.

User errors are reported as ``ProblemError`` and leave no files behind. Users wait for the first
training step, so this module must not import anything heavy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.engine_start_checks import check_start
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_processes import kill_run_processes
from ltui.training.lifecycle.start_supervisor import AttemptPlan, start_supervisor
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.store.run_directory import RunDir, write_atomically

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import CheckpointInfo


def launch(
    spec: RunSpec,
    home: Path,
    start_from: CheckpointInfo | None = None,
    *,
    interpreter_checked: bool = False,
    private_files: Mapping[str, str] | None = None,
) -> RunDir:
    """Start a run and return when its supervisor answers.

    ``start_from`` is a checkpoint of another run (training/lifecycle/resume_run.py).
    ``interpreter_checked`` is passed to ``check_start``. ``private_files`` (name -> text) are
    written into the run directory before anything starts. Raises ``ProblemError`` if the run could
    not be started; then there is no run directory.
    """
    check_start(spec, interpreter_checked=interpreter_checked)
    run_dir = RunDir(home / "runs" / spec.id)
    with leaving_no_run(run_dir):
        install_rank_package(home)
        create_run_directory(run_dir, spec, private_files)
        plan = AttemptPlan()
        if start_from is not None:
            from ltui.training.store.run_checkpoints import import_checkpoint

            brought = import_checkpoint(start_from, run_dir.checkpoints_dir)
            plan = AttemptPlan(resume_from=Path(brought.path), resume_step=brought.global_step)
    try:
        start_supervisor(run_dir, plan)
    except BaseException:
        if lock_holder(run_dir.lock_path) is None:
            kill_run_processes(run_dir)
            run_dir.remove_stale_socket()
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    return run_dir


def start_first_attempt(run_dir: RunDir, *, because: str | None = None) -> None:
    """Start a run whose directory exists, from the beginning. ``because`` becomes an event.

    Raises ``ProblemError`` if the run could not be started.
    """
    check_start(run_dir.read_spec())
    try:
        install_rank_package(run_dir.home)
        start_supervisor(run_dir, AttemptPlan(restarted_because=because))
    except OSError as error:
        raise home_not_writable(run_dir.home, error) from error


def create_run_directory(
    run_dir: RunDir,
    spec: RunSpec,
    private_files: Mapping[str, str] | None = None,
    fill: Callable[[RunDir], None] = lambda _: None,
) -> None:
    """Create the run directory with its specification, completely or not at all.

    ``fill`` is called with the directory before it appears under its name.
    """
    temporary = RunDir(run_dir.path.with_name(f".new-{run_dir.id}"))
    try:
        temporary.path.mkdir(mode=0o700)
        for name in ("logs", "queue", "engine", "checkpoints"):
            (temporary.path / name).mkdir(mode=0o700)
        temporary.write_spec(spec)
        for name, text in (private_files or {}).items():
            write_atomically(temporary.path / name, text.encode())
        fill(temporary)
        os.rename(temporary.path, run_dir.path)
    except BaseException:
        shutil.rmtree(temporary.path, ignore_errors=True)
        raise


@contextmanager
def leaving_no_run(run_dir: RunDir) -> Iterator[None]:
    """Remove the run directory if the block raises, with a ``ProblemError`` for what the home could
    not take."""
    try:
        yield
    except (OSError, ValueError) as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        if isinstance(error, ProblemError):
            raise
        failure = error if isinstance(error, OSError) else OSError(str(error))
        raise home_not_writable(run_dir.home, failure) from error


def home_not_writable(home: Path, error: OSError) -> ProblemError:
    """Return the problem to report if writing under ``home`` failed with ``error``."""
    return ProblemError.of(
        where=str(home),
        what=f"it cannot be written ({error.strerror or error}).",
        remedy="Make room, or set LTUI_HOME to another directory.",
    )
