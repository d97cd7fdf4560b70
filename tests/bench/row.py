"""One measured number of ``make bench``."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def row(what: str, value: float | None, unit: str, bound: float | None = None) -> Row:
    """Return the row of a number. ``bound``: what was promised; None if it is only compared."""
    return {"what": what, "value": value, "unit": unit, "bound": bound}
