"""The code of a run as text: for ``ltui show --code``, and in short for the details. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ltui.training.store.code_record import SUBMITTED, CodeRecord
from ltui.widgets.sanitise import clean_line, clean_name

COMMIT_DIGITS = 10
"""Digits of a commit that are shown where there is little room."""
FILES_SHOWN = 8
"""Number of changed files that are listed in the details."""


def code_summary(record: CodeRecord) -> str:
    """Return ``3f48a5e012 on main, 2 files changed``."""
    if record.commit is None:
        return clean_line(record.note or "unknown")
    branch = "no branch" if record.branch is None else clean_name(record.branch)
    parts = [f"{record.commit[:COMMIT_DIGITS]} on {branch}"]
    if record.changed_count:
        parts.append(f"{_files(record.changed_count)} changed")
    elif record.diff_complete:
        parts.append("nothing changed")
    if record.note:
        parts.append(clean_line(record.note))
    return ", ".join(parts)


def short_code_lines(records: Sequence[CodeRecord]) -> list[str]:
    """Return the code of the last attempt in a few lines; empty if nothing was recorded."""
    if not records:
        return []
    last = records[-1]
    files = [clean_line(name) for name in last.changed_files[:FILES_SHOWN]]
    more = last.changed_count - len(files)
    lines = [code_summary(last), *(f"  {name}" for name in files)]
    lines += [f"  and {more} more"] if more > 0 else []
    return [*lines, *_comparisons(records)]


def code_lines(records: Sequence[CodeRecord], diff: str) -> list[str]:
    """Return everything that is recorded about the last attempt, with its uncommitted changes."""
    last = records[-1]
    rows = [
        ("command", shlex.join(last.command)),
        ("user", f"{last.user} on {last.host}"),
        ("repository", last.repository or ""),
        ("commit", last.commit or ""),
        ("branch", last.branch or ("" if last.commit is None else "none (detached head)")),
        ("note", last.note or ""),
        ("ltui", last.ltui or ""),
        ("interpreter", last.python or ""),
        *last.packages.items(),
    ]
    width = max(len(name) for name, value in rows if value)
    lines = [f"{clean_name(name).ljust(width)}  {clean_line(v, 2000)}" for name, v in rows if v]
    lines += _comparisons(records)
    if last.changed_count:
        lines += ["", f"{_files(last.changed_count)} changed, not committed:"]
        lines += [f"  {clean_line(name)}" for name in last.changed_files]
    if diff:
        lines += ["", *(clean_line(line.replace("\t", "    "), 2000) for line in diff.split("\n"))]
    return lines


def _comparisons(records: Sequence[CodeRecord]) -> list[str]:
    """Return sentences that compare the code with that of earlier attempts and other runs."""
    first, last = records[0], records[-1]
    lines = []
    if len(records) > 1 and (first.commit, first.identity) != (last.commit, last.identity):
        since = (
            "since the run was submitted"
            if first.attempt == SUBMITTED
            else "since the first attempt"
        )
        lines.append(f"The code or configuration has changed {since}: {code_summary(first)}.")
    same = (record for record in records if record.identity == last.identity)
    repeated = next((record.repeats for record in same if record.repeats), None)
    if repeated is not None:
        lines.append(f"The same configuration and code as {clean_name(repeated)}.")
    return lines


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"
