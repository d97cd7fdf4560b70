"""Start the supervisor of a run, and send it requests over its control socket.

A supervisor is started for a new run, for another attempt, or for a run whose supervisor died. The
plan of the attempt goes with its command line. Users wait for the first training step, so this
module must not import anything heavy.

A request and its answer are one JSON line each. The client keeps no connection or other state, so
any thread may use it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from ltui.training.json_codec import parse_json
from ltui.training.lifecycle.run_processes import has_live_shim, latest_attempt
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder, lock_left_by_us, lock_was_copied, peer_uid
from ltui.training.process.python_environment import module_command
from ltui.training.shared.regular_files import read_end
from ltui.training.store.run_directory import (
    RunDir,
    open_private_log,
    read_json,
    remove_links,
    write_json,
)

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import RunSnapshot


class AttemptPlan(Struct, frozen=True, kw_only=True):
    """A new attempt of a run or, with ``recover``, the attempt whose supervisor died."""

    number: int | None = None
    """Number of the attempt; None for the one after the last."""
    recover: bool = False
    resume_from: Path | None = None
    resume_step: int | None = None
    spec_path: Path | None = None
    """A specification that replaces the stored one of the run."""
    changes: tuple[str, ...] = ()
    """The overrides (``--set``) that are new in this specification, as shown to people."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that are incomplete or damaged, each with the reason."""
    restarted_because: str | None = None
    """The reason of an automatic restart, for example ``restart 2 of 3, after: ...``."""
    queued_attempt: int | None = None
    """Number of the attempt that the run queue starts, which must still be asked for."""
    left_out: tuple[int, ...] | None = None
    """Nodes without which a restart continues; None for those of the specification."""

    def to_text(self) -> str:
        """Return the plan as a word of a command line; see ``from_text``."""
        return json.dumps(to_builtins(self, enc_hook=os.fspath))

    @classmethod
    def from_text(cls, text: str) -> AttemptPlan:
        return convert(json.loads(text), cls, dec_hook=to_path)

    def on_another_node(self) -> AttemptPlan:
        """Return what another node takes from this plan of the head.

        It has no specification to install, after which the folder of ``spec_path`` is removed.
        """
        return replace(self, recover=False, spec_path=None, skipped=(), restarted_because=None)

    def event_text(self, attempt: int) -> str:
        """Return the text of the event that marks the start of the attempt."""
        parts = [f"Attempt {attempt} begins"]
        if self.restarted_because:
            parts.append(f"({self.restarted_because})")
        if self.left_out:
            parts.append(f"without node {', '.join(map(str, self.left_out))}")
        if self.resume_from is not None:
            parts.append(f"from step {self.resume_step} ({self.resume_from.name})")
        elif attempt > 1:
            parts.append("from the beginning, as there is no checkpoint")
        text = " ".join(parts)
        if self.changes:
            text += f", with {', '.join(self.changes)}"
        if self.skipped:
            text += f"; skipped: {'; '.join(self.skipped)}"
        return f"{text}."

    def event_fields(self) -> dict[str, object]:
        """Return the data of that event."""
        return {
            "path": None if self.resume_from is None else str(self.resume_from),
            "global_step": self.resume_step,
            "changes": list(self.changes),
            "skipped": list(self.skipped),
            "restarted_because": self.restarted_because,
        }


def to_path(_kind: type, value: Any) -> Path:
    """Convert the only fields of a plan that are no plain values: ``dec_hook`` of msgspec."""
    return Path(os.fsdecode(value))


LOG_TAIL_BYTES = 1 << 16
"""Number of bytes read from the end of the supervisor's log."""
START_S = 30.0
"""Seconds within which a supervisor must report, or a shim must start another supervisor."""


class SupervisorDiedError(ProblemError):
    """A supervisor ended before it could report that it has started: it was killed, for example."""


def restart_supervisor(run_dir: RunDir) -> None:
    """Start a supervisor for a run whose supervisor died. Does nothing if one is alive.

    Raises ``ProblemError`` if the run directory is a copy, whose command must not start by itself.
    """
    if lock_holder(run_dir.lock_path) is not None:
        return
    try:
        if not lock_left_by_us(run_dir.lock_path):
            what = "no supervisor of this user has had this directory: it is a copy."
            remedy = "Nothing of it runs. To remove it: ltui delete"
            raise ProblemError.of(where=run_dir.id, what=what, remedy=f"{remedy} {run_dir.id}")
        saved = read_json(run_dir.environment_path)
        environment = None if saved is None else {str(k): str(v) for k, v in saved.items()}
        start_supervisor(run_dir, AttemptPlan(recover=True), environment)
    except ProblemError:
        if lock_holder(run_dir.lock_path) is None:  # else the shim has started one meanwhile
            raise


def save_environment(run_dir: RunDir) -> None:
    """Save the environment of a run that waits for GPUs, in case its supervisor dies meanwhile."""
    if not run_dir.environment_path.exists():
        write_json(run_dir.environment_path, os.environ)


def _shim_restarts_supervisor(run_dir: RunDir) -> bool:
    """Wait until the shim has started another supervisor. Return False if there is no live shim.

    Called when the supervisor was killed before it could report that it has started.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if not has_live_shim(run_dir):
            return False
        if lock_holder(run_dir.lock_path) is not None:
            return True
        time.sleep(0.05)
    return False


def supervisor_argv(run_dir: RunDir, plan: AttemptPlan, *options: str) -> list[str]:
    """Return the command line that starts the supervisor of a run."""
    what = ("--adopt",) if plan.recover else ("--plan", plan.to_text())
    return module_command("ltui.training.supervise.main", str(run_dir.path), *what, *options)


def attempt_environment(run_dir: RunDir) -> dict[str, str]:
    """Return the environment of this process, with what the last attempt had besides."""
    if (attempt := latest_attempt(run_dir)) is None:
        return dict(os.environ)
    # Imported here: a new run has nothing to recall.
    from ltui.training.store.recorded_environment import recall_environment

    return {**recall_environment(run_dir, attempt).variables, **os.environ}


def start_supervisor(
    run_dir: RunDir, plan: AttemptPlan, environment: Mapping[str, str] | None = None
) -> None:
    """Start a detached supervisor of a new attempt, and wait until it reports success or failure.

    If it is killed before, the shim may start another one.

    ``environment`` is the environment of the run; None means ``attempt_environment``. Raises
    ``ProblemError`` with the reported problems, and ``SupervisorDiedError`` if there is no report.
    """
    variables = attempt_environment(run_dir) if environment is None else environment
    report_end, write_end = os.pipe()
    environ = {k: v for k, v in variables.items() if not k.startswith("LTUI_RUN_")}
    try:
        remove_links(run_dir.supervisor_log_path.parent)
        with open_private_log(run_dir.supervisor_log_path) as log:
            starter = subprocess.Popen(
                supervisor_argv(run_dir, plan, "--report-to", str(write_end)),
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
        report = _read_report(report_end, time.monotonic() + START_S)
        starter.wait(5.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProblemError(_not_started(run_dir, failure_reason(error))) from error
    finally:
        os.close(report_end)
        if write_end >= 0:
            os.close(write_end)
    if report is None:
        if _shim_restarts_supervisor(run_dir):
            return
        log_end = read_end(run_dir.supervisor_log_path, LOG_TAIL_BYTES).strip()
        reason = log_end.rpartition("\n")[2] or "no reason was given"
        raise SupervisorDiedError(_not_started(run_dir, reason))
    if not report.get("ok"):
        raise ProblemError(*(Problem(**problem) for problem in report["problems"]))


def failure_reason(error: Exception) -> str:
    """Return a short reason why a process could not be started."""
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip().split("\n")[-1] or f"exit code {error.returncode}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it does not answer"


def _read_report(pipe: int, deadline: float) -> dict[str, Any] | None:
    """Read the supervisor's report. Return None if the pipe closes, or at ``deadline``."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(pipe, 65536) if ready else b""
        if not data:
            return None
        text += data
    report = json.loads(text)
    return report if isinstance(report, dict) else None


def _not_started(run_dir: RunDir, reason: str) -> Problem:
    return Problem(where=run_dir.id, what=f"its supervisor could not be started ({reason}).")


STILL_STARTING = "its supervisor is still starting"
"""What is known of a run whose supervisor is too young to answer."""
_LINE_BYTES = 64 << 20


class NotSupervisedError(ProblemError):
    """No supervisor answers for the run: it ended, died, or does not respond."""

    default_code = "no-supervisor"


class ControlClient:
    """Sends commands to the supervisor of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def request(self, command: dict[str, Any], timeout_s: float = 2.0) -> dict[str, Any]:
        """Send ``command`` and return the answer.

        Raises ``NotSupervisedError`` if no supervisor answers within ``timeout_s``, and
        ``ProblemError`` with the supervisor's explanation if it refuses the command.
        """
        try:
            answer = self._ask(command, timeout_s)
        except (OSError, ValueError) as error:
            text = _failure_text(error)
            if isinstance(error, TimeoutError) and command.get("cmd") not in ("ping", "status"):
                # The supervisor drops the request of a client that has left.
                text += " The request was withdrawn; nothing is changed."
            raise NotSupervisedError(self._problem(text)) from error
        if answer is None:
            raise NotSupervisedError(
                self._problem("its supervisor closed the connection without an answer.")
            )
        if not answer.get("ok"):
            raise ProblemError(self._problem(str(answer.get("error") or "the command failed.")))
        return answer

    def status(self, timeout_s: float = 1.0) -> RunSnapshot | None:
        """Return the current snapshot of the run, or None if no supervisor answers."""
        # Imported here because a launch needs no snapshot.
        from ltui.training.state.run_snapshot import snapshot_from_json

        try:
            answer = self.request({"cmd": "status"}, timeout_s)
            return snapshot_from_json(answer["snapshot"])
        except (ProblemError, KeyError, ValueError):
            return None

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer; None if the connection is closed without one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            self._connect(link, time.monotonic() + timeout_s)
            link.sendall(json.dumps(command).encode() + b"\n")
            with link.makefile("rb") as file:
                line = file.readline(_LINE_BYTES)
        if not line:
            return None
        answer = parse_json(line)
        if not isinstance(answer, dict):
            raise ValueError("not an answer")
        return answer

    def _connect(self, link: socket.socket, deadline: float) -> None:
        """Connect, and retry while the supervisor has just started or has many new clients."""
        while True:
            try:
                link.connect(self._address())
                if peer_uid(link) != os.getuid():
                    raise PermissionError("its socket belongs to another user")
                return
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
                supervised = lock_holder(self._run_dir.lock_path) is not None
                if not supervised or time.monotonic() > deadline:
                    if isinstance(error, BlockingIOError):  # the queue of connections is full
                        raise TimeoutError from error
                    raise
                time.sleep(0.02)

    def _address(self) -> str:
        """Return the path of the socket, which is elsewhere if that of the run is too long for it.

        The socket or link in a copied directory leads to the supervisor of the run that it was
        copied from.
        """
        path, lock = self._run_dir.socket_path, self._run_dir.lock_path
        linked = path.is_symlink()
        if lock_was_copied(lock) or (linked and lock_holder(lock) is None):
            raise FileNotFoundError
        # Of a path that is too long for a socket, the link may not be there yet.
        if not linked and not path.exists():
            raise FileNotFoundError
        return os.readlink(path) if linked else str(path)

    def _problem(self, sentence: str) -> Problem:
        return Problem(where=self._run_dir.id, what=sentence)


def _failure_text(error: Exception) -> str:
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return "it has no supervisor."
    if isinstance(error, TimeoutError):
        return "its supervisor does not answer."
    return f"its supervisor cannot be reached ({error})."
