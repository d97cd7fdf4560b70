"""``make bench``: every promised number as measured now, each beside its bound.

Each ``bench_*.py`` here has ``measure() -> list[Row]``; a row is a dict with ``what``, ``value``,
``unit`` and ``bound`` (None where there is none, as for a peer that is only compared).
``python -m tests.bench NAME...`` runs some of them.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    console = Console()
    found = sorted(path.stem for path in HERE.glob("bench_*.py"))
    chosen = [f for f in found if not names or f.removeprefix("bench_") in names]
    if not chosen:
        names = [f.removeprefix("bench_") for f in found]
        console.print(f"no such benchmark; there are: {', '.join(names)}", markup=False)
        return 2
    console.print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    over = 0
    for name in chosen:
        table = Table(title=name.removeprefix("bench_"), title_justify="left")
        table.add_column("what")
        for column in ("measured", "bound", ""):
            table.add_column(column, justify="right")
        began = time.monotonic()
        for row in importlib.import_module(f"tests.bench.{name}").measure():
            over += _add(table, row)
        console.print(table)
        console.print(f"took {time.monotonic() - began:.0f} s\n")
    console.print(f"{over} over their bound" if over else "all within their bounds")
    return 1 if over else 0


def _add(table: Table, row: dict[str, Any]) -> bool:
    value, bound = row["value"], row.get("bound")
    missing = value is None
    over = bound is not None and not missing and value > bound
    table.add_row(
        row["what"],
        "n/a" if missing else f"{value:.3g} {row['unit']}",
        "" if bound is None else f"{bound:g} {row['unit']}",
        "over" if over else "" if bound is None or missing else "ok",
    )
    return over


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
