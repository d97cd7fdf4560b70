"""Comparing twenty runs of 100,000 steps: the time to read and to compare them, and the memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ltui.app.compare.comparison import Comparison
from ltui.app.compare.comparison_report import report_lines
from ltui.app.compare.read_run import read_runs
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.store.run_directory import RunDir
from tests.bench.row import row
from tests.compare.stored_runs import accuracies, config, losses, write_run

RUNS, STEPS, ROUNDS = 20, 100_000, 5
COMMAND = """
import json, re, sys
from pathlib import Path
from ltui.app.cli import main
code = main(["compare", "bench-*"])
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.stderr.write(json.dumps({"code": code, "mb": peak_kib * 1024 / 1e6}))
"""
"""Not ``ru_maxrss``: that is at least the memory of the process which started this one."""


def measure() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run_dirs = [_write(home, number) for number in range(RUNS)]
        taken = [_compare(run_dirs) for _ in range(ROUNDS)]
        whole, megabytes = zip(*(_command(home) for _ in range(ROUNDS)), strict=True)
    runs = f"{RUNS} runs of {STEPS:,} steps"
    return [
        row(f"compare {runs}: read, align, group, print", statistics.median(taken), "s", 0.5),
        row(f"ltui compare, {runs}, with the start of Python", statistics.median(whole), "s"),
        row(f"memory of ltui compare, {runs}", max(megabytes), "MB", 150),
    ]


def _write(home: Path, number: int) -> RunDir:
    lr, seed = (0.1, 0.3)[number % 2], number // 2
    values = losses(STEPS, lr=lr, seed=number)
    return write_run(
        home,
        f"bench-{number:04d}",
        values,
        configuration=config(lr=lr, seed=seed),
        metrics={"val/acc": accuracies(values), "val/loss": dict(enumerate(values[::100], 1))},
    )


def _compare(run_dirs: list[RunDir]) -> float:
    began = time.perf_counter()
    read = read_runs(run_dirs, (), current_snapshot)
    comparison = Comparison(runs=read.runs, metrics=read.metrics, band="ci95")
    for group in comparison.groups:
        for metric in read.metrics:
            assert comparison.group_curve(group, metric) is not None
    assert len(report_lines(comparison, 160)) > RUNS
    return time.perf_counter() - began


def _command(home: Path) -> tuple[float, float]:
    """Return the seconds and the megabytes of the command."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env={**os.environ, "LTUI_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - began
    measured = json.loads(done.stderr)
    assert measured["code"] == 0, done.stdout
    return seconds, float(measured["mb"])
