"""Groups of runs: those that differ only in the seed, or those with the same value of a setting.

Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from ltui.app.runs.run_settings import differing, is_seed, matching_names
from ltui.training.problem import Problem, ProblemError
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_name

Settings = Mapping[str, str]


class Grouping(Struct, frozen=True, kw_only=True):
    """How runs are put into groups."""

    by: tuple[str, ...] = ()
    """Settings whose values make a group; empty if all settings but the ignored ones do."""
    ignored: tuple[str, ...] = ()
    """Settings that do not count, besides the seed; only without ``by``."""


class RunGroup(Struct, frozen=True, kw_only=True):
    """Two or more runs that are shown as one."""

    label: str
    values: str
    """The label without the names of the settings, for narrow places."""
    runs: tuple[str, ...]
    """The ids of the members."""


def check_grouping(grouping: Grouping, settings: Collection[Settings]) -> None:
    """Raise ``ProblemError`` if a key names no setting of any run."""
    names = list(dict.fromkeys(name for one in settings for name in one))
    problems = [
        _unknown_key(option, key, names)
        for option, keys in (("--group-by", grouping.by), ("--ignore", grouping.ignored))
        for key in keys
        if not matching_names(names, key)
    ]
    if problems:
        raise ProblemError(*problems)


def _unknown_key(option: str, key: str, names: Sequence[str]) -> Problem:
    endings = {name.rpartition(".")[2]: name for name in names}
    close = difflib.get_close_matches(key, [*names, *endings], n=1)
    return Problem(
        where=f"{option} {clean_name(key)}",
        what="no run has such a setting.",
        remedy=f"Did you mean `{clean_name(close[0])}`?"
        if close
        else "`ltui compare RUN... --json` lists the settings that differ.",
    )


def groups_of(settings: Mapping[str, Settings], grouping: Grouping) -> list[RunGroup]:
    """Return the groups of two or more runs, in the order of their first members.

    ``settings`` are those of each run by its id.
    """
    by_key: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for run_id, key in _keys(settings, grouping).items():
        by_key.setdefault(key, []).append(run_id)
    by_key = {key: members for key, members in by_key.items() if len(members) > 1}
    told_apart = differing([dict(_known(key)) for key in by_key])
    groups = []
    for key, members in by_key.items():
        shown = [
            (clean_name(name.rpartition(".")[2]), NA if value is None else clean_name(value))
            for name, value in key
            if name in told_apart or grouping.by
        ]
        label = " ".join(f"{name}={value}" for name, value in shown) or "same settings"
        values = " ".join(value for _, value in shown) or label
        groups.append(RunGroup(label=label, values=values, runs=tuple(members)))
    return groups


def _keys(
    settings: Mapping[str, Settings], grouping: Grouping
) -> dict[str, tuple[tuple[str, str | None], ...]]:
    """Return the names and values that decide the group of each run."""
    names = list(dict.fromkeys(name for one in settings.values() for name in one))
    if grouping.by:
        chosen = dict.fromkeys(name for key in grouping.by for name in matching_names(names, key))
    else:
        ignored = {name for key in grouping.ignored for name in matching_names(names, key)}
        chosen = dict.fromkeys(n for n in names if n not in ignored and not is_seed(n))
    return {
        run_id: tuple((name, one.get(name)) for name in chosen) for run_id, one in settings.items()
    }


def _known(key: tuple[tuple[str, str | None], ...]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in key if value is not None]
