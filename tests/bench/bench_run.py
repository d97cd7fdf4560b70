"""Whole runs, timed from outside: launch, stop, dead and stalled ranks, the supervisor's cost."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir
from tests.bench.row import row
from tests.ltui_command import LTUI
from tests.waiting import wait_for

SCRIPT = Path(__file__).with_name("first_step.py")
_PAIRS = 7
"""Starts of each kind, in turn.

A single start varies by more than a second with the load of the machine's host, in both kinds. That
only ever makes a start slower, so the fastest of each kind are compared, as ``timeit`` does.
"""


def torchrun(ranks: int) -> tuple[str, ...]:
    """Bare torchrun. ``--standalone`` picks a free port, so that two starts cannot collide."""
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*agent, f"--nproc-per-node={ranks}", str(SCRIPT))


def _ltui(home: Path, *arguments: str) -> None:
    subprocess.run(
        [*LTUI, *arguments],
        env={**os.environ, "LTUI_HOME": str(home), "FIRST_STEP_FILE": str(home / "first")},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )


def _until(wanted: Callable[[], object], every: float = 0.02) -> float:
    """Seconds until ``wanted`` holds."""
    began = time.monotonic()
    wait_for(wanted, seconds=60, period_s=every)
    return time.monotonic() - began


@contextmanager
def _run(pause_s: float = 0.02) -> Iterator[tuple[Path, RunDir, ControlClient]]:
    """A two-rank run under way, at least ten steps in."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _ltui(home, "exec", "--detach", "--", *torchrun(2), "100000", str(pause_s))
        run = find_run(home, "last")
        client = ControlClient(run)
        _until(lambda: _steps(client) >= 10)
        try:
            yield home, run, client
        finally:
            _ltui(home, "stop", "last", "--kill")


def _status(client: ControlClient) -> dict[str, Any]:
    answer = client.request({"cmd": "status"})
    snapshot: dict[str, Any] = answer["snapshot"]
    return snapshot


def _steps(client: ControlClient) -> int:
    try:
        ranks = _status(client)["ranks"]
    except (OSError, ValueError, KeyError):
        return -1
    return min((r["global_step"] or 0 for r in ranks), default=-1)


def _first_step(home: Path, command: list[str]) -> float:
    """Seconds from starting ``command`` to the first step that its rank 0 makes."""
    mark = home / "first"
    mark.unlink(missing_ok=True)
    began = time.time()
    subprocess.run(
        command,
        env={**os.environ, "LTUI_HOME": str(home), "FIRST_STEP_FILE": str(mark)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    return float(mark.read_text()) - began


def _launch() -> list[dict[str, Any]]:
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _first_step(home, [*LTUI, "exec", "--", *torchrun(2), "1", "0"])
        for _ in range(_PAIRS):
            bare.append(_first_step(home, [*torchrun(2), "1", "0"]))
            ours.append(_first_step(home, [*LTUI, "exec", "--", *torchrun(2), "1", "0"]))
    plain, watched = min(bare), min(ours)
    return [
        row(f"first step, bare torchrun (fastest of {_PAIRS})", plain, "s"),
        row("first step, ltui exec torchrun", watched, "s"),
        row("the same, median", statistics.median(ours), "s"),
        row("bare torchrun, median", statistics.median(bare), "s"),
        row("what ltui adds to the launch", watched - plain, "s", 0.5),
    ]


def _supervisor_cost(client: ControlClient) -> list[dict[str, Any]]:
    supervisor = psutil.Process(client.request({"cmd": "ping"})["pid"])
    supervisor.cpu_percent()
    time.sleep(10)
    cpu, memory = supervisor.cpu_percent(), supervisor.memory_info().rss / 1e6
    return [
        row("supervisor CPU, 2 ranks, 50 steps/s", cpu, "% of a core", 2),
        row("supervisor resident memory", memory, "MB", 100),
    ]


def _stop(run: RunDir, client: ControlClient) -> dict[str, Any]:
    began = time.monotonic()
    client.request({"cmd": "stop", "timeout_s": 30})
    _until(lambda: any(run.checkpoints_dir.glob("*stop*.json")))
    return row("stop: command to complete checkpoint", time.monotonic() - began, "s", 3)


def _fault(send: signal.Signals, wanted: str) -> float:
    """Seconds from a signal to rank 1 until the supervisor's answer calls it ``wanted``."""
    with _run() as (_, _run_dir, client):
        victim = _status(client)["ranks"][1]["pid"]
        os.kill(victim, send)
        try:
            return _until(lambda: _status(client)["ranks"][1]["state"] == wanted, every=0.05)
        finally:
            if send == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)


def measure() -> list[dict[str, Any]]:
    rows = _launch()
    with _run() as (_, run, client):
        rows += _supervisor_cost(client)
        rows.append(_stop(run, client))
    rows.append(row("a dead rank is shown", _fault(signal.SIGKILL, "dead"), "s", 1))
    rows.append(row("a stopped rank is named", _fault(signal.SIGSTOP, "stalled"), "s", 10))
    return rows
