"""The comparison of runs: what differs, groups with their bands, and aligned curves. Pure.

A group has the runs that differ only in the seed, or those with the same value of a setting.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct, field

from ltui.app.compare.alignment import Band, Line, align, band_of, common_positions
from ltui.app.compare.compared_run import ComparedRun, Logged, run_colours
from ltui.app.presentation.run_configuration import differing, is_seed, matching_names, number_of
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.curve_reader import FloatArray
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


class Spread(Struct, frozen=True):
    """A value over the runs of a group."""

    mean: float
    low: float
    """NaN if the band is not known, because only one run has the value."""
    high: float
    runs: int


class Comparison(Struct, frozen=True, kw_only=True, dict=True):
    """Several runs, the first of which is the reference, and how they are compared."""

    runs: tuple[ComparedRun, ...]
    metrics: tuple[str, ...]
    axis: str = "step"
    band: str = "minmax"
    grouping: Grouping = field(default_factory=Grouping)

    @cached_property
    def by_id(self) -> dict[str, ComparedRun]:
        return {run.id: run for run in self.runs}

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each run by its id; the id itself if two runs have the same name."""
        names = [run.snapshot.name for run in self.runs]
        return {
            run.id: run.id if names.count(run.snapshot.name) > 1 else run.snapshot.name
            for run in self.runs
        }

    @cached_property
    def colours(self) -> dict[str, int]:
        """The index of colour and sign of each run."""
        # A group is drawn with the sign of its first member.
        grouped = {run_id for group in self.groups for run_id in group.runs[1:]}
        leaders = {run.id for run in self.runs} - grouped
        return run_colours({run.id: run.colour for run in self.runs}, leaders)

    def __post_init__(self) -> None:
        # Raises ``ProblemError`` if no run has a setting that the grouping names.
        check_grouping(self.grouping, [run.settings for run in self.runs])

    @cached_property
    def groups(self) -> list[RunGroup]:
        """The groups of two or more runs: those that the user named, else by the settings."""
        named: dict[str, list[str]] = {}
        if self.grouping == Grouping():
            for run in self.runs:
                if run.group:
                    named.setdefault(run.group, []).append(run.id)
        groups = [
            RunGroup(label=clean_name(name), values=clean_name(name), runs=tuple(members))
            for name, members in named.items()
            if len(members) > 1
        ]
        in_group = {run_id for group in groups for run_id in group.runs}
        others = {run.id: run.settings for run in self.runs if run.id not in in_group}
        return groups + groups_of(others, self.grouping)

    @cached_property
    def grouped(self) -> set[str]:
        """The ids of the runs that are in a group."""
        return {run_id for group in self.groups for run_id in group.runs}

    @cached_property
    def differing_settings(self) -> list[str]:
        """The names of the settings, and of the parts of the code, that are not the same."""
        return differing([run.described for run in self.runs], self._starting)

    @cached_property
    def differing_variables(self) -> list[str]:
        """The environment variables that are not the same in all runs of which they are known."""
        return sorted(differing([run.environment for run in self.runs if run.environment]))

    @cached_property
    def _starting(self) -> set[int]:
        """The places of the runs whose settings are not all known yet."""
        return {place for place, run in enumerate(self.runs) if run.is_starting}

    @cached_property
    def parameters(self) -> list[str]:
        """The settings that differ, without code. Seeds and names of a single run come last."""

        def says_little(name: str) -> bool:
            values = {run.settings.get(name) for run in self.runs}
            is_name = len(values) == len(self.runs) and None in map(number_of, values)
            return is_seed(name) or is_name

        names = differing([run.settings for run in self.runs], self._starting)
        return sorted(names, key=says_little)

    @cached_property
    def equal_settings(self) -> list[str]:
        """The names of those that are the same in all runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.described)
        not_equal = set(self.differing_settings)
        return [name for name in names if name not in not_equal]

    @cached_property
    def _lines(self) -> dict[tuple[str, float], dict[str, Line]]:
        """The lines by metric and smoothing: groups and tables need them several times."""
        return {}

    def lines(self, metric: str, smoothing: float = 0.0) -> dict[str, Line]:
        """Return the lines of the runs that have a metric, by their ids."""
        if (metric, smoothing) not in self._lines:
            lines = {run.id: run.line(metric, self.axis, smoothing) for run in self.runs}
            self._lines[metric, smoothing] = {
                run_id: line for run_id, line in lines.items() if line is not None and len(line.x)
            }
        return self._lines[metric, smoothing]

    @cached_property
    def _directions(self) -> dict[str, str]:
        """The direction of each metric that has one: tables need it for each run."""
        return {
            name: summary.direction
            for run in reversed(self.runs)
            for name, summary in run.metrics.items()
            if summary.direction
        }

    def direction(self, metric: str | None) -> str | None:
        """Return ``min`` or ``max`` if such values of a metric are better; None if not known."""
        return self._directions.get(metric or "")

    def best_of(self, run: ComparedRun, metric: str | None) -> Logged | None:
        """Return the best value of a run; the lowest one if it is not known which one is best."""
        summary = run.metrics.get(metric or "")
        if summary is None:
            return None
        return summary.lowest if self.direction(metric) is None else summary.best

    def last_common(self, metric: str) -> float | None:
        """Return the last position that every run with this metric has reached."""
        lines = self.lines(metric)
        last = min((float(line.x[-1]) for line in lines.values()), default=None)
        first = max((float(line.x[0]) for line in lines.values()), default=math.inf)
        return None if last is None or last < first else last

    def values_at(self, metric: str, position: float) -> dict[str, float]:
        """Return the value of each run at a position; NaN where a curve has a gap."""
        lines = self.lines(metric)
        column = align(list(lines.values()), np.array([position]))[:, 0]
        return dict(zip(lines, column.tolist(), strict=True))

    def group_curve(
        self, group: RunGroup, metric: str, smoothing: float = 0.0
    ) -> tuple[FloatArray, Band] | None:
        """Return positions and band of a group; None if no member has the metric."""
        lines = self.lines(metric, smoothing)
        members = [lines[run_id] for run_id in group.runs if run_id in lines]
        if not members:
            return None
        positions = common_positions(members)
        return positions, band_of(align(members, positions), self.band)

    def spread(self, group: RunGroup, metric: str, value: str) -> Spread | None:
        """Return a metric over a group; ``value`` is ``final``, ``best`` or ``lowest``."""
        summaries = [self.by_id[run_id].metrics.get(metric) for run_id in group.runs]
        logged = [getattr(one, value) for one in summaries if one is not None]
        return spread_of([one.value for one in logged if one is not None], self.band)


def spread_of(values: Sequence[float], band: str) -> Spread | None:
    """Return mean and band of some values; None if none of them is finite."""
    table = np.array(values, dtype=np.float64).reshape(-1, 1)
    found = band_of(table, band)
    if not found.count[0]:
        return None
    return Spread(
        float(found.mean[0]), float(found.low[0]), float(found.high[0]), int(found.count[0])
    )
