"""What ltui costs a training step of a run on two machines, beside the same ranks on one machine.

The machines are network namespaces. Measured is the processor time of the training thread in the
hooks of ltui's callbacks, as the median over the steps of both ranks. Runs on one and on two
machines take turns; that which the computer disturbed least is reported.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import list_runs
from tests.bench.row import Row, row
from tests.nodes.two_machines import Machine, ltui_on, missing_rights, open_machines
from tests.waiting import wait_for

SCRIPT = Path(__file__).with_name("timed_hooks.py")
ROUNDS = 3
BOUND_US = 2.0
"""Highest difference between two machines and one."""


def measure() -> list[Row]:
    if (reason := missing_rights()) is not None:
        return [row(f"a step on two machines: not measured, {reason}", None, "us")]
    one, two = [], []
    with tempfile.TemporaryDirectory() as folder, open_machines(Path(folder)) as machines:
        for number in range(ROUNDS):
            times = Path(folder) / f"one-{number}"
            one.append(_run(machines[0], (), times, 2))
            times = Path(folder) / f"two-{number}"
            two.append(_run(machines[0], machines.machines[1:], times, 1))
    spread = ", ".join(f"{value:.1f}" for value in (*one, *two))
    us_one, us_two = min(one), min(two)
    return [
        row(f"hooks of a step, 2 ranks on one machine (all runs: {spread})", us_one, "us"),
        row("hooks of a step, 2 ranks on two machines", us_two, "us"),
        row("  the difference", us_two - us_one, "us", BOUND_US),
    ]


def _run(head: Machine, others: Sequence[Machine], folder: Path, per_machine: int) -> float:
    """Return the median microseconds of the hooks of a step."""
    folder.mkdir()
    key = str(folder / "node.key")
    nodes = ["--num-nodes", "2", "--address", head.address, "--key-file", key] if others else []
    command = ["torchrun", "--nproc-per-node", str(per_machine), str(SCRIPT), str(folder)]
    said = ltui_on(head, "exec", *nodes, "--detach", "--", *command, code=0).stdout
    for other in others:
        place = re.search(r"ltui join (\S+)", said)
        assert place is not None, said
        ltui_on(other, "join", place[1], "--key-file", key, "--detach", code=0)
    run = list_runs(head.home)[0]
    wait_for(lambda: resolve_snapshot(run).state not in LIVE, seconds=300)
    steps: list[int] = []
    for rank in range(2):
        text = (folder / f"rank-{rank}").read_text()
        steps += [int(line) for line in text.split()]
    assert min(steps) > 0, "no callback of ltui was present"
    return statistics.median(steps) / 1e3
