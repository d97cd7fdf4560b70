"""The columns and the order of the list of runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ltui.app.runs.run_fields import ALIASES
from ltui.app.runs.run_rows import DEFAULT_COLUMNS

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
    end = len(columns)
    last = end if name in LAST_COLUMNS else _first_of(LAST_COLUMNS, columns)
    return (*columns[:last], name, *columns[last:])


def _first_of(names: frozenset[str], columns: Sequence[str]) -> int:
    return next((n for n, column in enumerate(columns) if column in names), len(columns))


def layout_of(columns: object, order: object) -> ListLayout:
    """Return the layout of the settings of these names; the defaults for anything else."""
    names = columns if isinstance(columns, list) else DEFAULT_COLUMNS
    known = (ALIASES.get(name, name) for name in names if isinstance(name, str) and name)
    return ListLayout(
        tuple(dict.fromkeys(known)),
        order if isinstance(order, str) and order.removeprefix("-") else "",
    )
