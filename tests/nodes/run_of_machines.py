"""A run of ``ltui run`` on machine 0 that the other machines have joined by ``ltui join``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from ltui.training.lifecycle.run_processes import shim_identity
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE, NodeState, RunSnapshot, RunState, Verdict
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.run_directory import RunDir
from tests.nodes.two_machines import Machine, Machines, ltui_on
from tests.waiting import wait_for

T = TypeVar("T")

START_S = 300.0
"""Seconds within which training on all machines has started, also on a busy computer."""
ENDLESS = 100_000
"""Epochs of a training that a test ends."""


@dataclass
class MachinesRun:
    """A run on several machines. Its files can be read from the test's own process."""

    machines: Machines
    run_dir: RunDir
    """The run directory, on machine 0."""
    port: int

    @property
    def place(self) -> str:
        address = self.machines[0].address
        return f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"

    def agent_dir(self, number: int = 1) -> RunDir:
        return RunDir(self.machines[number].home / "nodes" / f"{self.run_dir.id}-{number}")

    def join(
        self, number: int = 1, *words: str, env: Mapping[str, str] | None = None, code: int = 0
    ) -> str:
        """Let a machine join. Return what that printed."""
        key = str(self.run_dir.path / "node.key")
        argv = ("join", self.place, "--key-file", key, "--detach", *words)
        done = ltui_on(self.machines[number], *argv, env=env, code=code)
        return done.stdout + done.stderr

    def ltui(self, *words: str, code: int | None = 0) -> str:
        """Run ``ltui`` on machine 0. Return what it printed."""
        done = ltui_on(self.machines[0], *words, code=code)
        return done.stdout + done.stderr

    def show(self) -> str:
        return self.ltui("show", self.run_dir.id)

    # -- what the head shows -------------------------------------------------------------------

    def snapshot(self) -> RunSnapshot:
        return resolve_snapshot(self.run_dir)

    def verdicts(self) -> list[Verdict]:
        return [verdict for verdict in self.snapshot().verdicts if verdict.ended is None]

    def node_state(self, number: int = 1) -> NodeState:
        return self.snapshot().nodes[number].state

    def rank_steps(self) -> list[int]:
        return [rank.global_step or 0 for rank in self.snapshot().ranks]

    def events(self, kind: str | None = None) -> list[StoredEvent]:
        with RunStore(self.run_dir) as store:
            return [e for e in store.events() if kind in (None, e.kind)]

    def wait_for_steps(self, more: int = 5, seconds: float = START_S) -> None:
        """Wait until every rank of the run has made more steps, as the head sees it."""

        def has_moved() -> bool:
            steps = self.rank_steps()
            return len(steps) == len(before) and all(
                now >= then + more for now, then in zip(steps, before, strict=True)
            )

        world = len(self.machines.machines)
        before = self.rank_steps()
        if len(before) < world:
            before = [0] * world
        wait_for(has_moved, seconds=seconds, period_s=0.1)

    def wait_for_node(self, state: NodeState, number: int = 1, seconds: float = 60) -> None:
        """Wait until the head shows a machine in a state."""
        wait_for(lambda: self.node_state(number), wanted=lambda s: s is state, seconds=seconds)

    def wait_for_state(self, *states: RunState, seconds: float = 120) -> RunSnapshot:
        return wait_for(self.snapshot, wanted=lambda s: s.state in states, seconds=seconds)

    def wait_for_end(self, seconds: float = 120) -> RunSnapshot:
        return wait_for(self.snapshot, wanted=lambda s: s.state not in LIVE, seconds=seconds)

    def recorded_steps(self, rank: int) -> set[int]:
        """Return the steps of a rank that the history holds."""
        place = f"{self.run_dir.db_path.as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(place, uri=True)) as store:
            rows = store.execute("SELECT step FROM steps WHERE rank = ?", (rank,))
            return {int(step) for (step,) in rows}

    # -- processes -----------------------------------------------------------------------------

    def supervisor_pid(self, number: int = 0) -> int:
        """Return the pid of the head's supervisor, or of the agent of another machine."""
        run_dir = self.run_dir if number == 0 else self.agent_dir(number)
        holder = wait_for(lambda: lock_holder(run_dir.lock_path), seconds=30)
        assert holder is not None
        return holder.pid

    def shim_pid(self, number: int = 0) -> int:
        run_dir = self.run_dir if number == 0 else self.agent_dir(number)
        shim = shim_identity(run_dir)
        assert shim is not None
        return shim.pid

    def rank_pid(self, rank: int) -> int:
        pid = next(r.pid for r in self.snapshot().ranks if r.rank == rank)
        assert pid is not None
        return pid

    def wait_until_empty(self, number: int, seconds: float = 120) -> None:
        """Wait until nothing runs on a machine any more.

        An agent that did not hear that the run is over tries to report for a minute more.
        """
        wait_for(
            lambda: [describe(p) for p in self.machines[number].processes()],
            wanted=lambda left: not left,
            seconds=seconds,
            period_s=0.2,
        )

    def wait_until_all_are_empty(self) -> None:
        for number in range(len(self.machines.machines)):
            self.wait_until_empty(number)

    def stop(self) -> None:
        """Stop the run with a checkpoint, and wait until nothing of it runs any more."""
        assert "checkpoint verified" in self.ltui("stop", self.run_dir.id)
        self.wait_until_all_are_empty()


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} ended"


def start_head(
    machines: Machines,
    *sets: str,
    words: Sequence[str] = (),
    epochs: int = ENDLESS,
    env: Mapping[str, str] | None = None,
) -> MachinesRun:
    """Start the quickstart preset on machine 0, which then waits for the other machines."""
    settings = (
        f"trainer.num_nodes={len(machines.machines)}",
        "trainer.devices=1",
        f"trainer.max_epochs={epochs}",
        "data.init_args.loader=torch",
        *sets,
    )
    chosen = [word for setting in settings for word in ("--set", setting)]
    head = machines[0]
    argv = ("run", "quickstart", "--detach", "--address", head.address, *chosen, *words)
    ltui_on(head, *argv, env=env, code=0)
    (path,) = (head.home / "runs").iterdir()
    link = path / "engine" / "link.json"
    wait_for(link.exists, seconds=30)
    return MachinesRun(machines, RunDir(path), json.loads(link.read_text())["port"])


def start_run(machines: Machines, *sets: str, wait: bool = True, **options: Any) -> MachinesRun:
    """Start the quickstart preset on all machines. ``wait``: until all ranks train."""
    run = start_head(machines, *sets, **options)
    for number in range(1, len(machines.machines)):
        run.join(number, env=options.get("env"))
    if wait:
        run.wait_for_steps()
    return run


@contextmanager
def cut(machines: Machines, machine: Machine) -> Iterator[None]:
    """Cut the connection of a machine for the time of the block."""
    machines.cut(machine)
    try:
        yield
    finally:
        machines.restore(machine)


def observe(read: Callable[[], T], seconds: float) -> list[T]:
    """Read something again and again. Return each new value."""
    until_s = time.monotonic() + seconds
    seen: list[T] = []
    while time.monotonic() < until_s:
        value = read()
        if not seen or seen[-1] != value:
            seen.append(value)
        time.sleep(0.25)
    return seen


def kill(*pids: int, number: int = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)
