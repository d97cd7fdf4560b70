"""The columns and the order of the list of runs, as they are remembered. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from ltui.app.runs.run_rows import DEFAULT_COLUMNS


class ListLayout(NamedTuple):
    """The columns of the list of runs and its order, as ``ltui runs`` names them."""

    columns: tuple[str, ...]
    order: str

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"columns": list(self.columns), "sort": self.order}


DEFAULT_LAYOUT = ListLayout(DEFAULT_COLUMNS, "")


def layout_from_document(document: object) -> ListLayout:
    """Return the remembered layout; the default one for anything else."""
    if not isinstance(document, dict):
        return DEFAULT_LAYOUT
    columns, order = document.get("columns"), document.get("sort")
    if not isinstance(columns, list):
        columns = DEFAULT_COLUMNS
    return ListLayout(
        tuple(dict.fromkeys(name for name in columns if isinstance(name, str) and name)),
        order if isinstance(order, str) and order.removeprefix("-") else "",
    )
