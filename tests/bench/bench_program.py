"""What ltui costs a step of a program without Lightning, and its ``import torch``.

A step is measured in CPU time of its thread, first without ltui's hooks, then with them. The
fastest tenth of each is compared, because other programs disturb it least. The
import is measured by calls of ltui's entry point in fresh processes, less a process that only
imports torch.
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

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.rank.program import program_rank
from tests.bench.row import Row, row

BLOCK, ROUNDS = 100, 40
BOUND_US, BOUND_IMPORT_MS = 10.0, 20.0
_IMPORT = """
import time
began = time.thread_time()
import torch
print(time.thread_time() - began)
"""


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        bare, watched = _steps_us(Path(folder))
        imports = [_import_ms(Path(folder), watched=watched) for watched in (False, True)]
    return [
        row("a step of SGD without ltui", bare, "us"),
        row("  ltui: the row of the step, and the boundary behind it", watched - bare, "us",
            BOUND_US),
        row("import torch without ltui", imports[0], "ms"),
        row("  ltui's entry point", imports[1] - imports[0], "ms", BOUND_IMPORT_MS),
    ]  # fmt: skip


def _steps_us(folder: Path) -> tuple[float, float]:
    """Return the microseconds of a step without and with ltui."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(2, 8)).sum().backward()
    data = torch.utils.data.TensorDataset(torch.randn(2 * BLOCK, 8))
    environment = {"LTUI_RUN_DIR": str(folder), "LTUI_RUN_ID": "bench", "LTUI_ATTEMPT": "1"}
    bare = _fastest_tenth_us(optimizer, data)
    os.environ.update(environment)
    program_rank.start(optimizer)
    watched = _fastest_tenth_us(optimizer, data)
    program_rank.stop_watching()
    for name in environment:
        os.environ.pop(name)
    return bare, watched


def _fastest_tenth_us(optimizer: torch.optim.Optimizer, data: Any) -> float:
    times = []
    for _ in range(ROUNDS):
        for _batch in torch.utils.data.DataLoader(data, batch_size=2):
            began = time.thread_time_ns()
            optimizer.step()
            times.append((time.thread_time_ns() - began) / 1e3)
    return statistics.quantiles(times, n=10)[0]


def _import_ms(folder: Path, *, watched: bool) -> float:
    """Return the fastest of some imports of torch, in a run or outside of one."""
    environment = {**os.environ, "PYTHONPATH": str(install_rank_package(folder))}
    if watched:
        environment |= {"LTUI_RUN_DIR": str(folder), "LTUI_RUN_ID": "bench", "LTUI_ATTEMPT": "1"}
    else:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    printed = [
        subprocess.run(
            [sys.executable, "-c", _IMPORT], env=environment, capture_output=True, check=True
        ).stdout
        for _ in range(5)
    ]
    return min(float(text) for text in printed) * 1e3
