"""A run on many simulated machines: a real head, real links and messages, simulated ranks.

``python -m tests.nodes.simulated_nodes FOLDER PLACE FIRST COUNT RANKS WORLD STEP_S START_S``
runs the agents of COUNT machines from the number FIRST on, until their ranks have stopped. The key
is in ``LTUI_NODE_KEY``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.link_key import KEY_FILE_NAME, KEY_VARIABLE, LinkKey
from ltui.training.nodes.messages import (
    MachineObservations,
    NodeReport,
    OrdersMessage,
    ReportMessage,
    decode,
    encode,
    own_version,
    readings_period_s,
    report_period_s,
)
from ltui.training.nodes.node_address import parse_host_and_port, read_link_place
from ltui.training.nodes.queue_tail import QueuePosition, QueueTails
from ltui.training.process.process_activity import RankUsage
from ltui.training.state.run_snapshot import LIVE, GpuSnapshot
from ltui.training.store.run_directory import RunDir, new_run_id
from tests.nodes.simulated_ranks import SimulatedRanks
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
_VERSION = own_version()


class SimulatedAgent:
    """The agent of one machine and its ranks. ``advance`` never waits."""

    def __init__(
        self, link: AgentLink, folder: Path, node: int, nodes: int, ranks: SimulatedRanks
    ) -> None:
        now_s = time.monotonic()
        self._nodes, self._numbers = nodes, ranks.numbers
        self._node, self._link, self.ranks = node, link, ranks
        self._tails, self._barrier = QueueTails(folder), BarrierMirror(folder)
        self._acknowledged: Mapping[int, QueuePosition] = {}
        self.urgent = False
        self._next_s = self._machine_s = now_s
        self._ended = False
        self.left = False

    def advance(self, now_s: float) -> None:
        """Let the ranks advance, and report if that is due."""
        self._ended = not self.ranks.advance(now_s)
        self._take(self._link.answer())
        if self._ended and not self._link.connected:
            self.left = True
        if self._link.woken():
            self._next_s = now_s
        if now_s < self._next_s:
            return
        period_s = report_period_s(self._nodes, urgent=self.urgent)
        self._next_s = max(self._next_s + period_s, now_s - period_s)
        self._take(self._link.exchange(encode(self._message(now_s)), 0.0))

    def _message(self, now_s: float) -> ReportMessage:
        machine = None
        if now_s >= self._machine_s:
            self._machine_s = now_s + readings_period_s(self._nodes)
            machine = self._machine()
        report = NodeReport(
            node=self._node,
            version=_VERSION,
            host=f"machine-{self._node}",
            machine_id=f"simulated {self._node}",
            pid=os.getpid(),
            address=HOST,
            attempt=1,
            sent_ns=time.monotonic_ns(),
            sent_at=time.time(),
            ranks=tuple(self._numbers),
            machine=machine,
            engine_exit=EngineExit(exit_code=0) if self._ended else None,
            killed=self._ended,
        )
        chunks = self._tails.chunks(self._acknowledged)
        return ReportMessage(report, self._barrier.export(), queues=chunks)

    def _machine(self) -> MachineObservations:
        return MachineObservations(
            usage={rank: RankUsage(97.0, 2 << 30, 0.01) for rank in self._numbers},
            host=HostEvidence(
                host=f"machine-{self._node}", cores=64, load=9.0,
                memory_available_bytes=1 << 38, memory_total_bytes=1 << 39,
            ),
            gpus=tuple(
                GpuSnapshot(index=at, node=self._node, utilisation_percent=95.0, ranks=(rank,))
                for at, rank in enumerate(self._numbers)
            ),
        )  # fmt: skip

    def _take(self, answer: bytes | None) -> None:
        if answer is None:
            return
        message = decode(answer)
        assert isinstance(message, OrdersMessage)
        assert message.orders.refusal is None, message.orders.refusal
        self._acknowledged = message.queues
        self._barrier.merge(message.barrier)
        self.urgent = message.orders.urgent or self._barrier.is_open()
        self.left = message.orders.leave

    def close(self) -> None:
        self._link.close()
        self.ranks.close()
        self._tails.close()
        self._barrier.close()


@dataclass
class SimulatedRun:
    """A run whose ranks all train."""

    run_dir: RunDir
    agents: list[subprocess.Popen[str]]
    nodes: int

    def supervisor_pid(self) -> int:
        pid = resolve_snapshot(self.run_dir).supervisor_pid
        assert pid is not None
        return pid

    def stop(self) -> float:
        """Stop the run. Return the seconds until the last rank had agreed to that."""
        began_s = time.monotonic()
        ControlClient(self.run_dir).request({"cmd": "stop"})
        acted = [float(agent.communicate(timeout=300)[0]) for agent in self.agents]
        log = self.run_dir.engine_log_path(1).read_text().splitlines()
        acted.append(json.loads(log[-1])["acted_s"])
        wait_for(lambda: resolve_snapshot(self.run_dir).state not in LIVE, period_s=0.2)
        return float(max(acted) - began_s)


@contextlib.contextmanager
def simulated_run(
    home: Path, *, agents: int, ranks_per_agent: int, processes: int, step_s: float
) -> Iterator[SimulatedRun]:
    """Run one rank on node 0 and some on each of the other machines."""
    world = 1 + agents * ranks_per_agent
    (home / "runs").mkdir(parents=True, exist_ok=True)
    run_id, name = new_run_id(home, None)
    times = (str(step_s), str(time.monotonic()))
    engine = (sys.executable, "-m", "tests.nodes.simulated_ranks", str(world), *times)
    layout = Nodes(count=1 + agents, rank=0, address=HOST, port=1, control_port=0)
    spec = RunSpec(
        id=run_id, name=name, created_at=time.time(), cwd=str(ROOT), python=sys.executable,
        command=engine, nproc=0, nodes=layout,
    )  # fmt: skip
    key = LinkKey.generate()
    run_dir = launch(spec, home, private_files={KEY_FILE_NAME: key.text})
    place = read_link_place(run_dir)
    assert place is not None
    started: list[subprocess.Popen[str]] = []
    try:
        share = -(-agents // processes)
        for first in range(1, agents + 1, share):
            count = min(share, agents + 1 - first)
            arguments = [home / "simulated", f"{place.address}:{place.port}", first, count,
                         ranks_per_agent, world, *times]  # fmt: skip
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.nodes.simulated_nodes", *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, KEY_VARIABLE: key.text},
                )
            )
        wait_for(
            lambda: sum((r.global_step or 0) > 0 for r in resolve_snapshot(run_dir).ranks),
            started[0],
            wanted=lambda training: training == world,
            period_s=0.2,
        )
        yield SimulatedRun(run_dir, started, 1 + agents)
    finally:
        if resolve_snapshot(run_dir).state in LIVE:
            ControlClient(run_dir).request({"cmd": "kill"})
            wait_for(lambda: resolve_snapshot(run_dir).state not in LIVE, period_s=0.2)
        for process in started:
            process.kill()
            process.communicate()


def main(arguments: list[str]) -> None:
    folder, place = Path(arguments[0]), parse_host_and_port(arguments[1], "PLACE")
    first, count, ranks, world = map(int, arguments[2:6])
    step_s, start_s = map(float, arguments[6:8])
    key = LinkKey.from_environment(os.environ)
    assert key is not None
    agents = []
    for node in range(first, first + count):
        numbers = range(1 + (node - 1) * ranks, 1 + node * ranks)
        simulated = SimulatedRanks(folder / str(node), numbers, world, step_s, start_s)
        link = AgentLink(key, *place, str(node))
        agents.append(SimulatedAgent(link, folder / str(node), node, 1 + world // ranks, simulated))
    try:
        while not all(agent.left for agent in agents):
            began_s = time.monotonic()
            for agent in agents:
                agent.advance(time.monotonic())
            period_s = 0.02 if any(agent.urgent for agent in agents) else 0.05
            time.sleep(max(0.001, began_s + period_s - time.monotonic()))
    finally:
        for agent in agents:
            agent.close()
    acted = [agent.ranks.acted_s for agent in agents if agent.ranks.acted_s is not None]
    assert len(acted) == len(agents), "the run ended before all ranks had agreed"
    print(max(acted))


if __name__ == "__main__":
    main(sys.argv[1:])
