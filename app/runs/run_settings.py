"""The settings of a run by name: of its configuration or command, and its hyperparameters. Pure.

Columns, filters, sorting, comparisons and reports take the settings of a run from here.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ltui.app.presentation.run_configuration import hyperparameters, settings
from ltui.training.config.run_spec import RunSpec

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
