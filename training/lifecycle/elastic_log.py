"""What torch elastic says of its workers when one of them failed, read from its log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

LOG_TAIL_BYTES = 65536
_FAILURE = re.compile(
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: \d+\)\s*\n.*?exitcode\s*:\s*(?P<code>-?\d+)"
    r"(?: \(pid: (?P<pid>\d+)\))?"
)
_AGENT_FAILS = re.compile(r"^E\d{4} .*torch/distributed/elastic/multiprocessing/api\.py", re.M)
_AGENT_LINE = re.compile(r"[EWI]\d{4} .*torch/distributed/")
_PREFIX = re.compile(r"^\[(rank|default)\d+\]:[ \t]?", re.M)
"""torch's hook and torch elastic put it before what a rank writes."""
_TRACEBACK = re.compile(
    r"^(?P<before>[^\n]*\n)?[^\n]*Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)+"
    r"(?P<said>[^\s][^\n]*)",
    re.M,
)
_NAMED_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
_WARNING = re.compile(
    r"\S+\.py:\d+: |\S+:\d+: \w*Warning: |\[?[EWI]\d{4} .*\bWarning: |warnings\.warn\("
)
"""Lightning writes its own as ``file.py:224: You're resuming ...``."""
_ROOT = "Root Cause (first observed failure)"


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One failed rank; ``exit_code`` is negative for a signal."""

    rank: int
    exit_code: int
    first: bool
    """The one that the agent saw first."""


def worker_failures(log: str) -> list[WorkerFailure]:
    """Every rank of the last failure summary in ``log``, by rank; empty where there is none."""
    root_at = log.rfind(_ROOT)
    if root_at < 0:
        return []
    begin = log.rfind("FAILED", 0, root_at)
    found: dict[int, WorkerFailure] = {}
    for match in _FAILURE.finditer(log, max(0, begin)):
        rank = int(match["rank"])
        found[rank] = WorkerFailure(rank, int(match["code"]), match.start() > root_at)
    return [found[rank] for rank in sorted(found)]


def last_error_line(log: str) -> str | None:
    """The line that most likely says what went wrong: an exception's, else the last one.

    Where the agent's own traceback follows, what the ranks wrote before it goes first. Warnings
    often come last, and as the interpreter leaves exceptions that it ignores: neither is a cause.
    """
    log = _PREFIX.sub("", log)
    ours = _AGENT_FAILS.split(log, maxsplit=1)[0]
    lines = _said(ours) or _said(log)
    ends = [
        found["said"]
        for found in _TRACEBACK.finditer(ours)
        if not (found["before"] or "").startswith("Exception ignored")
    ]
    named = [line for line in lines[-200:] if _NAMED_ERROR.match(line)]
    telling = [line for line in lines if not _WARNING.match(line)]
    for candidates in (ends, named, telling, lines):
        if candidates:
            return candidates[-1].strip()[:300]
    return None


def _said(log: str) -> list[str]:
    """Its lines without the agent's own."""
    lines = (line.strip() for line in log.split("\n"))
    return [line for line in lines if line and not _AGENT_LINE.match(line)]


def log_tail(path: Path) -> str:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
