"""What a person has chosen on the screen of a comparison, and the tables that it shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.app.compare.alignment import BANDS
from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison, RunGroup
from ltui.app.presentation.metric_charts import ChartSettings
from ltui.widgets.columns import Cells, Column


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


MAX_NAME = 24
"""Maximum cells of the name of a run or a setting in a table."""
MAX_VALUE = 16
"""Maximum cells of the value of a setting in a table."""


class TableRow(Struct, frozen=True):
    """One row of a table, with its cells by the keys of the columns."""

    key: str
    cells: dict[str, Cells]
    line: Cells | None = None
    """A line over all columns in place of the cells."""


class TableView(Struct, frozen=True):
    """The columns and rows of a table."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]


def sized(head: Column, rows: Sequence[TableRow], settings: ViewSettings | None = None) -> Column:
    """Return a column that is as wide as its longest text; ``▾`` is the order of the rows."""
    title = head.title
    if settings is not None and head.key == settings.order:
        title = f"{title} {'▴' if settings.reversed else '▾'}"
    widths = [sum(cell_len(cell.text) for cell in row.cells.get(head.key, ())) for row in rows]
    return replace(head, title=title, width=max([cell_len(title), *widths, 1]))
