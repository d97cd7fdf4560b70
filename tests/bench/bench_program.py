"""What ltui costs a step of a program without Lightning, a value that it logs, and its import.

A step is measured in CPU time of its thread, first without ltui's hooks, then with them, and so is
a call of ``SummaryWriter.add_scalar``. The fastest tenth of each is compared, because other
programs disturb it least. What ``import torch`` spends in ltui's entry point, with the import of
that, is measured within fresh processes, because whole imports of torch differ by more.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.rank.program import attach, program_rank
from tests.bench.row import Row, row

BLOCK, ROUNDS = 100, 40
BOUND_US, BOUND_IMPORT_MS = 10.0, 20.0
_IMPORT = """
import time
began = time.thread_time()
from ltui.training.rank.program import attach
enter = attach.attach
def enter_in_time():
    began = time.thread_time()
    enter()
    print(time.thread_time() - began + imported)
attach.attach = enter_in_time
imported = time.thread_time() - began
import torch
"""


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        bare, watched, written, recorded = _steps_us(Path(folder))
        entered = _entry_point_ms(Path(folder))
    return [
        row("a step of SGD without ltui", bare, "us"),
        row("  ltui: the row of the step, and the boundary behind it", watched - bare, "us",
            BOUND_US),
        row("SummaryWriter.add_scalar without ltui", written, "us"),
        row("  ltui: the record of the metric", recorded - written, "us", BOUND_US),
        row("import torch: ltui's entry point", entered, "ms", BOUND_IMPORT_MS),
    ]  # fmt: skip


def _steps_us(folder: Path) -> tuple[float, float, float, float]:
    """Return the microseconds of a step and of a logged value, each without and with ltui."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(2, 8)).sum().backward()
    data = torch.utils.data.TensorDataset(torch.randn(2 * BLOCK, 8))
    environment = {"LTUI_RUN_DIR": str(folder), "LTUI_RUN_ID": "bench", "LTUI_ATTEMPT": "1"}
    bare, written = _fastest_tenth_us(optimizer, data), _log_us(optimizer, folder)
    os.environ.update(environment)
    attach.attach()
    optimizer.step()
    watched, recorded = _fastest_tenth_us(optimizer, data), _log_us(optimizer, folder)
    program_rank.stop_watching()
    for name in environment:
        os.environ.pop(name)
    return bare, watched, written, recorded


def _log_us(optimizer: torch.optim.Optimizer, folder: Path) -> float:
    """Return the microseconds of the fastest tenth of the calls that log a value."""
    times = []
    with SummaryWriter(str(folder)) as writer:
        for step in range(BLOCK * ROUNDS):
            # More than a thousand values of one step would be combined, which costs more.
            if step % BLOCK == 0:
                optimizer.step()
            began = time.thread_time_ns()
            writer.add_scalar("loss", 1.0 / (step + 1), step)
            times.append((time.thread_time_ns() - began) / 1e3)
    return statistics.quantiles(times, n=10)[0]


def _fastest_tenth_us(optimizer: torch.optim.Optimizer, data: Any) -> float:
    times = []
    for _ in range(ROUNDS):
        for _batch in torch.utils.data.DataLoader(data, batch_size=2):
            began = time.thread_time_ns()
            optimizer.step()
            times.append((time.thread_time_ns() - began) / 1e3)
    return statistics.quantiles(times, n=10)[0]


def _entry_point_ms(folder: Path) -> float:
    """Return the fastest of some calls of ltui's entry point by ``import torch``, in a run."""
    run = {"LTUI_RUN_DIR": str(folder), "LTUI_RUN_ID": "bench", "LTUI_ATTEMPT": "1"}
    environment = {**os.environ, **run, "PYTHONPATH": str(install_rank_package(folder))}
    printed = [
        subprocess.run(
            [sys.executable, "-c", _IMPORT], env=environment, capture_output=True, check=True
        ).stdout
        for _ in range(5)
    ]
    return min(float(text) for text in printed) * 1e3
