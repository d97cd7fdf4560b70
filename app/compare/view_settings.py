"""What the keys of the compare screen change, and what follows from it for a comparison. Pure."""

from __future__ import annotations

from msgspec import Struct, field

from ltui.app.compare.alignment import BANDS
from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison
from ltui.app.compare.run_groups import RunGroup
from ltui.app.presentation.metric_charts import ChartSettings


class ViewSettings(Struct, frozen=True, kw_only=True):
    """What the keys of the screen change."""

    metric: str | None = None
    """The metric of the table, whose chart comes first; None for the first one."""
    chart: ChartSettings = field(default_factory=ChartSettings)
    grouped: bool = False
    band: str = BANDS[0]
    reference: str | None = None
    """Id of the pinned run; None for the first one that has a value of the metric."""
    hidden: frozenset[str] = frozenset()
    """Keys of runs and groups whose curves are not drawn."""
    opened: frozenset[str] = frozenset()
    """Keys of groups whose members are shown."""
    equal: bool = False
    """The settings that are the same in all runs are listed, not only counted."""
    order: str | None = None
    """Key of the column by which the rows are sorted; None for the order of the runs."""
    reversed: bool = False
    value: str = "best"
    """The value of the metric in the parallel coordinates: ``best`` or ``final``."""

    def next_band(self) -> str:
        """Return the kind of band that follows."""
        return BANDS[(BANDS.index(self.band) + 1) % len(BANDS)]


def group_key(group: RunGroup) -> str:
    """Return the key of a group in tables; ids of runs contain no blank."""
    return f"group {group.label}"


def chosen_metric(comparison: Comparison, settings: ViewSettings) -> str | None:
    """Return the metric of the table; None if no run has logged any."""
    if settings.metric in comparison.metrics:
        return settings.metric
    return next(iter(comparison.metrics), None)


def reference_id(comparison: Comparison, settings: ViewSettings) -> str:
    """Return the id of the run with which the others are compared."""
    pinned = settings.reference
    if pinned in comparison.by_id:
        return pinned
    metric = chosen_metric(comparison, settings)
    having = (run.id for run in comparison.runs if comparison.best_of(run, metric) is not None)
    return next(having, comparison.runs[0].id)


def shown_runs(comparison: Comparison, settings: ViewSettings) -> list[ComparedRun]:
    """Return the runs that are not hidden, neither by themselves nor with their group."""
    hidden = set(settings.hidden)
    for group in comparison.groups if settings.grouped else ():
        if group_key(group) in hidden:
            hidden.update(group.runs)
    return [run for run in comparison.runs if run.id not in hidden]
