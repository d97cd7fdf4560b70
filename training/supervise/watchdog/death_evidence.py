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
from ltui.training.lifecycle.elastic_log import WorkerFailure, last_error_line, log_tail
from ltui.training.process.stack_dumps import parse_stacks
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.watchdog.diagnosis_writer import evidence_dir

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
    code: int | None = None
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
    elif rank in failures:
        code = failures[rank].exit_code
    killed_by = _signal_name(-code) if code is not None and code < 0 else None
    crash_signal, frame = _read_crash_report(evidence_dir(run_dir, attempt) / f"stacks-{pid}.txt")
    line = last_error_line(log_tail(run_dir.rank_log_path(attempt, rank)))
    if line is not None and not _ERROR_WORDS.search(line):
        line = None
    return Death(
        signal=killed_by or crash_signal,
        exit_code=code if code is not None and code >= 0 else None,
        frame=frame,
        last_line=line,
    )


def _read_crash_report(path: Path) -> tuple[str | None, Frame | None]:
    """Return the signal and the line of user code of the last crash that faulthandler reported."""
    text = log_tail(path)
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
