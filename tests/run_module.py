"""Run a module of the tests as a program in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_module(
    module: str,
    arguments: Sequence[object],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Return the exit code. Output goes to ``log``.

    Without ``environment``, no GPU and no setting of ltui is passed on. Every process of the group
    is killed if the module does not end within ``limit_s`` seconds.
    """
    if environment is None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LTUI_")}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
