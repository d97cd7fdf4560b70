"""One measured number of ``make bench``."""

from __future__ import annotations

import os
from typing import Any

import psutil

Row = dict[str, Any]

# As for users, whose modules were compiled at their first start. Otherwise each process that is
# measured would compile all its modules of ltui.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def row(what: str, value: float | None, unit: str, bound: float | None = None) -> Row:
    """Return the row of a number. ``bound``: what was promised; None if it is only compared."""
    return {"what": what, "value": value, "unit": unit, "bound": bound}


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)
