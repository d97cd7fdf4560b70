"""The tables of a comparison: what runs and groups came to, and their settings. Pure.

The table of settings has one row for each setting that differs, and one column for each run or
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison, RunGroup, Spread
from ltui.app.compare.comparison_charts import ViewSettings, chosen_metric, group_key, reference_id
from ltui.app.compare.comparison_report import best_texts, logged_text
from ltui.app.presentation.run_configuration import number_of
from ltui.app.state_words import state_word
from ltui.widgets import formats
from ltui.widgets.charts.chart_options import sign_of
from ltui.widgets.columns import Cells, Column, shortened
from ltui.widgets.formats import NA
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

MAX_NAME = 24
"""Maximum cells of the name of a run or a setting in a table."""
MAX_VALUE = 16
"""Maximum cells of the value of a setting in a table."""
SETTING = "setting "
"""Begin of the key of a column that has the values of a setting."""
_BEST_FIRST = ("best", "delta")

Value = float | str | None
_Item = TypeVar("_Item")


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


def ordered_groups(comparison: Comparison, settings: ViewSettings) -> list[RunGroup]:
    """Return the groups by the chosen column: by the mean of a number, or by their first value."""

    def value_of(group: RunGroup) -> Value:
        values = [_value(comparison, settings, comparison.by_id[one]) for one in group.runs]
        numbers = [one for one in map(number_of, values) if one is not None]
        if numbers:
            # The sum of huge numbers is infinite.
            return sum(one / len(numbers) for one in numbers)
        return next((one for one in values if one is not None), None)

    return _ordered(comparison, settings, comparison.groups, value_of)


def ordered_runs(
    comparison: Comparison, settings: ViewSettings, runs: Iterable[ComparedRun]
) -> list[ComparedRun]:
    """Return the runs by the chosen column; those without a value come last."""
    return _ordered(comparison, settings, list(runs), lambda run: _value(comparison, settings, run))


def _ordered(
    comparison: Comparison,
    settings: ViewSettings,
    items: Sequence[_Item],
    value_of: Callable[[_Item], Value],
) -> list[_Item]:
    if settings.order is None:
        return list(items)
    higher_is_better = comparison.direction(chosen_metric(comparison, settings)) == "max"
    reverse = settings.reversed != (higher_is_better and settings.order in _BEST_FIRST)
    values = [(value_of(item), item) for item in items]
    known = [(value, item) for value, item in values if value is not None]
    known.sort(key=lambda pair: _sort_key(pair[0]), reverse=reverse)
    return [item for _, item in known] + [item for value, item in values if value is None]


def _value(comparison: Comparison, settings: ViewSettings, run: ComparedRun) -> Value:
    """Return the value of a run in the chosen column."""
    order = settings.order or ""
    if order.startswith(SETTING):
        return run.described.get(order.removeprefix(SETTING))
    metric = chosen_metric(comparison, settings)
    summary = run.metrics.get(metric or "")
    best = comparison.best_of(run, metric)
    if comparison.direction(metric) is None:
        at = None if summary is None or summary.highest is None else summary.highest.value
    else:
        at = None if best is None else best.step
    values: dict[str, Value] = {
        "run": run.snapshot.name,
        "best": None if best is None else best.value,
        "delta": None if best is None else best.value,
        "at": at,
        "final": None if summary is None else summary.final.value,
        "time": run.time_s,
        "rate": run.samples_per_s,
        "memory": run.peak_memory_bytes,
        "goodput": run.time.goodput,
    }
    return values.get(order)


def _sort_key(value: Value) -> tuple[int, float, str]:
    """Return a key that puts numbers before other texts."""
    number = number_of(value)
    return (1, 0.0, str(value)) if number is None else (0, number, "")


MAX_SETTINGS = 40
"""Maximum number of settings that are columns of a table of runs."""


def runs_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return the table of runs and groups: the chosen metric, speed, and settings that differ."""
    heads = [*_names(), *_results(comparison, settings)]
    heads += _settings(comparison.differing_settings, importance=10)
    return _table(comparison, settings, heads)


def parameters_table(comparison: Comparison, settings: ViewSettings) -> TableView:
    """Return the settings that differ beside the chosen metric, for each run and group."""
    metric = {head.key: head for head in _results(comparison, settings)}
    heads = [*_names(), *_settings(comparison.parameters, importance=4)]
    return _table(comparison, settings, [*heads, metric["best"], metric["final"]])


def _table(comparison: Comparison, settings: ViewSettings, heads: Sequence[Column]) -> TableView:
    rows = tuple(_rows(comparison, settings))
    shown = [head for head in heads if not head.optional or _has_values(rows, head.key)]
    return TableView(tuple(sized(head, rows, settings) for head in shown), rows)


def _has_values(rows: Sequence[TableRow], key: str) -> bool:
    return any(cell.text != NA for row in rows for cell in row.cells.get(key, ()))


# -- columns ---------------------------------------------------------------------------------------


def _names() -> list[Column]:
    return [Column(key="sign", title="", width=1), Column(key="run", title="run", width=8)]


def _results(comparison: Comparison, settings: ViewSettings) -> list[Column]:
    known = comparison.direction(chosen_metric(comparison, settings)) is not None
    best, at = ("best", "at step") if known else ("lowest", "highest")
    return [
        Column(key="best", title=best, width=6, right=True),
        Column(key="at", title=at, width=7, right=True, importance=3),
        Column(key="final", title="final", width=6, right=True, importance=2),
        Column(key="delta", title=f"Δ {best}", width=6, right=True, importance=4),
        Column(key="band", title="band", width=6, importance=3, optional=True),
        Column(key="state", title="state", width=7, importance=5),
        Column(key="time", title="time", width=6, right=True, importance=6),
        Column(key="rate", title="samples/s", width=9, right=True, importance=7),
        Column(key="memory", title="memory", width=8, right=True, importance=8, optional=True),
        Column(key="goodput", title="goodput", width=7, right=True, importance=9, optional=True),
    ]


def _settings(names: Sequence[str], *, importance: int) -> list[Column]:
    return [
        Column(
            key=f"{SETTING}{name}",
            title=clean_name(name.rpartition(".")[2])[:MAX_VALUE],
            width=4,
            importance=importance + number,
        )
        for number, name in enumerate(names[:MAX_SETTINGS])
    ]


# -- rows ------------------------------------------------------------------------------------------


def _rows(comparison: Comparison, settings: ViewSettings) -> Iterator[TableRow]:
    """Yield the groups with their unfolded members, then the other runs."""
    if settings.grouped:
        for group in ordered_groups(comparison, settings):
            yield _group_row(comparison, settings, group)
            if group_key(group) in settings.opened:
                members = [comparison.by_id[run_id] for run_id in group.runs]
                for run in ordered_runs(comparison, settings, members):
                    yield _run_row(comparison, settings, run.id, indent="  ")
    grouped = comparison.grouped if settings.grouped else set()
    alone = [run for run in comparison.runs if run.id not in grouped]
    for run in ordered_runs(comparison, settings, alone):
        yield _run_row(comparison, settings, run.id)


def _run_row(
    comparison: Comparison, settings: ViewSettings, run_id: str, indent: str = ""
) -> TableRow:
    run = comparison.by_id[run_id]
    metric = chosen_metric(comparison, settings)
    summary = run.metrics.get(metric or "")
    is_known = comparison.direction(metric) is not None
    best, at = (NA, NA) if summary is None else best_texts(summary, is_known=is_known)
    pinned = " ◂ reference" if run_id == reference_id(comparison, settings) else ""
    hidden = run_id in settings.hidden
    name = clean_name(comparison.names[run_id])[:MAX_NAME]
    texts = {
        "best": best,
        "at": at,
        "final": NA if summary is None else logged_text(summary.final),
        "delta": _delta(comparison, settings, run_id),
        "time": formats.duration(run.time_s),
        "rate": formats.rate(run.samples_per_s, ""),
        "memory": formats.size(run.peak_memory_bytes),
        "goodput": formats.percent(run.time.goodput),
        **_setting_texts(comparison, [run_id]),
    }
    tone = Tone.DIM if hidden else Tone.PLAIN
    return TableRow(
        run_id,
        {
            "sign": _sign(comparison.colours[run_id], hidden),
            "run": (Cell(text=f"{indent}{name}", tone=tone), Cell(text=pinned, tone=Tone.ACCENT)),
            "state": (Cell(text=state_word(run.snapshot), tone=Tone.DIM),),
            **{key: (Cell(text=text, tone=tone),) for key, text in texts.items()},
        },
    )


def _group_row(comparison: Comparison, settings: ViewSettings, group: RunGroup) -> TableRow:
    key = group_key(group)
    hidden = key in settings.hidden
    fold = "▾" if key in settings.opened else "▸"
    metric = chosen_metric(comparison, settings) or ""
    known = comparison.direction(metric) is not None
    best = comparison.spread(group, metric, "best" if known else "lowest")
    final = comparison.spread(group, metric, "final")
    texts = {
        "run": f"{fold} {group.label} ({len(group.runs)} runs)"[: MAX_NAME + 10],
        "best": NA if best is None else formats.metric(best.mean),
        "band": _band_text(best),
        "final": NA if final is None else formats.metric(final.mean),
        **_setting_texts(comparison, group.runs),
    }
    tone = Tone.DIM if hidden else Tone.PLAIN
    sign = _sign(comparison.colours[group.runs[0]], hidden)
    return TableRow(
        key, {"sign": sign, **{k: (Cell(text=text, tone=tone),) for k, text in texts.items()}}
    )


def _setting_texts(comparison: Comparison, run_ids: Sequence[str]) -> dict[str, str]:
    """Return the value of each setting that differs; ``3 values`` if these runs have several."""
    texts = {}
    for name in comparison.differing_settings:
        values = {comparison.by_id[run_id].described.get(name, NA) for run_id in run_ids}
        text = f"{len(values)} values" if len(values) > 1 else clean_line(values.pop(), 200)
        texts[f"{SETTING}{name}"] = text[:MAX_VALUE]
    return texts


def _band_text(spread: Spread | None) -> str:
    """Return the band of the best values: ``[0.0187, 0.0190]``."""
    if spread is None or spread.runs < 2:
        return NA
    return f"[{formats.significant(spread.low)}, {formats.significant(spread.high)}]"


def _sign(colour: int, hidden: bool) -> Cells:
    if hidden:
        return (Cell(text="·", tone=Tone.DIM),)
    return (Cell(text=sign_of(colour), colour=colour),)


def _delta(comparison: Comparison, settings: ViewSettings, run_id: str) -> str:
    """Return the difference of the best value from that of the reference; ``+`` is higher."""
    metric, reference = chosen_metric(comparison, settings), reference_id(comparison, settings)
    if run_id == reference or metric is None:
        return ""
    own, other = (comparison.best_of(comparison.by_id[one], metric) for one in (run_id, reference))
    if own is None or other is None:
        return NA
    difference = own.value - other.value
    return f"{'+' if difference >= 0 else ''}{formats.significant(difference, 3)}"


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
    in_group = comparison.grouped if grouped else set()
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
