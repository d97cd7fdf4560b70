"""Find out how the process of a rank ended.

The sources are its wait status, the crash report of faulthandler, the summary of the elastic agent
and its log.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.judge_input import Death
from ltui.training.diagnosis.observations.stack_frames import is_library_file
from ltui.training.lifecycle.elastic_log import WorkerFailure, last_error_line
from ltui.training.process.stack_dumps import parse_stacks
from ltui.training.store.run_directory import RunDir

_FATAL_ERROR = re.compile(r"^Fatal Python error: (.+)$", re.M)
_SIGNAL_NAMES = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""Error text of faulthandler -> name of the signal."""
_ERROR_WORDS = re.compile(
    r"error|exception|abort|terminate|fault|killed|fatal|enforce", re.IGNORECASE
)
_TAIL_BYTES = 1 << 16
"""Maximum number of bytes that are read from the end of a file."""


def describe_death(
    run_dir: RunDir,
    attempt: int,
    rank: int,
    pid: int,
    status: int | None,
    failures: Mapping[int, WorkerFailure],
) -> Death:
    """Return how the process ``pid`` of ``rank`` ended.

    ``status`` is its wait status if it was observed. ``failures`` are the failures by rank that the
    elastic agent reported.
    """
    signal_name, exit_code = _parse_status(status)
    failure = failures.get(rank)
    if signal_name is None and exit_code is None and failure is not None:
        if failure.exit_code < 0:
            signal_name = _signal_name(-failure.exit_code)
        else:
            exit_code = failure.exit_code
    crash_signal, frame = _read_crash_report(
        run_dir.path / "evidence" / str(attempt) / f"stacks-{pid}.txt"
    )
    log = _read_tail(run_dir.rank_log_path(attempt, rank))
    line = last_error_line(log) if log else None
    if line is not None and not _ERROR_WORDS.search(line):
        line = None
    return Death(
        signal=signal_name or crash_signal, exit_code=exit_code, frame=frame, last_line=line
    )


def _parse_status(status: int | None) -> tuple[str | None, int | None]:
    """Return the signal or the exit code of a wait status."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return _signal_name(os.WTERMSIG(status)), None
    return None, os.WEXITSTATUS(status)


def _read_crash_report(path: Path) -> tuple[str | None, Frame | None]:
    """Return the signal and the line of user code of the last crash that faulthandler reported."""
    text = _read_tail(path)
    crashes = list(_FATAL_ERROR.finditer(text))
    if not crashes:
        return None, None
    stacks = parse_stacks(text[crashes[-1].end() :])
    frames = next((s.frames for s in stacks if s.main), ())
    user_frame = next((f for f in frames if not is_library_file(f.file)), None)
    signal_name = _SIGNAL_NAMES.get(crashes[-1][1].strip())
    return signal_name, user_frame or (frames[0] if frames else None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_tail(path: Path) -> str:
    """Return the end of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
