"""The order of runs and groups in the tables of a comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ltui.app.compare.compared_run import ComparedRun
from ltui.app.compare.comparison import Comparison
from ltui.app.compare.run_groups import RunGroup
from ltui.app.compare.view_settings import ViewSettings, chosen_metric
from ltui.app.runs.run_settings import number_of

SETTING = "setting "
"""Begin of the key of a column that has the values of a setting."""
_BEST_FIRST = ("best", "delta")

Value = float | str | None
_Item = TypeVar("_Item")


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
    }
    return values.get(order)


def _sort_key(value: Value) -> tuple[int, float, str]:
    """Return a key that puts numbers before other texts."""
    number = number_of(value)
    return (1, 0.0, str(value)) if number is None else (0, number, "")
