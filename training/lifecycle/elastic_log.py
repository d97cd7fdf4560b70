"""Parse the log of torch elastic to find the workers that failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.shared.regular_files import read_end
from ltui.training.store.run_directory import RunDir

LOG_TAIL_BYTES = 65536
"""Bytes that are read from the end of a log."""
_FAILURE = re.compile(
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: \d+\)\s*\n.*?exitcode\s*:\s*(?P<code>-?\d+)"
    r"(?: \(pid: (?P<pid>\d+)\))?"
)
_AGENT_FAILS = re.compile(r"^E\d{4} .*torch/distributed/elastic/multiprocessing/api\.py", re.M)
_AGENT_LINE = re.compile(r"[EWI]\d{4} .*torch/distributed/")
_PREFIX = re.compile(r"^\[(rank|default)\d+\]:[ \t]?", re.M)
"""Prefix that PyTorch's exception hook and torch elastic add to the lines of a rank."""
_TRACEBACK = re.compile(
    r"^(?P<before>[^\n]*\n)?[^\n]*Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)+"
    r"(?P<error>[^\s][^\n]*)",
    re.M,
)
_NAMED_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
_WARNING = re.compile(
    r"\S+\.py:\d+: |\S+:\d+: \w*Warning: |\[?[EWI]\d{4} .*\bWarning: |warnings\.warn\("
)
"""Lightning writes warnings as ``file.py:224: You're resuming ...``."""
_ROOT = "Root Cause (first observed failure)"
_IMPORT_BY_WORKER = re.compile(
    r"\.py\", line \d+, in (_fixup_main_from_\w+|import_main_path)$", re.M
)
"""In the traceback of a worker. Its parent only says that the worker is gone."""
UNGUARDED = (
    "error in a worker, which ran the script again to import it. Put what trains below"
    ' `if __name__ == "__main__":`'
)


class WorkerFailure(Struct, frozen=True):
    """One failed rank; ``exit_code`` is negative for a signal."""

    rank: int
    exit_code: int
    first: bool
    """True for the failure that the elastic agent observed first."""


def worker_failures(log: str) -> list[WorkerFailure]:
    """Return the failed ranks of the last failure summary in ``log``, ordered by rank."""
    root_at = log.rfind(_ROOT)
    if root_at < 0:
        return []
    begin = log.rfind("FAILED", 0, root_at)
    failures: dict[int, WorkerFailure] = {}
    for match in _FAILURE.finditer(log, max(0, begin)):
        rank = int(match["rank"])
        failures[rank] = WorkerFailure(rank, int(match["code"]), match.start() > root_at)
    return [failures[rank] for rank in sorted(failures)]


def merged_failures(
    own: list[WorkerFailure], others: Iterable[WorkerFailure]
) -> list[WorkerFailure]:
    """Return the failures that the agents of several machines report, each rank once.

    Every agent calls one of its own ranks the first. If this machine has none, another's counts.
    """
    has_first = any(failure.first for failure in own)
    failures = {f.rank: replace(f, first=f.first and not has_first) for f in others}
    failures |= {failure.rank: failure for failure in own}
    return [failures[rank] for rank in sorted(failures)]


def last_error_line(log: str) -> str | None:
    """Return the line that most likely states the error: that of an exception, else the last one.

    A worker that failed because it ran the whole script again is named first.

    If the agent's own traceback is in the log, lines that the ranks wrote before it are preferred.
    Warnings, and exceptions that the interpreter ignores at exit, often come last. They are not
    the cause, so they are skipped.
    """
    if _IMPORT_BY_WORKER.search(log):
        return UNGUARDED
    log = _PREFIX.sub("", log)
    rank_output = _AGENT_FAILS.split(log, maxsplit=1)[0]
    lines = _without_agent_lines(rank_output) or _without_agent_lines(log)
    traceback_errors = [
        match["error"]
        for match in _TRACEBACK.finditer(rank_output)
        if not (match["before"] or "").startswith("Exception ignored")
    ]
    named_errors = [line for line in lines[-200:] if _NAMED_ERROR.match(line)]
    not_warnings = [line for line in lines if not _WARNING.match(line)]
    for candidates in (traceback_errors, named_errors, not_warnings, lines):
        if candidates:
            return candidates[-1].strip()[:300]
    return None


def likely_error_line(
    engine_log: str, run_dir: RunDir, attempt: int, failures: Sequence[WorkerFailure]
) -> str | None:
    """Return the line that most likely states why the attempt failed on this machine.

    It is taken from the log of the rank that failed first (rank 0 if none is known), else from that
    of the engine.
    """
    first = next((failure.rank for failure in failures if failure.first), 0)
    rank_log = log_tail(run_dir.rank_log_path(attempt, first))
    return last_error_line(rank_log) or last_error_line(engine_log)


def _without_agent_lines(log: str) -> list[str]:
    """Return the lines of ``log`` that the elastic agent did not write, without empty lines."""
    lines = (line.strip() for line in log.split("\n"))
    return [line for line in lines if line and not _AGENT_LINE.match(line)]


def log_tail(path: Path) -> str:
    """Return the last ``LOG_TAIL_BYTES`` of a log, or an empty string if there is no log."""
    return read_end(path, LOG_TAIL_BYTES)
