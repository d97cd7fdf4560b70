"""The table of settings: one row for each setting, one column for each run. Pure."""

from __future__ import annotations

from ltui.app.compare.comparison import Comparison
from ltui.app.compare.table_view import MAX_NAME, MAX_VALUE, TableRow, TableView, sized
from ltui.app.compare.view_settings import ViewSettings, reference_id
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.columns import Cells, Column
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import Cell, Tone


def settings_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return one row for each setting and one column for each run, differences first."""
    reference = reference_id(comparison, settings)
    heads = [
        Column(key="setting", title="setting", width=8),
        *(
            Column(
                key=run.id,
                title=f"{sign_of(comparison.colours[run.id])} "
                f"{clean_name(comparison.names[run.id])[:MAX_VALUE]}",
                width=6,
                importance=1 if run.id == reference else 2 + number,
            )
            for number, run in enumerate(comparison.runs)
        ),
    ]
    rows = [
        TableRow(name, _setting_cells(comparison, name, reference, different=different))
        for different, names in (
            (True, comparison.differing_settings),
            (False, comparison.equal_settings),
        )
        for name in names
    ]
    # Columns are as wide as the settings that differ, so that more runs fit; others may be cut.
    decisive = rows[: len(comparison.differing_settings)] or rows
    return TableView(tuple(sized(head, decisive) for head in heads), tuple(rows))


def _setting_cells(
    comparison: Comparison, name: str, reference: str, *, different: bool
) -> dict[str, Cells]:
    """Return the cells of a setting; ``≠`` marks a row whose values differ."""
    wanted = comparison.by_id[reference].described.get(name)
    tone = Tone.PLAIN if different else Tone.DIM
    sign = "≠ " if different else "  "
    return {
        "setting": (Cell(text=f"{sign}{clean_name(name)}"[: MAX_NAME + 10], tone=tone),),
        **{
            run.id: (
                Cell(
                    text=clean_line(run.described.get(name, NA), 200)[: 2 * MAX_VALUE],
                    tone=Tone.WARN if run.described.get(name) != wanted else tone,
                ),
            )
            for run in comparison.runs
        },
    }
