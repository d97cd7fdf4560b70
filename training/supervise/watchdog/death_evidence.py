"""How a rank's process ended, from its status and what it left: faulthandler's last words, the
agent's summary, its log."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.rules.deaths import Death
from ltui.training.diagnosis.rules.stack_frames import is_library_file
from ltui.training.lifecycle.elastic_log import WorkerFailure, last_error_line
from ltui.training.process.stack_dumps import parse_stacks
from ltui.training.store.run_directory import RunDir

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.M)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_ERROR = re.compile(r"error|exception|abort|terminate|fault|killed|fatal|enforce", re.IGNORECASE)
_TAIL_BYTES = 1 << 16


def describe_death(
    run_dir: RunDir,
    attempt: int,
    rank: int,
    pid: int,
    status: int | None,
    failures: Mapping[int, WorkerFailure],
) -> Death:
    """What can be known of the end of ``rank``, whose process was ``pid`` and ended with the wait
    status ``status``, where somebody saw that."""
    name, code = _named(status)
    failure = failures.get(rank)
    if name is None and code is None and failure is not None:
        name = _signal_name(-failure.exit_code) if failure.exit_code < 0 else None
        code = failure.exit_code if failure.exit_code >= 0 else None
    fatal, frame = _fatal(run_dir.path / "evidence" / str(attempt) / f"stacks-{pid}.txt")
    name = name or fatal
    log = _tail(run_dir.rank_log_path(attempt, rank))
    line = last_error_line(log) if log else None
    if line is not None and not _ERROR.search(line):
        line = None
    how = "its process is gone"
    if name is not None:
        how = f"killed by {name}"
    elif code is not None:
        how = f"exit code {code}"
    return Death(how=how, signal=name, exit_code=code, frame=frame, last_line=line)


def _named(status: int | None) -> tuple[str | None, int | None]:
    """(signal, exit code) of a wait status."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return _signal_name(os.WTERMSIG(status)), None
    return None, os.WEXITSTATUS(status)


def _fatal(path: Path) -> tuple[str | None, Frame | None]:
    text = _tail(path)
    found = list(_FATAL.finditer(text))
    if not found:
        return None, None
    stacks = parse_stacks(text[found[-1].end() :])
    frames = next((s.frames for s in stacks if s.main), ())
    own = next((f for f in frames if not is_library_file(f.file)), None)
    return _SIGNALS.get(found[-1][1].strip()), own or (frames[0] if frames else None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
