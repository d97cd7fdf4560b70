"""What a run was started with: its settings by name, and its code. Pure.

The settings are those of its configuration or command, and its hyperparameters. Columns, filters,
sorting, comparisons and reports take them from here. The code is complete for
``ltui show --code``, and in short for the details.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import iterate_values
from ltui.training.store.code_record import SUBMITTED, CodeRecord
from ltui.training.store.frozen_code import FrozenCode, differs_text, files_text
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
        parts.append(f"{files_text(record.changed_count)} changed")
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


def frozen_lines(frozen: FrozenCode, changed: Sequence[str]) -> list[str]:
    """Return what is frozen, what is not, and how the code of now differs from it."""
    lines = [clean_line(part, 500) for part in frozen.lines()]
    lines += [differs_text(frozen.number, len(changed))]
    lines += [f"  {clean_line(name)}" for name in changed[:FILES_SHOWN]]
    return lines + ([f"  and {more} more"] if (more := len(changed) - FILES_SHOWN) > 0 else [])


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
        lines += ["", f"{files_text(last.changed_count)} changed, not committed:"]
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


SEED = re.compile(r"(^|[._-])(random_)?(seed|seed_everything|random_state)$", re.IGNORECASE)
"""Names of settings that only choose the random numbers of a run."""
_WHOLE = re.compile(r"[+-]?[0-9]+")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", re.DOTALL)
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)$", re.DOTALL)


def run_settings(spec: RunSpec, reported: Mapping[str, Any]) -> dict[str, str]:
    """Return names and values of the settings of a run.

    They are those of its configuration, or the options of its command one by one, and the
    hyperparameters that the program has ``reported`` (``RunStore.hyperparameters``). A program
    knows its options best, so of a command its value counts.
    """
    used = hyperparameters(reported)
    if spec.config is None:
        options = command_settings(spec.command or ())
        # argparse names the option --batch-size batch_size.
        spelt = {name.replace("-", "_"): name for name in options}
        return options | {spelt.get(name, name): value for name, value in used}
    named = dict(settings(spec))
    return named | {name: value for name, value in used if not matching_names(named, name)}


def command_settings(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a command by name, and the other words as ``command``.

    ``--lr 0.1``, ``--lr=0.1`` and ``lr=0.1`` are the setting ``lr``. An option without a value is
    ``true``; an option that is given several times has all its values.
    """
    words: list[str] = []
    values: dict[str, list[str]] = {}
    position = 0
    while position < len(command):
        word = command[position]
        following = command[position + 1] if position + 1 < len(command) else None
        position += 1
        # A path or a URL may contain an equals sign, an option of a program may not end there.
        if (option := _OPTION.match(word)) is not None:
            name, value = option[1], option[2]
            if value is None and following is not None and _is_value(following):
                value, position = following, position + 1
            values.setdefault(name, []).append("true" if value is None else value)
        elif (assignment := _ASSIGNMENT.match(word)) is not None:
            values.setdefault(assignment[1], []).append(assignment[2])
        else:
            words.append(word)
    named = {name: " ".join(texts) for name, texts in values.items()}
    return ({"command": shlex.join(words)} if words else {}) | named


def _is_value(word: str) -> bool:
    """Return whether a word after an option is its value: not an option, a script or ``a=b``."""
    negative = re.match(r"-[\d.]", word) is not None
    return negative or not (word.startswith("-") or word.endswith(".py") or "=" in word)


def number_of(value: float | str | None) -> float | None:
    """Return a value as a finite number, a whole number as it is written; None if it is none."""
    try:
        number = math.nan if value is None else float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else number


def is_seed(name: str) -> bool:
    """Return whether a setting only chooses the random numbers of a run."""
    return SEED.search(name) is not None


def matching_names(names: Collection[str], key: str) -> list[str]:
    """Return the settings that ``key`` names: exactly, else by the end of the name or a pattern."""
    if key in names:
        return [key]
    return [name for name in names if name.endswith(f".{key}") or fnmatchcase(name, key)]


def differing(
    settings_of_runs: Sequence[Mapping[str, str]], incomplete: Collection[int] = ()
) -> list[str]:
    """Return the names of the settings that are not the same in all runs, as they first appear.

    ``incomplete``: places of runs of which not everything is known yet. What these lack does not
    count.
    """
    names = dict.fromkeys(name for one in settings_of_runs for name in one)

    def values(name: str) -> set[str | None]:
        return {
            one.get(name)
            for place, one in enumerate(settings_of_runs)
            if name in one or place not in incomplete
        }

    return [name for name in names if len(values(name)) > 1]
