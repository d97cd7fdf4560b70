"""The mirror of a run (setting ``mirror``): its values as event files while the run goes on.

``python -m ltui.training.supervise.event_mirror RUN_DIR FOLDER`` is the process that writes them.
The supervisor starts it, passes on what it reports (``EventMirror``), and holds its standard input
open: when that closes, the supervisor has closed the attempt or is dead, and the process writes
what is left and ends. Each line of its standard output becomes an event of the run. Nothing waits
for it, and it has the lowest priority.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import mirror_folder
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import module_command, user_umask
from ltui.training.state.run_snapshot import Event
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.export_files import FollowedEvents
from ltui.training.store.run_directory import RunDir, open_private_log

RESTART_S = 30.0
"""Seconds from one start of the process to the next, if it is killed or fails."""
_REPORT_BYTES = 4096


class EventMirror:
    """The process that mirrors one attempt, if the run has a mirror.

    Nothing here blocks, except the start of the process.
    """

    def __init__(self, run_dir: RunDir, spec: RunSpec) -> None:
        self._run_dir = run_dir
        self._folder = mirror_folder(run_dir, spec)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at_s = 0.0

    def update(self, now_s: float) -> list[Event]:
        """Start the process if it is due; return what it reports. ``now_s`` is monotonic."""
        if self._folder is None:
            return []
        lines = self._reports()
        if self._process is not None and (code := self._process.poll()) is not None:
            lines += self._reports()
            self._close_pipes()
            self._process = None
            if code == EXIT_UNUSABLE:
                self._folder = None
            else:
                lines.append("TensorBoard mirror: its process ended; it is started again")
        if self._folder is not None and self._process is None and now_s >= self._start_at_s:
            self._start_at_s = now_s + RESTART_S
            lines += self._start(str(self._folder))
        return [Event(time.time(), "mirror", line, {}) for line in lines]

    def _start(self, folder: str) -> list[str]:
        program = module_command("ltui.training.supervise.event_mirror")
        try:
            with open_private_log(self._run_dir.path / "logs" / "mirror.log") as log:
                self._process = subprocess.Popen(
                    [*program, str(self._run_dir.path), folder],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._run_dir.path,
                    umask=user_umask(),
                    start_new_session=True,
                )
        except OSError as error:
            return [f"TensorBoard mirror: it cannot be started ({error.strerror or error})"]
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return []

    def _reports(self) -> list[str]:
        """Return the complete lines that the process has written."""
        if self._process is None or self._process.stdout is None:
            return []
        try:
            data = os.read(self._process.stdout.fileno(), _REPORT_BYTES)
        except OSError:  # nothing was written
            return []
        return data.decode(errors="replace").splitlines()

    def close(self) -> None:
        """Let the process write what is left, and end. Nobody waits for that."""
        self._folder = None
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in () if self._process is None else (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


PASS_S = 5.0
"""Seconds between two reads of the history."""
RETRY_S = 30.0
"""Seconds until the next try after the files could not be written."""
EXIT_UNUSABLE = 2
"""Exit status if the mirror cannot work in this environment, so that it is not started again."""


def main(argv: list[str] | None = None) -> int:
    """Mirror the run until standard input closes. Return the exit status."""
    parser = argparse.ArgumentParser(prog="ltui-mirror")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    os.nice(19)
    run_dir = RunDir(arguments.run_dir)
    began = run_dir.read_spec().created_at
    # The mirror of the previous attempt or supervisor may still write what is left.
    with open(run_dir.mirror_lock_path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _mirror(run_dir, arguments.folder, began)


def _mirror(run_dir: RunDir, folder: Path, began: float) -> int:
    events: FollowedEvents | None = None
    failure: str | None = None
    open_input = True
    while open_input:
        open_input = not select.select([0], [], [], RETRY_S if failure else PASS_S)[0]
        try:
            # A new run directory under this name would not be listed, but stay.
            if not run_dir.path.is_dir():
                return 0
            events = events or FollowedEvents(folder, began, "mirror")
            with contextlib.suppress(NoHistoryError):
                events.update(run_dir)
        except (OSError, StoreError) as error:
            events = None
            if failure is None:
                failure = _sentence(folder, error)
                _report(f"{failure}; ltui tries again")
        except ProblemError as error:
            # TensorBoard is not installed any more.
            _report(" ".join(str(error).splitlines()))
            return EXIT_UNUSABLE
        else:
            if failure is not None:
                _report(f"{folder} is written again, nothing is missing")
            failure = None
    return 0


def _sentence(folder: Path, error: OSError | StoreError) -> str:
    if isinstance(error, OSError):
        return f"{folder} cannot be written ({error.strerror or error})"
    return error.problems[0].what.rstrip(".")


def _report(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        os.write(1, f"TensorBoard mirror: {sentence}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
