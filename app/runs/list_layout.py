"""The columns and the order of the list of runs. Pure.

An order is written as for ``ltui runs --sort``: the name of what the runs are sorted by, a field, a
metric or a setting. After ``-`` the highest value is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import ALIASES, FIELDS, Kind, kind_of, value_of
from ltui.app.runs.run_rows import DEFAULT_COLUMNS
from ltui.training.problem import ProblemError
from ltui.training.state.metric_name_patterns import LOWER_IS_BETTER

LAST_COLUMNS = frozenset({"program", "tag", "created", "detail"})
"""Columns that stay to the right of those that a person adds."""


class ListLayout(NamedTuple):
    """The columns of the list of runs and its order, as ``ltui runs`` names them."""

    columns: tuple[str, ...]
    order: str

    def with_column(self, name: str) -> ListLayout:
        """Return the layout with one more column, where it is seen without scrolling."""
        return self._replace(columns=with_column(self.columns, name))


DEFAULT_LAYOUT = ListLayout(DEFAULT_COLUMNS, "")


def with_column(columns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the columns with one more, to the left of those that matter least."""
    last = len(columns)
    if name not in LAST_COLUMNS:
        last = next((n for n, column in enumerate(columns) if column in LAST_COLUMNS), last)
    return (*columns[:last], name, *columns[last:])


def layout_of(columns: object, order: object) -> ListLayout:
    """Return the layout of the settings of these names; the defaults for anything else."""
    names = columns if isinstance(columns, list) else DEFAULT_COLUMNS
    known = (ALIASES.get(name, name) for name in names if isinstance(name, str) and name)
    return ListLayout(
        tuple(dict.fromkeys(known)),
        order if isinstance(order, str) and order.removeprefix("-") else "",
    )


HEADLINE = "metric"
"""The field with the metric that represents each run. Its order is the best value first."""
_DIRECTIONS = {
    Kind.TEXT: ("A to Z", "Z to A"),
    Kind.TIME: ("oldest first", "newest first"),
    Kind.DURATION: ("shortest first", "longest first"),
    Kind.SIZE: ("smallest first", "largest first"),
    Kind.FLAG: ("without it first", "with it first"),
}


def sort_key(text: str) -> tuple[str, bool]:
    """Return the field of ``--sort`` and whether it is reversed: ``-created`` is."""
    name = text.removeprefix("-")
    if not name:
        raise ProblemError.of(
            where=f"--sort {text}",
            what="the name of a field or metric is missing.",
            remedy="Try --sort=-created, --sort=val/loss or --sort=config.lr.",
        )
    return name, text.startswith("-")


def sorted_runs(entries: Iterable[RunEntry], name: str, *, reverse: bool) -> list[RunEntry]:
    """Return the runs by a field, the lowest value first unless ``reverse`` is set.

    Runs without a value come last, and ties keep their places. Of a setting, numbers come before
    texts.
    """
    key_of: Callable[[RunEntry], Any]
    key_of = _metric_key if name == HEADLINE else partial(_value_key, name)
    keyed = [(key_of(entry), entry) for entry in entries]
    with_value = sorted((k for k in keyed if k[0] is not None), key=itemgetter(0), reverse=reverse)
    return [entry for _, entry in with_value] + [entry for key, entry in keyed if key is None]


def _value_key(name: str, entry: RunEntry) -> tuple[float, str] | None:
    value = value_of(entry, name)
    key = ", ".join(value) if isinstance(value, tuple) else value
    if key is None or key == "" or (isinstance(key, float) and math.isnan(key)):
        return None
    return (math.inf, key.lower()) if isinstance(key, str) else (key, "")


def _metric_key(entry: RunEntry) -> tuple[str, float] | None:
    """Return a key by the metric that represents a run, with the best value first."""
    run = entry.summary
    if run is None or run.metric_value is None or not math.isfinite(run.metric_value):
        return None
    return run.metric, run.metric_value if run.lower_is_better else -run.metric_value


def first_order(name: str) -> str:
    """Return the usual order by a field: texts from A, losses from the lowest, others reversed."""
    is_metric = name not in FIELDS and kind_of(name) is Kind.NUMBER
    ascending = kind_of(name) in (Kind.TEXT, Kind.SETTING) or name == HEADLINE
    if is_metric and LOWER_IS_BETTER.search(name):
        ascending = True
    return name if ascending else f"-{name}"


def next_order(order: str, columns: Sequence[str]) -> str:
    """Return the order by the column after that of ``order``, or none after the last one."""
    names = list(dict.fromkeys(("name", *columns)))
    now = order.removeprefix("-")
    place = names.index(now) + 1 if now in names else 0
    if order and place == len(names):
        return ""
    return first_order(names[place])


def reversed_order(order: str) -> str:
    """Return the opposite order; of the list's own order, the oldest run first."""
    if not order:
        return "created"
    return order[1:] if order.startswith("-") else f"-{order}"


def order_text(order: str) -> str:
    """Return an order in words, such as ``created, newest first``."""
    name, reverse = sort_key(order)
    if name == HEADLINE:
        directions = ("best first", "worst first")
    else:
        directions = _DIRECTIONS.get(kind_of(name), ("lowest first", "highest first"))
    return f"{name}, {directions[reverse]}"
