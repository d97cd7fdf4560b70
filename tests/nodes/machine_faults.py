"""A run of the fault zoo's script on two machines, into which faults of machines are injected.

    python -m tests.nodes.machine_faults NAME...

prints the seconds from each fault to its verdict, and with ``quiet`` the verdicts of a healthy run
of five minutes in which the clocks differ. Rank 0 runs on machine-0, rank 1 on machine-1.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.training.store.database_schema import StoreError
from ltui.training.store.run_directory import RunDir
from tests.faults.fault import SCRIPTS
from tests.nodes.two_machines import Machines, ltui_on, open_machines
from tests.waiting import wait_for

START_S = 180.0
"""Seconds that a loaded machine may need until both ranks train."""
VERDICT_S = 60.0
"""Seconds after which a verdict is given up."""


@dataclass
class TwoNodeRun:
    """A run on two machines. All files are visible here, because only the network is divided."""

    machines: Machines
    run_dir: RunDir

    def snapshot(self) -> RunSnapshot | None:
        """Return the current snapshot, or None if it cannot be read now."""
        try:
            return resolve_snapshot(self.run_dir)
        except (StoreError, ProblemError, OSError):
            return None

    def until(
        self, wanted: Callable[[RunSnapshot], object], seconds: float = START_S
    ) -> RunSnapshot:
        """Return the first snapshot that is ``wanted``."""

        def read() -> RunSnapshot | None:
            seen = self.snapshot()
            return seen if seen is not None and wanted(seen) else None

        try:
            seen = wait_for(read, seconds=seconds, period_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{self.snapshot()}\n{self.logs()}") from error
        assert seen is not None
        return seen

    def until_training(self, step: int = 20) -> RunSnapshot:
        return self.until(
            lambda s: len(s.ranks) == 2 and all((r.global_step or 0) >= step for r in s.ranks)
        )

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        seen = self.until(lambda s: any(r.rank == number and r.pid for r in s.ranks))
        return psutil.Process(next(r.pid or 0 for r in seen.ranks if r.rank == number))

    def agents(self) -> list[psutil.Process]:
        """Return the processes of the agent on machine-1, without those that it started."""
        return [p for p in self.machines[1].processes() if _is_agent(p)]

    def logs(self) -> str:
        logs = [
            *sorted(self.machines[0].home.glob("runs/*/logs/*/*.log")),
            *sorted(self.machines[0].home.glob("runs/*/*.log")),
            *sorted(self.machines[1].home.glob("nodes/*/*.log")),
        ]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-2500:]}" for p in logs)


def _is_agent(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "--report-to" in process.cmdline()
    return False


def _is_shim(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("/supervise/shim.py") for word in process.cmdline())
    return False


@contextlib.contextmanager
def started(
    folder: Path, fault: str = "none", *, batches: int = 100_000, **options: Any
) -> Iterator[TwoNodeRun]:
    """Start the script on both machines, and end it afterwards."""
    environment = {
        "ZOO_FAULT": fault,
        "ZOO_FOLDER": str(folder),
        "ZOO_STEP": "60",
        "ZOO_BATCHES": str(batches),
        "ZOO_PACE_S": "0.05",
    }
    with open_machines(folder, **options) as machines:
        head, other = machines
        key = str(folder / "node.key")
        done = ltui_on(
            head, "run", str(SCRIPTS / "zoo.yaml"), "--detach", "--set", "trainer.devices=1",
            "--set", "trainer.num_nodes=2", "--address", head.address, "--key-file", key,
            env=environment, code=0,
        )  # fmt: skip
        place = re.search(r"ltui join (\S+)", done.stdout + done.stderr)
        assert place is not None, done.stdout + done.stderr
        (path,) = (head.home / "runs").iterdir()
        run = TwoNodeRun(machines, RunDir(path))
        joined = ltui_on(other, "join", place[1], "--key-file", key, "--detach", env=environment)
        assert joined.returncode == 0, f"{joined.stdout}{joined.stderr}{run.logs()}"
        try:
            yield run
        finally:
            with contextlib.suppress(AssertionError):
                machines.restore(other)
            ltui_on(head, "stop", "last", "--kill")


def first_verdict(
    run: TwoNodeRun, kind: str, since_s: float, level: str | None = None
) -> tuple[Verdict, float]:
    """Return the first verdict of a kind, and the seconds since ``since_s``."""

    def matches(snapshot: RunSnapshot) -> list[Verdict]:
        return [
            v for v in snapshot.verdicts if v.kind == kind and (level is None or v.level == level)
        ]

    seen = run.until(matches, VERDICT_S)
    return matches(seen)[0], time.monotonic() - since_s


def injected_s(folder: Path) -> float:
    """Return the CLOCK_MONOTONIC at which the script injected its fault."""
    return wait_for(lambda: _read_number(folder / "injected"), seconds=START_S)


def _read_number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


def stop_agent(run: TwoNodeRun) -> None:
    """Stop the agent, as a debugger does."""
    for process in run.agents():
        process.suspend()


def kill_agent(run: TwoNodeRun) -> None:
    """Kill the agent. Its shim, which would replace it, is stopped before."""
    for process in filter(_is_shim, run.machines[1].processes()):
        process.suspend()
    for process in run.agents():
        process.kill()


def measure(name: str) -> str:
    """Run one fault and return a line about its verdict."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with started(folder, name if name in ZOO else "none") as run:
            run.until_training()
            if name in ZOO:
                began_s = injected_s(folder)
            else:
                began_s = time.monotonic()
                OF_MACHINES[name][0](run)
            kind = ZOO.get(name) or OF_MACHINES[name][1]
            try:
                verdict, seconds = first_verdict(run, kind, began_s)
            except AssertionError as error:
                return f"{name}: {str(error)[:6000]}"
            time.sleep(4.0)
            last = run.snapshot()
            assert last is not None
            nodes = [(n.name, n.state.value, n.link_age_s) for n in last.nodes]
            later = [(v.kind, v.level, v.cause) for v in last.verdicts]
            return (
                f"{name}: {seconds:.1f} s: {verdict.level}: {verdict.cause}\n  {later}\n  {nodes}"
            )


def quiet(seconds: float, **options: Any) -> str:
    """Watch a healthy run, and return a line about the verdicts that it got."""
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), **options) as run:
        first = run.until_training()
        seen = watch(run, seconds)
        last = run.until_training()
        steps = (last.global_step or 0) - (first.global_step or 0)
        causes = sorted({f"{v.level}: {v.cause}" for v in seen})
        return f"quiet for {seconds:.0f} s {options}: {steps} steps, verdicts: {causes}"


def watch(run: TwoNodeRun, seconds: float) -> list[Verdict]:
    """Return the verdicts of so many seconds."""
    seen, until_s = list[Verdict](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        snapshot = run.snapshot()
        seen += [] if snapshot is None else snapshot.verdicts
        time.sleep(0.1)
    return seen


ZOO = {
    "data_sleep": "frozen", "sigkill": "killed", "sigstop": "stopped", "data_gil": "gil_held",
    "rank0_barrier": "mismatch", "exc_one_rank": "raised", "mismatch_shape": "mismatch",
    "worker_stop": "worker_stopped",
}  # fmt: skip
OF_MACHINES: dict[str, tuple[Callable[[TwoNodeRun], object], str]] = {
    "cut": (lambda run: run.machines.cut(run.machines[1]), "node_unreachable"),
    "agent_killed": (kill_agent, "agent_killed"),
    "agent_frozen": (stop_agent, "agent_frozen"),
    "power": (lambda run: run.machines[1].kill_all(), "agent_killed"),
}
"""fault of a machine -> (its injection, kind of its verdict)."""

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for fault_name in sys.argv[1:] or [*ZOO, *OF_MACHINES]:
        if fault_name == "quiet":
            print(quiet(300.0, clock_skew_s=90), flush=True)
        else:
            print(measure(fault_name), flush=True)
