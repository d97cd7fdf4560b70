"""The list of thousands of runs: how long it takes to open, and its memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ltui.app.panels.runs_table import RunsTable
from ltui.app.runs.run_list import RunList
from ltui.app.textual_app import LtuiApp
from ltui.training.lifecycle.run_status import resolve_snapshot
from tests.bench.row import Row, row
from tests.stored_runs import stored_run

RUNS = 5_000
METRICS = 12
SETTINGS = 60
PAGES = 50
SLOW_FIELDS = ("size", "config.setting.7")
"""Fields whose values are kept in the index, because they take long to read."""
_OPEN = """
import sys, time
from pathlib import Path
from ltui.app.runs.run_list import RunList
from ltui.app.runs.filter_runs import run_filter
from ltui.app.runs.run_rows import sorted_runs
began = time.process_time()
runs = RunList(Path(sys.argv[1]), None)
shown = runs.poll()
assert len(shown) == int(sys.argv[2])
opened = time.process_time()
sorted_runs(filter(run_filter("run m/3<9", 0.0), shown), "m/3", reverse=True)
filtered = time.process_time()
before = time.process_time()
runs.complete(shown, sys.argv[3:])
completed = time.process_time() - before
# Not by getrusage, which counts the memory of the process that started this one, too.
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(opened - began, filtered - opened, int(peak.split()[1]) / 1e3, completed)
"""


async def _seconds_of_a_page(home: Path) -> float:
    """Return the processor time to show the next page of the list on the home screen."""
    app = LtuiApp(home)
    async with app.run_test(size=(160, 50)) as pilot:
        while not (tables := app.screen.query(RunsTable)) or len(tables.first().rows) < RUNS:
            await pilot.pause(0.1)
        await pilot.press("3")
        began = time.process_time()
        for _ in range(PAGES):
            await pilot.press("pagedown")
        return (time.process_time() - began) / PAGES


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        first = stored_run(
            home,
            "run-0000-0000",
            metrics={f"m/{i}": float(i) for i in range(METRICS)},
            config={"setting": {str(i): i for i in range(SETTINGS)}},
        )
        for number in range(1, RUNS):
            path = home / "runs" / f"run-{number:04d}-{number:04x}"
            path.mkdir()
            os.link(first.spec_path, path / "spec.yaml")
            os.link(first.db_path, path / "run.db")
        indexed = RunList(home, resolve_snapshot)
        while len(indexed._ended) < RUNS:  # Runs are indexed when their files have settled.
            runs = indexed.poll()
        indexed.complete(runs, SLOW_FIELDS)
        indexed.close()
        page_s = asyncio.run(_seconds_of_a_page(home))
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, str(home), str(RUNS), *SLOW_FIELDS],
            capture_output=True,
            text=True,
            check=True,
        )
    opened, filtered, memory, completed = map(float, done.stdout.split())
    return [
        row(f"list of {RUNS} runs opened from the index (processor time)", opened, "s", 0.5),
        row(f"list of {RUNS} runs filtered and sorted", filtered, "s", 0.1),
        row(f"disk use and settings of {RUNS} runs from the index", completed, "s", 0.5),
        row(f"next page of the list of {RUNS} runs (processor time)", page_s, "s", 0.1),
        row(f"memory of the list of {RUNS} runs", memory, "MB", 150),
    ]
