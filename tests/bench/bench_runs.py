"""The list of thousands of runs: how long it takes to open, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.run_status import resolve_snapshot
from tests.bench.row import Row, row
from tests.stored_runs import stored_run

RUNS = 5_000
METRICS = 12
SETTINGS = 60
SLOW_FIELDS = ("size", "config.setting.7")
"""Fields whose values are kept in the index, because they take long to read."""
_OPEN = """
import sys, time
from pathlib import Path
from ltui.app.runs.run_list import RunList
from ltui.app.runs.filter_runs import run_filter
from ltui.app.runs.sort_runs import sorted_runs
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
        row(f"memory of the list of {RUNS} runs", memory, "MB", 150),
    ]
