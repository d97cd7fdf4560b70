"""Whole runs, timed from outside: launch, stop, a dead rank, a stalled rank, what the supervisor costs."""

from __future__ import annotations

import json
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

from ltui.training.store.home import RunDir, find_run
from ltui.training.supervise.client import ControlClient

SCRIPT = Path(__file__).with_name("first_step.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT))


def _ltui(home: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "ltui.app.cli", *arguments],
        env={**os.environ, "LTUI_HOME": str(home), "FIRST_STEP_FILE": str(home / "first")},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )


def _until(wanted: Callable[[], Any], seconds: float = 60.0, every: float = 0.02) -> float:
    """Seconds until ``wanted`` holds."""
    began = time.monotonic()
    while not wanted():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{wanted} did not come true in {seconds} s")
        time.sleep(every)
    return time.monotonic() - began


@contextmanager
def _run(pause_s: float = 0.02) -> Iterator[tuple[Path, RunDir, ControlClient]]:
    """A two-rank run under way, at least ten steps in."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        _ltui(home, "exec", "--detach", "--", *TORCHRUN, "100000", str(pause_s))
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


def _first_step(command: Callable[[Path], list[str]]) -> float:
    """Seconds from starting ``command`` to the first step that its rank 0 makes."""
    with tempfile.TemporaryDirectory() as folder:
        home, mark = Path(folder), Path(folder) / "first"
        environment = {**os.environ, "LTUI_HOME": folder, "FIRST_STEP_FILE": str(mark)}
        began = time.time()
        process = subprocess.Popen(
            command(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        process.wait(120)
        return float(mark.read_text()) - began


def _launch() -> list[dict[str, Any]]:
    bare, ours = [], []
    for _ in range(4):
        bare.append(_first_step(lambda _: [*TORCHRUN, "1", "0"]))
        ours.append(
            _first_step(
                lambda _: [sys.executable, "-m", "ltui.app.cli", "exec", "--", *TORCHRUN, "1", "0"]
            )
        )
    plain, watched = statistics.median(bare), statistics.median(ours)
    return [
        {"what": "first step, bare torchrun (median of 4)", "value": plain, "unit": "s"},
        {"what": "first step, ltui exec torchrun", "value": watched, "unit": "s"},
        {
            "what": "what ltui adds to the launch",
            "value": watched - plain,
            "unit": "s",
            "bound": 0.5,
        },
    ]


def _supervisor_cost(client: ControlClient) -> list[dict[str, Any]]:
    supervisor = psutil.Process(client.request({"cmd": "ping"})["pid"])
    supervisor.cpu_percent()
    time.sleep(10)
    cpu, memory = supervisor.cpu_percent(), supervisor.memory_info().rss / 1e6
    return [
        {
            "what": "supervisor CPU, 2 ranks, 50 steps/s",
            "value": cpu,
            "unit": "% of a core",
            "bound": 2,
        },
        {"what": "supervisor resident memory", "value": memory, "unit": "MB", "bound": 100},
    ]


def _stop(home: Path, run: RunDir, client: ControlClient) -> dict[str, Any]:
    began = time.monotonic()
    client.request({"cmd": "stop", "timeout_s": 30})
    _until(lambda: any(run.checkpoints_dir.glob("*stop*.json")))
    return {
        "what": "stop: command to complete checkpoint",
        "value": time.monotonic() - began,
        "unit": "s",
        "bound": 3,
    }


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
    with _run() as (home, run, client):
        rows += _supervisor_cost(client)
        rows.append(_stop(home, run, client))
    rows.append(
        {
            "what": "a dead rank is shown",
            "value": _fault(signal.SIGKILL, "dead"),
            "unit": "s",
            "bound": 1,
        }
    )
    rows.append(
        {
            "what": "a stopped rank is named",
            "value": _fault(signal.SIGSTOP, "stalled"),
            "unit": "s",
            "bound": 10,
        }
    )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
