"""The table of settings: one row for each that differs, one column for each run or group. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ltui.app.compare.comparison import Comparison
from ltui.app.compare.table_view import MAX_NAME, MAX_VALUE, TableRow, TableView, sized
from ltui.app.compare.view_settings import ViewSettings, group_key, reference_id
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.columns import Cells, Column, shortened
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

EQUAL = "equal settings"
"""Key of the row that stands for the settings that are the same in all runs."""


def settings_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return one row for each setting that differs, and one line for all others.

    There is one column for each run, or for each group and each run that is in none.
    """
    reference = reference_id(comparison, settings)
    members = _columns(comparison, grouped=settings.grouped)
    heads = [
        Column(key="setting", title="setting", width=8),
        *(
            Column(
                key=key,
                title=f"{sign_of(comparison.colours[run_ids[0]])} {shortened(title, MAX_VALUE)}",
                width=6,
            )
            for key, title, run_ids in members
        ),
    ]
    rows = [
        TableRow(name, _setting_cells(comparison, name, reference, members))
        for name in comparison.differing_settings
    ]
    columns = tuple(sized(head, rows) for head in heads)
    return TableView(columns, (*rows, *_equal_rows(comparison, listed=settings.equal)))


_Members = list[tuple[str, str, tuple[str, ...]]]
"""Key, title and runs of each column."""


def _columns(comparison: Comparison, *, grouped: bool) -> _Members:
    groups = comparison.groups if grouped else []
    in_group = {run_id for group in groups for run_id in group.runs}
    return [
        *((group_key(group), f"{group.label} ({len(group.runs)})", group.runs) for group in groups),
        *(
            (run.id, clean_name(comparison.names[run.id]), (run.id,))
            for run in comparison.runs
            if run.id not in in_group
        ),
    ]


def _setting_cells(
    comparison: Comparison, name: str, reference: str, members: _Members
) -> dict[str, Cells]:
    wanted = comparison.by_id[reference].described.get(name)
    cells: dict[str, Cells] = {
        "setting": (Cell(text=f"≠ {shortened(clean_name(name), MAX_NAME + 8)}"),)
    }
    for key, _, run_ids in members:
        values = list(
            dict.fromkeys(comparison.by_id[run_id].described.get(name) for run_id in run_ids)
        )
        tone = Tone.PLAIN if values == [wanted] else Tone.WARN
        cells[key] = (Cell(text=_values_text(values), tone=tone),)
    return cells


def _values_text(values: Sequence[str | None]) -> str:
    """Return the value of a run, or the first values of the runs of a group."""
    texts = [NA if value is None else clean_line(value, 200) for value in values]
    return shortened(", ".join(texts), 2 * MAX_VALUE)


def _equal_rows(comparison: Comparison, *, listed: bool) -> list[TableRow]:
    """Return one line about the settings that are the same, and below it each of them."""
    described = comparison.runs[0].described
    names = comparison.equal_settings
    if not names:
        return []
    pairs = [f"{clean_name(name)} {clean_line(described[name], 60)}" for name in names]
    count = f"{'▾' if listed else '▸'} {len(names)} the same"
    text = count if listed else f"{count}: {' · '.join(pairs)}"
    rows = [TableRow(EQUAL, {}, (Cell(text=clean_line(text, 500), tone=Tone.DIM),))]
    if listed:
        width = min(MAX_NAME + 8, max(len(clean_name(name)) for name in names))
        rows += [
            TableRow(
                name,
                {},
                (
                    Cell(
                        text=f"  {shortened(clean_name(name), width):<{width}}  "
                        f"{clean_line(described[name], 200)}",
                        tone=Tone.DIM,
                    ),
                ),
            )
            for name in names
        ]
    return rows
