"""Which metrics a page of the screen of all metrics shows: filter, order, favourites. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.live.run_curves import is_gpu_curve
from ltui.app.presentation.metric_names import matching
from ltui.training.state.metric_name_patterns import (
    INCIDENTAL,
    LEARNING_RATE,
    THROUGHPUT,
    is_evaluation,
)
from ltui.training.state.run_snapshot import MetricValue

PREFERENCE = "all_metrics"
"""Key in ``preferences.json`` of a mapping from preset or script to ``MetricPages``."""
ORDERS = {
    "matters": "validation and loss first",
    "changed": "recently changed first",
    "name": "by name",
}
"""Orders of the metrics, and their names on the screen."""
MAX_COLUMNS, MAX_ROWS = 6, 8
FAVOURITE_SIGN = "★"


class MetricPages(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the user chose on the screen of all metrics. What differs from the default is
    remembered."""

    columns: int | None = None
    """Columns of charts; None means as many as the terminal has room for."""
    rows: int | None = None
    order: str = "matters"
    favourites: tuple[str, ...] = ()
    """Names that come first, in the order in which they were chosen."""
    filter: str = ""

    def next_order(self) -> MetricPages:
        orders = list(ORDERS)
        return replace(self, order=orders[(orders.index(self.order) + 1) % len(orders)])

    def toggle_favourite(self, name: str) -> MetricPages:
        others = tuple(one for one in self.favourites if one != name)
        chosen = others if name in self.favourites else (*others, name)
        return replace(self, favourites=chosen)

    def ordered(self, names: Sequence[str], changed_at: Mapping[str, float]) -> tuple[str, ...]:
        """Return the metrics of all pages. ``changed_at`` is the last step of each metric.

        Raise ``ValueError`` if the filter is a wrong expression.
        """
        shown = sorted(matching(names, self.filter))
        if self.order == "matters":
            shown.sort(key=_weight)
        if self.order == "changed":
            # The order by name stays among those that changed at the same step.
            shown.sort(key=lambda name: changed_at.get(name, -1.0), reverse=True)
        first = [name for name in self.favourites if name in shown]
        return (*first, *(name for name in shown if name not in first))


def _weight(name: str) -> int:
    """Return a low number for a metric that tells how good the model is.

    Validation comes first, then the loss, what else was logged, learning rates, what ltui measures.
    """
    measured = name == THROUGHPUT or name.startswith("step/") or is_gpu_curve(name)
    if measured or LEARNING_RATE.search(name) or INCIDENTAL.search(name):
        return 4 if measured else 3
    if is_evaluation(name):
        return 0
    return 1 if "loss" in name.lower() else 2


class MetricOrder:
    """The metrics of all pages in order.

    They are sorted again if there are new ones or the choice changed. Values alone do not sort them
    again, because charts must not change places while one reads them.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.problem = ""
        """What is wrong with the filter; the names stay as they were."""
        self._basis: tuple[object, ...] = ()

    def update(
        self, pages: MetricPages, names: tuple[str, ...], values: Mapping[str, MetricValue]
    ) -> None:
        """Sort the metrics of a frame. ``values`` are the newest ones."""
        basis = (names, pages.filter, pages.order, pages.favourites)
        if basis == self._basis:
            return
        self._basis = basis
        changed_at = {name: float(value.step) for name, value in values.items()}
        try:
            self.names = pages.ordered(names, changed_at)
            self.problem = ""
        except ValueError as error:
            self.problem = str(error)

    def invalidate(self) -> None:
        """Sort the metrics again with the next frame."""
        self._basis = ()


def pages_from_json(document: object) -> MetricPages:
    """Return the remembered choice. What is missing or damaged gets its default."""
    if not isinstance(document, dict):
        return MetricPages()
    columns, rows = document.get("columns"), document.get("rows")
    names, order, pattern = (document.get(key) for key in ("favourites", "order", "filter"))
    return MetricPages(
        columns=min(MAX_COLUMNS, columns) if isinstance(columns, int) and columns > 0 else None,
        rows=min(MAX_ROWS, rows) if isinstance(rows, int) and rows > 0 else None,
        order=order if isinstance(order, str) and order in ORDERS else "matters",
        favourites=tuple(map(str, names)) if isinstance(names, list) else (),
        filter=pattern if isinstance(pattern, str) else "",
    )


def shape_for(pages: MetricPages, width: int, height: int) -> tuple[int, int]:
    """Return the columns and rows of charts for a grid of ``width`` x ``height`` cells."""
    columns = pages.columns or max(1, min(4, (width + 20) // 50))
    rows = pages.rows or max(1, height // 10)
    # A chart that is lower than three lines shows nothing.
    return columns, min(rows, max(1, height // 3))


def shape_of_small_charts(width: int, height: int) -> tuple[int, int]:
    """Return the columns and rows of small charts for a panel of ``width`` x ``height`` cells."""
    return max(1, min(4, width // 36)), max(1, height // 6)
