"""The supervisor's side of the mirror: start its process, and pass on what it reports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.mirror_folder import mirror_folder
from ltui.training.process.python_command import module_command
from ltui.training.state.run_snapshot import Event
from ltui.training.store.run_directory import RunDir, open_private_log
from ltui.training.supervise.mirror_process import EXIT_UNUSABLE

RESTART_S = 30.0
"""Seconds from one start of the process to the next, if it is killed or fails."""
_REPORT_BYTES = 4096


class EventMirror:
    """The process that mirrors one attempt (``mirror_process.py``), if the run has a mirror.

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
        program = module_command("ltui.training.supervise.mirror_process")
        try:
            with open_private_log(self._run_dir.path / "logs" / "mirror.log") as log:
                self._process = subprocess.Popen(
                    [*program, str(self._run_dir.path), folder],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._run_dir.path,
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
