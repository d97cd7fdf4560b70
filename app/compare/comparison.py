"""The comparison of runs: what differs, groups with their bands, and aligned curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct, field

from ltui.app.compare.alignment import Band, Line, align, band_of, common_positions
from ltui.app.compare.compared_run import ComparedRun, Logged
from ltui.app.compare.run_groups import Grouping, RunGroup, check_grouping, groups_of
from ltui.app.compare.run_signs import run_colours
from ltui.app.runs.run_settings import differing, is_seed, number_of
from ltui.training.store.curve_reader import FloatArray
from ltui.widgets.sanitise import clean_name


class Spread(Struct, frozen=True):
    """A value over the runs of a group."""

    mean: float
    low: float
    """NaN if the band is not known, because only one run has the value."""
    high: float
    count: int


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
    def differing_settings(self) -> list[str]:
        """The names of the settings, and of the parts of the code, that are not the same."""
        return differing([run.described for run in self.runs], self._starting)

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
