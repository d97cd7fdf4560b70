"""Start a new run, after a check for problems that would keep its engine from starting.

User errors are reported as ``ProblemError`` and leave no files behind. Users wait for the first
training step, so this module must not import anything heavy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_processes import kill_run_processes
from ltui.training.lifecycle.supervisor_client import AttemptPlan, failure_reason, start_supervisor
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.process.python_environment import missing_library, program_command
from ltui.training.store.run_directory import RunDir, remove_leftovers, write_atomically

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import CheckpointInfo


def launch(
    spec: RunSpec,
    home: Path,
    start_from: CheckpointInfo | None = None,
    *,
    interpreter_checked: bool = False,
    private_files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunDir:
    """Start a run and return when its supervisor answers.

    ``start_from`` is a checkpoint of another run (training/lifecycle/resume_run.py).
    ``interpreter_checked`` is passed to ``check_start``. ``private_files`` (name -> text) are
    written into the run directory before anything starts. ``environment`` is that of the run, by
    default this process's. Raises ``ProblemError`` if the run could not be started; then there is
    no run directory.
    """
    check_start(spec, interpreter_checked=interpreter_checked)
    run_dir = RunDir(home / "runs" / spec.id)
    with leaving_no_run(run_dir):
        install_rank_package(home)
        create_run_directory(run_dir, spec, private_files)
        plan = AttemptPlan()
        if start_from is not None:
            # Imported here because few runs begin with a checkpoint.
            from ltui.training.store.run_checkpoints import import_checkpoint

            brought = import_checkpoint(start_from, run_dir.checkpoints_dir)
            plan = AttemptPlan(resume_from=Path(brought.path), resume_step=brought.global_step)
    try:
        start_supervisor(run_dir, plan, environment)
    except BaseException:
        if lock_holder(run_dir.lock_path) is None:
            kill_run_processes(run_dir)
            run_dir.remove_stale_socket()
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    return run_dir


def start_first_attempt(
    run_dir: RunDir,
    plan: AttemptPlan | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a run whose directory exists, by default from the beginning and in this environment.

    Raises ``ProblemError`` if the run could not be started.
    """
    spec = run_dir.read_spec()
    if spec.freeze:
        # Imported here because few runs have frozen code.
        from ltui.training.store.frozen_code import code_to_run

        code_to_run(run_dir, spec)
    check_start(spec)
    try:
        install_rank_package(run_dir.home)
        start_supervisor(run_dir, plan or AttemptPlan(), environment)
    except OSError as error:
        raise home_not_writable(run_dir.home, error) from error


def create_run_directory(
    run_dir: RunDir,
    spec: RunSpec,
    private_files: Mapping[str, str] | None = None,
    fill: Callable[[RunDir], None] = lambda _: None,
) -> None:
    """Create the run directory with its specification, completely or not at all.

    It has a copy of the code as it is now if ``spec.freeze`` is set. ``fill`` is called with the
    directory before it appears under its name.
    """
    if spec.freeze:
        # Imported here because few runs have frozen code.
        from ltui.training.lifecycle.freeze_code import freeze_code

        spec = spec.with_changes(code_copy=1)
    remove_leftovers(run_dir.path.parent)
    temporary = RunDir(run_dir.path.with_name(f".new-{run_dir.id}"))
    try:
        temporary.path.mkdir(mode=0o700)
        for name in ("logs", "queue", "engine", "checkpoints"):
            (temporary.path / name).mkdir(mode=0o700)
        temporary.write_spec(spec)
        if spec.freeze:
            freeze_code(temporary, spec)
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


LEAST_FILE_BYTES = 64 << 20
"""Least limit of the size of a file with which a run starts. A queue alone has 4 MB."""

# Finds packages without importing them: importing torch takes seconds.
_PROBE = """
import importlib.util as u, json, sys
has = lambda name: u.find_spec(name) is not None
lightning = has("lightning") or has("pytorch_lightning")
print(json.dumps({"version": sys.version_info[:2], "torch": has("torch"), "lightning": lightning}))
"""


def check_start(spec: RunSpec, *, interpreter_checked: bool = False) -> None:
    """Raise ``ProblemError`` if the engine could not be started.

    ``interpreter_checked``: the caller has already found torch and Lightning in ``spec.python``.
    Skipping this check saves a tenth of a second.
    """
    check_not_imported(spec)
    problems = [
        *_folder_problems(spec),
        *(_interpreter_problems(spec) if not interpreter_checked else ()),
        *_verdict_hook_problems(spec),
        *_mirror_problems(spec),
        *_freeze_problems(spec),
        *_limit_problems(),
    ]
    if problems:
        raise ProblemError(*problems)


def _folder_problems(spec: RunSpec) -> Iterator[Problem]:
    if not Path(spec.cwd).is_dir():
        yield Problem(where="working directory", what=f"{spec.cwd} does not exist.")
    name = spec.command[0] if spec.command else ""
    if spec.command is not None and not _can_run(spec, name):
        yield Problem(
            where=name or "COMMAND",
            what="there is no such command.",
            remedy="Give what you would type to start the training: ltui exec -- python train.py",
        )


def _limit_problems() -> Iterator[Problem]:
    """Check that files may be as large as a history, a queue and a small checkpoint are."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILE_BYTES:
        yield Problem(
            where="ulimit -f",
            what=f"a file may have {limit >> 10} KiB, and the files of a run need more.",
            remedy="Raise the limit: ulimit -f unlimited",
        )


def _freeze_problems(spec: RunSpec) -> Iterator[Problem]:
    if spec.freeze and spec.nodes is not None:
        yield several_machines().problems[0]


def several_machines() -> ProblemError:
    """Return the problem of frozen code on several machines."""
    return ProblemError.of(
        where="--freeze",
        what="the code of a run on several machines cannot be frozen, because the copy is on this "
        "machine only.",
        remedy="Start it without freezing the code: --no-freeze",
    )


def check_not_imported(spec: RunSpec) -> None:
    """Raise ``ProblemError`` if the run consists of another tool's metrics."""
    if spec.imported_from is not None:
        raise ProblemError.of(
            where=spec.id,
            what="the run was imported, so ltui does not know the program that trained it.",
            remedy="Start the program as a new run: ltui exec -- python train.py",
        )


def _verdict_hook_problems(spec: RunSpec) -> Iterator[Problem]:
    """Check that the ``on_verdict`` program exists now, rather than when a verdict is issued."""
    target = spec.stall.on_verdict
    if target is not None and not isinstance(target, str) and not _can_run(spec, target[0]):
        yield Problem(
            where=f"on_verdict {target[0]}",
            what="there is no program of that name that can be run.",
            remedy="Give its path, or a webhook's URL.",
        )


def _can_run(spec: RunSpec, program: str) -> bool:
    """Return True if ``program`` is an executable file, as the run would find it."""
    # A relative path is relative to the run's working directory, as in a shell.
    path = os.path.join(spec.cwd, program) if os.sep in program else program
    return shutil.which(path, path=spec.env.get("PATH", os.environ.get("PATH"))) is not None


def _interpreter_problems(spec: RunSpec) -> Iterator[Problem]:
    if spec.command is not None:
        return
    where = f"--python {spec.python}"
    try:
        probe = subprocess.run(
            program_command(_PROBE, python=spec.python),
            cwd=spec.cwd if Path(spec.cwd).is_dir() else None,
            env={**os.environ, **spec.env},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        facts = json.loads(probe.stdout.strip().split("\n")[-1])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield Problem(
            where=where,
            what=f"this interpreter cannot be started ({failure_reason(error)}).",
            remedy="Give the python of the environment that has torch and lightning.",
        )
        return
    if missing := [name for name in ("torch", "lightning") if not facts[name]]:
        yield Problem(
            where=where,
            what=f"its environment lacks {' and '.join(missing)}.",
            remedy=f"{spec.python} -m pip install {' '.join(missing)}, or give another --python.",
        )


def mirror_folder(run_dir: RunDir, spec: RunSpec) -> Path | None:
    """Return the folder for the event files of a run; None if it has no mirror."""
    if spec.mirror is None:
        return None
    folder = _chosen_folder(spec)
    return run_dir.path / "tensorboard" if folder is None else folder / spec.id


def _mirror_problems(spec: RunSpec) -> Iterator[Problem]:
    if spec.mirror is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        yield missing_library("tensorboard", "tensorboard", f"mirror {spec.mirror}")
        return
    folder = _chosen_folder(spec)
    while folder is not None and not folder.exists():
        folder = folder.parent
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        yield Problem(
            where=f"mirror {spec.mirror}",
            what=f"{folder} is not a folder that can be written.",
            remedy="Name another folder: tensorboard:FOLDER.",
        )


def _chosen_folder(spec: RunSpec) -> Path | None:
    """Return the folder that the user chose; None for one in the run directory."""
    name = (spec.mirror or "").partition(":")[2]
    return Path(spec.cwd, Path(name).expanduser()) if name else None
