"""The columns and the order of the list of runs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ltui.app.runs.run_rows import DEFAULT_COLUMNS


class ListLayout(NamedTuple):
    """The columns of the list of runs and its order, as ``ltui runs`` names them."""

    columns: tuple[str, ...]
    order: str


DEFAULT_LAYOUT = ListLayout(DEFAULT_COLUMNS, "")


def layout_of(columns: object, order: object) -> ListLayout:
    """Return the layout of the settings of these names; the defaults for anything else."""
    names = columns if isinstance(columns, list) else DEFAULT_COLUMNS
    return ListLayout(
        tuple(dict.fromkeys(name for name in names if isinstance(name, str) and name)),
        order if isinstance(order, str) and order.removeprefix("-") else "",
    )
