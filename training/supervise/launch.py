"""Starting supervisors: for a new run, for another attempt of one, for one that lost its own.

Everything that a person can get wrong is a ``ProblemError`` here, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ltui.training.problem import Problem, ProblemError
from ltui.training.run.snapshot import LIVE, CheckpointInfo, RunState
from ltui.training.run.spec import RunSpec
from ltui.training.store.home import RunDir, open_private_log, write_atomically
from ltui.training.store.manifest import ResumeChoice, bring, checkpoints, resume_choice, verify
from ltui.training.store.truth import abandoned, true_snapshot
from ltui.training.supervise.alive import lock_holder
from ltui.training.supervise.marks import keeper_mark
from ltui.training.supervise.rankside import install_rank_side
from ltui.training.supervise.sweep import sweep

_START_S = 30.0
_LEAVING_S = 3.0
"""A supervisor that has just recorded the end of its run is gone within this."""

# Finds packages without importing them: importing torch takes seconds.
_PROBE = """
import importlib.util as u, json, sys
has = lambda name: u.find_spec(name) is not None
lightning = has("lightning") or has("pytorch_lightning")
print(json.dumps({"version": sys.version_info[:2], "torch": has("torch"), "lightning": lightning}))
"""


def launch(spec: RunSpec, home: Path, start_from: CheckpointInfo | None = None) -> RunDir:
    """Start a run and return once its supervisor answers. ``ProblemError``: there is no run.

    ``start_from`` is a checkpoint of another run (training/store/start_from.py).
    """
    check_start(spec)
    run_dir = RunDir(home / "runs" / spec.id)
    try:
        install_rank_side(home)
        _make(run_dir, spec)
        arguments = ["--attempt", "1"]
        if start_from is not None:
            brought = bring(start_from, run_dir.checkpoints_dir)
            arguments += ["--resume-from", brought.path]
            arguments += ["--resume-step", str(brought.global_step)]
    except (OSError, ValueError) as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        failure = error if isinstance(error, OSError) else OSError(str(error))
        raise _unwritable(home, failure) from error
    try:
        _start_supervisor(run_dir, arguments)
    except BaseException as error:
        if isinstance(error, _KilledError) and _kept_alive(run_dir):
            return run_dir
        if lock_holder(run_dir.lock_path) is None:
            sweep(run_dir)
            run_dir.remove_far_socket()
            shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    return run_dir


def resume(run_dir: RunDir, *, spec: RunSpec | None = None, checkpoint: Path | None = None) -> None:
    """Start another attempt from ``checkpoint`` or the last whole one.

    ``spec`` replaces the run's own. ``ProblemError`` where the run is live, or has nothing to
    resume from.
    """
    _wait_until_left(run_dir)
    _have_the_end_recorded(run_dir)
    snapshot = true_snapshot(run_dir)
    if snapshot.state in LIVE:
        raise ProblemError(_still_live(run_dir, snapshot.state))
    before = run_dir.read_spec()
    same = spec is None or spec.overrides == before.overrides
    if snapshot.state is RunState.FINISHED and same and checkpoint is None:
        raise ProblemError(
            Problem(
                where=run_dir.id,
                what="the run is finished.",
                remedy="To train on, raise its end: --set trainer.max_epochs=...",
            )
        )
    step, path, skipped = _resume_point(run_dir, checkpoint)
    check_start(spec or before)
    arguments = ["--resume-from", str(path), "--resume-step", str(step)]
    arguments += [f"--skipped={words}" for words in skipped]
    aside: Path | None = None
    try:
        install_rank_side(run_dir.home)
        if spec is not None:
            aside = _next_spec(run_dir, spec)
            changed = spec.overrides[len(before.overrides) :]
            arguments += [f"--change={override}" for override in changed]
            arguments += ["--spec", str(aside)]
        _start_supervisor(run_dir, arguments)
    except OSError as error:
        raise _unwritable(run_dir.home, error) from error
    except _KilledError:
        if not _kept_alive(run_dir):
            raise
    finally:
        if aside is not None:
            shutil.rmtree(aside.parent, ignore_errors=True)


def adopt(run_dir: RunDir) -> None:
    """Start a supervisor for a run that lost its own; does nothing where one is alive."""
    if lock_holder(run_dir.lock_path) is None:
        _start_supervisor(run_dir, ("--adopt",), _kept_environment(run_dir))


def keep_environment(run_dir: RunDir) -> None:
    """Write down what a run that waits for GPUs is to be started with, for whoever takes it up."""
    if not run_dir.environment_path.exists():
        write_atomically(run_dir.environment_path, json.dumps(dict(os.environ)).encode())


def _kept_environment(run_dir: RunDir) -> dict[str, str] | None:
    try:
        document = json.loads(run_dir.environment_path.read_text())
    except (OSError, ValueError):
        return None
    return {str(k): str(v) for k, v in document.items()} if isinstance(document, dict) else None


def _kept_alive(run_dir: RunDir) -> bool:
    """Whether a run whose supervisor was killed as it began has a keeper, which starts another."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        keeper = keeper_mark(run_dir)
        if keeper is None or not keeper.alive():
            return False
        if lock_holder(run_dir.lock_path) is not None:
            return True
        time.sleep(0.05)
    return False


def _have_the_end_recorded(run_dir: RunDir) -> None:
    """Of an attempt that nobody saw end, with what its ranks had still to tell."""
    if not abandoned(run_dir):
        return
    try:
        adopt(run_dir)
    except ProblemError:
        if lock_holder(run_dir.lock_path) is None:
            sweep(run_dir)
    _wait_until_left(run_dir, _START_S)


def delete(run_dir: RunDir) -> None:
    """Remove a run with everything in it. ``ProblemError`` where it is live."""
    _wait_until_left(run_dir)
    try:
        state = true_snapshot(run_dir).state
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
        RunDir(hidden).remove_far_socket()
        shutil.rmtree(hidden)
    except OSError as error:
        raise ProblemError(
            Problem(where=str(run_dir.path), what=f"it can't be deleted ({error.strerror}).")
        ) from error


# -- checks ------------------------------------------------------------------------------------


def check_start(spec: RunSpec) -> None:
    """What would keep the engine from starting at all, as a ``ProblemError``."""
    problems = [] if Path(spec.cwd).is_dir() else [
        Problem(where="working directory", what=f"{spec.cwd} does not exist.")
    ]  # fmt: skip
    if spec.command is not None:
        problems += _command_problems(spec)
    else:
        problems += _interpreter_problems(spec)
    problems += _call_problems(spec)
    if problems:
        raise ProblemError(*problems)


def _call_problems(spec: RunSpec) -> list[Problem]:
    """Whoever is to be called on a verdict must be there before it is three in the morning."""
    target = spec.stall.on_verdict
    if target is None or isinstance(target, str):
        return []
    search = spec.env.get("PATH", os.environ.get("PATH"))
    program = os.path.join(spec.cwd, target[0]) if os.sep in target[0] else target[0]
    if shutil.which(program, path=search) is not None:
        return []
    return [
        Problem(
            where=f"on_verdict {target[0]}",
            what="there is no program of that name that can be run.",
            remedy="Give its path, or a webhook's URL.",
        )
    ]


def _command_problems(spec: RunSpec) -> list[Problem]:
    name = spec.command[0] if spec.command else ""
    search = spec.env.get("PATH", os.environ.get("PATH"))
    # A relative path is meant from the run's directory, as a shell there would take it.
    found = (
        os.access(Path(spec.cwd) / name, os.X_OK) and not (Path(spec.cwd) / name).is_dir()
        if os.sep in name
        else shutil.which(name, path=search) is not None
    )
    if name and found:
        return []
    return [
        Problem(
            where=name or "COMMAND",
            what="there is no such command.",
            remedy="Give what you would type to start the training: ltui exec -- python train.py",
        )
    ]


def _interpreter_problems(spec: RunSpec) -> list[Problem]:
    where = f"--python {spec.python}"
    environ = {**os.environ, **spec.env}
    try:
        probe = subprocess.run(
            [spec.python, "-c", _PROBE],
            cwd=spec.cwd if Path(spec.cwd).is_dir() else None,
            env=environ,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        facts = json.loads(probe.stdout.strip().split("\n")[-1])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [
            Problem(
                where=where,
                what=f"this interpreter can't be started ({_reason(error)}).",
                remedy="Give the python of the environment that has torch and lightning.",
            )
        ]
    missing = [name for name in ("torch", "lightning") if not facts[name]]
    if not missing:
        return []
    return [
        Problem(
            where=where,
            what=f"its environment lacks {' and '.join(missing)}.",
            remedy=f"{spec.python} -m pip install {' '.join(missing)}, or give another --python.",
        )
    ]


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip().split("\n")[-1] or f"exit code {error.returncode}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it does not answer"


# -- the run directory -------------------------------------------------------------------------


def _make(run_dir: RunDir, spec: RunSpec) -> None:
    """The run's directory, complete or absent."""
    made = RunDir(run_dir.path.with_name(f".new-{run_dir.id}"))
    try:
        made.path.mkdir(mode=0o700)
        for name in ("logs", "queue", "engine", "checkpoints"):
            (made.path / name).mkdir(mode=0o700)
        made.write_spec(spec)
        os.rename(made.path, run_dir.path)
    except BaseException:
        shutil.rmtree(made.path, ignore_errors=True)
        raise


def _next_spec(run_dir: RunDir, spec: RunSpec) -> Path:
    """The changed specification, aside until the new supervisor holds the run."""
    aside = RunDir(run_dir.path / f".spec-{os.getpid()}-{time.monotonic_ns()}")
    aside.path.mkdir(mode=0o700)
    aside.write_spec(spec)
    return aside.spec_path


def _resume_point(run_dir: RunDir, checkpoint: Path | None) -> tuple[int, Path, tuple[str, ...]]:
    """Step and path of the checkpoint to resume from, and in words the newer ones passed over."""
    if checkpoint is None:
        choice = resume_choice(run_dir.checkpoints_dir)
        if choice.taken is None:
            raise ProblemError(_nothing_to_resume(run_dir, choice))
        skipped = tuple(choice.skipped_words())
        return choice.taken.global_step, Path(choice.taken.path), skipped
    wanted = checkpoint.absolute()
    for info in checkpoints(run_dir.checkpoints_dir):
        if Path(info.path).name == wanted.name:
            if verify(info).ok:
                return info.global_step, Path(info.path), ()
            raise ProblemError(
                Problem(
                    where=str(checkpoint),
                    what="it is damaged: size or checksum differ from its manifest.",
                    remedy="Resume from another: ltui show lists them.",
                )
            )
    raise ProblemError(Problem(where=str(checkpoint), what="the run has no such checkpoint."))


def _nothing_to_resume(run_dir: RunDir, choice: ResumeChoice) -> Problem:
    broken = len(checkpoints(run_dir.checkpoints_dir))
    what = (
        "there is nothing to resume from: no checkpoint was completed."
        if not broken
        else f"none of its {broken} checkpoints is whole ({'; '.join(choice.skipped_words())})."
    )
    return Problem(where=run_dir.id, what=what, remedy="Start it again as a new run.")


def _still_live(run_dir: RunDir, state: RunState) -> Problem:
    return Problem(
        where=run_dir.id,
        what=f"the run is {state.value}, so it can't be resumed.",
        remedy=f"ltui attach {run_dir.id} shows it.",
    )


def _unwritable(home: Path, error: OSError) -> ProblemError:
    return ProblemError(
        Problem(
            where=str(home),
            what=f"it can't be written ({error.strerror or error}).",
            remedy="Make room, or set LTUI_HOME to another directory.",
        )
    )


# -- the supervisor ----------------------------------------------------------------------------


def supervisor_argv(run_dir: RunDir, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ltui.training.supervise.main", str(run_dir.path), *arguments]


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
    snapshot = true_snapshot(run_dir)
    if snapshot.state not in LIVE:
        return False
    keeper = keeper_mark(run_dir)
    return snapshot.state is RunState.QUEUED or (keeper is not None and keeper.alive())


def _start_supervisor(
    run_dir: RunDir, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Start it detached, in ``environment`` or this one, and wait for its first word."""
    given = os.environ if environment is None else environment
    read_end, write_end = os.pipe()
    environ = {k: v for k, v in given.items() if not k.startswith("LTUI_RUN_")}
    try:
        with open_private_log(run_dir.supervisor_log_path) as log:
            starter = subprocess.Popen(
                supervisor_argv(run_dir, *arguments, "--report-to", str(write_end)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=run_dir.path,
                env=environ,
                pass_fds=(write_end,),
                start_new_session=True,
            )
        os.close(write_end)
        write_end = -1
        answer = _first_line(read_end, time.monotonic() + _START_S)
        starter.wait(5.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProblemError(_no_supervisor(run_dir, _reason(error))) from error
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    if answer is None:
        raise _KilledError(_no_supervisor(run_dir, _last_words(run_dir)))
    if not answer.get("ok"):
        raise ProblemError(*(Problem(**problem) for problem in answer["problems"]))


def _first_line(read_end: int, deadline: float) -> dict[str, Any] | None:
    """The report, or None where the pipe closes or falls silent without one."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(read_end, 65536) if ready else b""
        if not data:
            return None
        text += data
    answer = json.loads(text)
    return answer if isinstance(answer, dict) else None


class _KilledError(ProblemError):
    """The supervisor went without a word."""


def _no_supervisor(run_dir: RunDir, reason: str) -> Problem:
    return Problem(where=run_dir.id, what=f"its supervisor could not be started ({reason}).")


def _last_words(run_dir: RunDir) -> str:
    try:
        lines = run_dir.supervisor_log_path.read_text(errors="replace").strip().split("\n")
    except OSError:
        lines = [""]
    return lines[-1] or "it says nothing"
