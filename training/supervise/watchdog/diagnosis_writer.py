"""Diagnoses in the run directory, which are written while a severe verdict is active.

Find out how the process of a rank ended. The sources are its wait status, the crash report of
faulthandler, the summary of the elastic agent and its log.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, Frame
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import Death, verdict_key
from ltui.training.diagnosis.stack_frames import is_library_file
from ltui.training.lifecycle.elastic_log import WorkerFailure, last_error_line, log_tail
from ltui.training.process.stack_dumps import parse_stacks
from ltui.training.state.run_snapshot import Verdict
from ltui.training.store.run_directory import RunDir

_MAXIMUM_FILES = 200
"""Maximum number of stored diagnoses in one attempt."""
_MAXIMUM_WRITES = 6
"""Maximum number of times a stored diagnosis is written while its verdict is active."""
_STORED_COLLECTIVES = 24
"""Number of last collectives of each rank that are stored."""


class _StoredDiagnosis(Struct):
    """The file of the diagnosis of one active verdict."""

    path: Path | None
    evidence: Evidence | None
    writes: int = 1


class DiagnosisWriter:
    """Stores a diagnosis for each severe verdict, and renews it with new evidence."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._stored: dict[str, _StoredDiagnosis] = {}

    def update(
        self,
        judgement: Judgement,
        evidence: Evidence | None,
        diagnose: Callable[[Verdict], Diagnosis],
    ) -> None:
        """Write diagnoses of new and ended verdicts, and of verdicts with new evidence.

        ``diagnose`` makes the diagnosis of a verdict with this evidence.
        """
        ended = {verdict_key(v) for v in judgement.ended}
        for verdict in (*judgement.verdicts, *judgement.ended):
            if verdict.level not in BLOCKING_LEVELS:
                continue
            key = verdict_key(verdict)
            stored = self._stored.get(key)
            if stored is None:
                path = write_diagnosis(self._run_dir, diagnose(verdict))
                self._stored[key] = _StoredDiagnosis(path, evidence)
                continue
            is_new = stored.evidence is not evidence and stored.writes < _MAXIMUM_WRITES
            if (is_new or key in ended) and stored.path is not None:
                stored.evidence = evidence
                stored.writes += 1
                write_diagnosis(self._run_dir, diagnose(verdict), stored.path)
            if key in ended:
                del self._stored[key]


def evidence_dir(run_dir: RunDir, attempt: int) -> Path:
    """Return the folder of the evidence and the diagnoses of an attempt."""
    return run_dir.path / "evidence" / str(attempt)


def write_diagnosis(run_dir: RunDir, diagnosis: Diagnosis, path: Path | None = None) -> Path | None:
    """Write a diagnosis to ``path`` or to a new file, and return its path; None on failure."""
    folder = evidence_dir(run_dir, diagnosis.attempt)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path is None:
            numbers = [int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit()]
            number = max(numbers, default=0) + 1
            if number > _MAXIMUM_FILES:
                return None
            path = folder / f"{number:03d}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(diagnosis.to_document()), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        return None
    return path


def shortened(evidence: Evidence | None) -> Evidence | None:
    """Remove old collectives, which the judge needs but a reader does not."""
    if evidence is None:
        return None
    ranks = {
        r: replace(e, collectives=e.collectives[-_STORED_COLLECTIVES:])
        for r, e in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


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
