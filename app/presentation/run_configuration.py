"""What a run was started with: its configuration as names and values, and its code. Pure.

The code is complete for ``ltui show --code``, and in short for the details.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import iterate_values
from ltui.training.store.code_record import SUBMITTED, CodeRecord
from ltui.widgets.sanitise import clean_line, clean_name

MAX_SETTINGS = 300
"""Maximum number of settings that are shown."""
MAX_VALUE = 200
"""Maximum number of characters of a value."""

Settings = list[tuple[str, str]]


def settings(spec: RunSpec) -> Settings:
    """Return names and values of the configuration as launched, without settings that have no
    value.

    ``model.init_args.width`` is named ``model.width``, and a class has its own name as its value.
    """
    if spec.config is None:
        return [("command", shlex.join(spec.command))] if spec.command else []
    pairs: Settings = []
    for path, value in iterate_values(spec.config):
        if value is None or (isinstance(value, (Mapping, list)) and value):
            continue
        name = path.replace(".init_args", "")
        if name.endswith(".class_path"):
            name, value = name.removesuffix(".class_path"), str(value).rpartition(".")[2]
        pairs.append((name, value_text(value)))
    return pairs[:MAX_SETTINGS]


def hyperparameters(values: Mapping[str, Any]) -> Settings:
    """Return the module's hyperparameters as rank 0 sent them (``save_hyperparameters``)."""
    return [(str(name), value_text(value)) for name, value in values.items()][:MAX_SETTINGS]


def value_text(value: Any) -> str:
    """Return a value as in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = "''" if value == "" else str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


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
