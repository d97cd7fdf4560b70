"""One run of the fault catalogue, through the command line, in a home of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.database_schema import StoreError
from ltui.training.store.run_directory import RunDir
from tests.faults.fault import SCRIPTS, Fault
from tests.faults.setting import command_prefix, prepared_machine, thaw
from tests.live_processes import processes_with
from tests.ltui_command import LTUI

START_S = 120.0
"""Seconds that a loaded machine may need until the fault is injected."""
POLL_S = 0.1
"""Seconds between two snapshots."""


class FaultRun:
    """A run that was started, with the snapshot that ``ltui show --json`` would print."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        deprived: bool = False,
        home: Path | None = None,
    ) -> None:
        self.folder = folder
        self.home = home or folder / "home"
        self.environment = {**os.environ, **environment, "LTUI_HOME": str(self.home)}
        self._before = [sys.executable, str(SCRIPTS / "deprived.py")] if deprived else []
        self._earlier = set((self.home / "runs").glob("*"))
        """Run directories of earlier runs in this home."""
        self._run_dir: RunDir | None = None

    def ltui(self, *arguments: str, check: bool = True) -> str:
        """Run a command of ltui and return its standard output."""
        done = subprocess.run(
            [*self._before, *LTUI, *arguments],
            cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"ltui {arguments}: {done.stdout}\n{done.stderr}")
        return done.stdout

    @property
    def run_dir(self) -> RunDir:
        if self._run_dir is None:
            (path,) = set((self.home / "runs").iterdir()) - self._earlier
            self._run_dir = RunDir(path)
        return self._run_dir

    def snapshot(self) -> RunSnapshot | None:
        """Return the current snapshot, or None if it cannot be read now."""
        try:
            return resolve_snapshot(self.run_dir)
        except (StoreError, ProblemError, OSError):
            return None

    def until(
        self, condition: Callable[[RunSnapshot], object], seconds: float = START_S
    ) -> RunSnapshot:
        """Return the first snapshot for which ``condition`` is true."""
        deadline = time.monotonic() + seconds
        while True:
            seen = self.snapshot()
            if seen is not None and condition(seen):
                return seen
            if time.monotonic() > deadline:
                raise AssertionError(f"never came: {seen}\n{self.log()}")
            time.sleep(POLL_S)

    def injected_s(self) -> float | None:
        """Return CLOCK_MONOTONIC of the injection, or None before it."""
        try:
            return float((self.folder / "injected").read_text())
        except (OSError, ValueError):
            return None

    def wait_for_injection(self) -> float:
        deadline = time.monotonic() + START_S
        while (struck := self.injected_s()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the fault never struck\n{self.log()}")
            time.sleep(0.02)
        return struck

    def log(self) -> str:
        """Return the end of the logs of the engine and the ranks."""
        logs = sorted((self.home / "runs").glob("*/logs/*/*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in logs)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this home, without this one, which may have inherited it."""
        return [p for p in processes_with("LTUI_HOME", self.home) if p.pid != os.getpid()]

    def end(self, seconds: float = 20) -> None:
        """End the run by request, then by force."""
        for point in self.folder.glob("disk"):
            thaw(point)
        with contextlib.suppress(AssertionError, subprocess.SubprocessError, ValueError):
            self.ltui("stop", "last", "--kill", check=False)
        deadline = time.monotonic() + seconds
        while left := self.processes():
            if time.monotonic() > deadline - seconds / 2:
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            if time.monotonic() > deadline:
                raise AssertionError(f"still running: {[p.cmdline() for p in left]}")
            time.sleep(0.1)


def command(fault: Fault) -> list[str]:
    """Return the engine's command line, without ltui."""
    ranks = str(fault.ranks)
    if fault.via == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        return [*command_prefix(fault), sys.executable, *launcher, str(SCRIPTS / "train_zoo.py")]
    return [*command_prefix(fault), sys.executable, str(SCRIPTS / "zoo_engine.py"), ranks]


@contextlib.contextmanager
def started_run(
    fault: Fault, *, deprived: bool = False, keep: Path | None = None
) -> Iterator[FaultRun]:
    """Run ``fault``. Afterwards copy its files to ``keep``, and end and remove the run."""
    folder = Path(tempfile.mkdtemp(prefix=f"zoo-{fault.id}-"))
    try:
        with prepared_machine(fault, folder) as needed:
            environment = fault_environment(fault, folder, needed)
            run = FaultRun(folder, environment, deprived)
            try:
                if fault.via == "preset":
                    run.ltui(
                        "run", str(SCRIPTS / "zoo.yaml"), "--detach",
                        "--set", f"trainer.devices={fault.ranks}",
                    )  # fmt: skip
                else:
                    run.ltui("exec", "--detach", "--", *command(fault))
                yield run
            finally:
                run.end()
                if keep is not None:
                    sockets = shutil.ignore_patterns("*.sock")
                    shutil.copytree(run.home / "runs", keep, dirs_exist_ok=True, ignore=sockets)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fault_environment(fault: Fault, folder: Path, needed: Mapping[str, str]) -> dict[str, str]:
    return {
        "ZOO_FAULT": fault.zoo_fault,
        "ZOO_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        **fault.env,
        **needed,
    }
