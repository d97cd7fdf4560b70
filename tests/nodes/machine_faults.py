"""The fault zoo with its culprit on another machine, and faults of whole machines.

    python -m tests.nodes.machine_faults [NAME...]

runs faults on machines in network namespaces, by default all of ``FAULTS``, and prints a table of
the seconds from each to the right verdict: right level, rank, machine and cause. ``quiet`` watches
a healthy run of ten minutes instead, ``skewed`` one in which the clocks differ. Rank 0 runs on
machine-0, rank 1 on machine-1, and so on.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from tests.faults.catalogue import BY_ID
from tests.faults.fault import GRAVE, SCRIPTS, Expected, Fault, one
from tests.faults.run import FaultRun, fault_environment
from tests.faults.setting import prepared_machine, thaw, why_unavailable
from tests.faults.table import Row, line, misses, summary
from tests.faults.verdicts import check_verdicts
from tests.nodes.two_machines import Machines, ltui_on, open_machines

VERDICT_S = 60.0
"""Seconds after which a verdict is given up."""
QUIET_S = 600.0
"""Seconds for which a healthy run is watched."""
HEALTHY = Fault(id="none", title="no fault", expected=())


class MachinesFaultRun(FaultRun):
    """A run of the zoo's script on machines. All files are visible here: only the network is
    divided."""

    def __init__(
        self, folder: Path, machines: Machines, environment: Mapping[str, str], fault: Fault
    ) -> None:
        super().__init__(folder, environment, home=machines[0].home)
        self.machines = machines
        self._fault = fault
        self._settings = environment

    def ltui(self, *arguments: str, check: bool = True) -> str:
        """Run a command of ltui on machine-0 and return its standard output."""
        code = 0 if check else None
        return ltui_on(self.machines[0], *arguments, env=self._settings, code=code).stdout

    def start(self) -> None:
        """Start the run on all machines, with as many ranks on each as the fault needs."""
        count = len(self.machines.machines)
        per_machine = str(max(1, self._fault.ranks // count))
        key = str(self.folder / "node.key")
        said = self.ltui(
            "exec", "--num-nodes", str(count), "--address", self.machines[0].address,
            "--key-file", key, "--detach", "--",
            "torchrun", "--nproc-per-node", per_machine, str(SCRIPTS / "train_zoo.py"),
        )  # fmt: skip
        place = re.search(r"ltui join (\S+)", said)
        assert place is not None, said
        join = ("join", place[1], "--key-file", key, "--detach")
        for machine in self.machines.machines[1:]:
            ltui_on(machine, *join, env=self._settings, code=0)

    def wait_for_injection(self) -> float:
        """Wait for the fault of the script, or inject the fault of a machine."""
        inject = OF_MACHINES.get(self._fault.id)
        if inject is None:
            return super().wait_for_injection()
        self.until_training()
        injected_s = time.monotonic()
        inject(self)
        return injected_s

    def until_training(self, step: int = 20) -> RunSnapshot:
        count = len(self.machines.machines)
        return self.until(
            lambda s: len(s.ranks) >= count and all((r.global_step or 0) >= step for r in s.ranks)
        )

    def agents(self) -> list[psutil.Process]:
        """Return the processes of the agent on machine-1, without those that it started."""
        return [p for p in self.machines[1].processes() if _is_agent(p)]

    def log(self) -> str:
        logs = [
            *sorted(self.machines[0].home.glob("runs/*/logs/*/*.log")),
            *sorted(self.machines[0].home.glob("runs/*/*.log")),
            *sorted(self.machines[1].home.glob("nodes/*/*.log")),
        ]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-2500:]}" for p in logs)

    def end(self, seconds: float = 20) -> None:
        """End the run by force. The machines end what is left."""
        thaw(self.folder / "disk")
        with contextlib.suppress(AssertionError):
            self.machines.restore(self.machines[1])
        self.ltui("stop", "last", "--kill", check=False)


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
    folder: Path, fault: Fault = HEALTHY, *, batches: int = 100_000, **options: Any
) -> Iterator[MachinesFaultRun]:
    """Start the script on machines with ``fault``, and end it afterwards.

    ``options`` are those of ``open_machines``.
    """
    with (
        prepared_machine(fault, folder) as needed,
        open_machines(folder, MACHINES.get(fault.id, 2), **options) as machines,
    ):
        environment = {
            "ZOO_STEP": "60",
            "ZOO_BATCHES": str(batches),
            "ZOO_PACE_S": "0.05",
            **fault_environment(fault, folder, needed),
        }
        run = MachinesFaultRun(folder, machines, environment, fault)
        try:
            run.start()
            yield run
        finally:
            run.end()


def first_verdict(run: FaultRun, kind: str) -> Verdict:
    """Wait for the first verdict of a kind."""

    def matches(snapshot: RunSnapshot) -> list[Verdict]:
        return [v for v in snapshot.verdicts if v.kind == kind]

    return matches(run.until(matches, VERDICT_S))[0]


def stop_agent(run: MachinesFaultRun) -> None:
    """Stop the agent, as a debugger does."""
    for process in run.agents():
        process.suspend()


def kill_agent(run: MachinesFaultRun) -> None:
    """Kill the agent. Its shim, which would replace it, is stopped before."""
    for process in filter(_is_shim, run.machines[1].processes()):
        process.suspend()
    for process in run.agents():
        process.kill()


# -- the faults --------------------------------------------------------------------------------

OF_MACHINES: dict[str, Callable[[MachinesFaultRun], object]] = {
    "cut": lambda run: run.machines.cut(run.machines[1]),
    "agent_killed": kill_agent,
    "agent_frozen": stop_agent,
    "power": lambda run: run.machines[1].kill_all(),
}
"""Fault of a machine -> its injection."""
MACHINES = {"mismatch_op": 3, "mismatch_shape": 3, "unused_params": 3, "p2p_recv": 3}
"""Fault -> number of machines; by default two."""
_FROM_CATALOGUE = (
    "sigkill", "sigstop", "segv", "exit_early", "exc_one_rank", "oom_rank",
    "data_sleep", "data_socket", "data_gil", "data_spin", "data_lock", "data_slow",
    "worker_sleep", "worker_stop", "worker_kill", "forward_sleep", "one_compute", "compute_slow",
    "child_program", "rank0_barrier", "mismatch_op", "mismatch_shape", "unused_params",
)  # fmt: skip
_SAVED_BY_RANK_1 = ("ckpt_slow", "frozen_disk")


def _on_machines(fault: Fault) -> Fault:
    """Return a fault of the catalogue as a fault on machines, which its verdicts must name."""
    expected = tuple(
        replace(e, words=(*e.words, *(f"machine-{rank}" for rank in e.culprits)))
        for e in fault.expected
    )
    ranks = MACHINES.get(fault.id, 2)
    return replace(fault, ranks=ranks, expected=expected, bound_s=max(fault.bound_s, 10.0))


def _saved_by_rank_1(fault: Fault) -> Fault:
    """Return a fault of a checkpoint that rank 1 writes, which only fetches what it holds."""
    expected = tuple(replace(e, culprits=(1,)) for e in fault.expected)
    return replace(fault, env={**fault.env, "ZOO_SAVING_RANK": "1"}, expected=expected)


FAULTS: tuple[Fault, ...] = (
    *(_on_machines(BY_ID[name]) for name in _FROM_CATALOGUE),
    *(_on_machines(_saved_by_rank_1(BY_ID[name])) for name in _SAVED_BY_RANK_1),
    Fault(
        id="node_slow",
        title="all ranks of a machine slow",
        ranks=4,
        expected=one("machine machine-1 is slower", culprits=(2, 3), levels=("slow",)),
    ),
    Fault(
        id="cut",
        title="link cut",
        expected=one("machine-1", "link is cut", culprits=(), levels=("warning", "stalled")),
    ),
    Fault(
        id="agent_killed",
        title="agent killed",
        expected=one("machine-1", "agent has ended", culprits=(), levels=("warning",)),
    ),
    Fault(
        id="agent_frozen",
        title="agent stopped",
        expected=one("machine-1", "agent does not run", culprits=(), levels=("warning",)),
    ),
    Fault(
        id="power",
        title="all processes of a machine killed",
        expected=(Expected(culprits=(), levels=(*GRAVE, "warning"), words=("machine-1",)),),
    ),
)
_BY_ID = {fault.id: fault for fault in FAULTS}


def measure(fault: Fault) -> Row:
    """Run one fault and check its verdicts."""
    for need in fault.needs:
        assert why_unavailable(need) is None, f"{fault.id}: {why_unavailable(need)}"
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        return Row(fault, [check_verdicts(fault, started(Path(folder), fault))])


# -- healthy runs ------------------------------------------------------------------------------


def quiet(seconds: float, **options: Any) -> str:
    """Watch a healthy run, and return a line about everything that was said about it."""
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), **options) as run:
        first = run.until_training()
        said = notices(run, seconds)
        last = run.until_training()
        steps = (last.global_step or 0) - (first.global_step or 0)
        return f"quiet for {seconds:.0f} s {options}: {steps} steps, said: {sorted(said) or '-'}"


def notices(run: FaultRun, seconds: float) -> set[str]:
    """Return all verdicts, freeze warnings and notes of so many seconds."""
    said, until_s = set[str](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        snapshot = run.snapshot()
        if snapshot is not None:
            said |= {f"{v.level}: {v.cause}" for v in snapshot.verdicts}
            said |= {str(caution) for caution in snapshot.cautions}
            said |= {f"{node.name}: {node.note}" for node in snapshot.nodes if node.note}
            said |= {text for text in (snapshot.detail, snapshot.history_note) if text}
        time.sleep(0.1)
    return said


def watch(run: FaultRun, seconds: float) -> list[Verdict]:
    """Return the verdicts of so many seconds."""
    seen, until_s = list[Verdict](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        snapshot = run.snapshot()
        seen += [] if snapshot is None else snapshot.verdicts
        time.sleep(0.1)
    return seen


def main(names: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    for name in names or list(_BY_ID):
        if name in ("quiet", "skewed"):
            options = {"clock_skew_s": 90} if name == "skewed" else {}
            print(quiet(QUIET_S, **options), flush=True)
            continue
        rows.append(measure(_BY_ID[name]))
        print(line(rows[-1]), flush=True)
    print(f"\n{summary(rows, [])}")
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
