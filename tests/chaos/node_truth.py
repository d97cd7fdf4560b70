"""What a head says about a run on two machines, compared with ``/proc`` and with the cable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ltui.training.state.run_snapshot import LIVE, NodeState, RankState, RunSnapshot, RunState
from ltui.training.state.verdicts import VerdictKind
from tests.chaos.process_tree import RunProcess, live_processes
from tests.nodes.run_of_machines import MachinesRun

NOTICE_S = 10.0
"""Seconds within which a cut, and a dead agent, must be named."""
RECOVERY_S = 30.0
"""Seconds within which a restored link must be named, on a machine that may be busy."""
_LISTENS = "0A"
_LOST_STATES = frozenset({NodeState.UNREACHABLE, NodeState.GONE})


@dataclass
class Cable:
    """Whether the machines can reach each other. Monotonic seconds."""

    cut_s: float | None = None
    restored_s: float | None = None
    named_after_s: float | None = None
    """Seconds from the cut until the head had named it."""

    @property
    def is_cut(self) -> bool:
        return self.cut_s is not None and self.restored_s is None

    def cut_for_s(self) -> float:
        if self.cut_s is None or self.restored_s is not None:
            return 0.0
        return time.monotonic() - self.cut_s

    def is_settled(self) -> bool:
        """Return True if the link has been whole for so long that nothing follows from a cut."""
        if self.cut_s is None:
            return True
        return self.restored_s is not None and time.monotonic() - self.restored_s > RECOVERY_S


@dataclass
class MachinesTruth:
    """Who is alive on which machine, and since when something is missing."""

    run: MachinesRun
    cable: Cable = field(default_factory=Cable)
    _absent_s: dict[str, float] = field(default_factory=dict)

    def processes(self) -> dict[int, list[RunProcess]]:
        return {0: live_processes(self.run.run_dir), 1: live_processes(self.run.agent_dir())}

    def absent_for_s(self, name: str, is_absent: bool) -> float:
        """Return for how long a condition has been seen."""
        if not is_absent:
            self._absent_s.pop(name, None)
            return 0.0
        return time.monotonic() - self._absent_s.setdefault(name, time.monotonic())


@dataclass
class NodesObservation:
    """One answer of ltui, with who was alive all the while it was asked."""

    snapshot: RunSnapshot
    before: Mapping[int, list[RunProcess]]
    after: Mapping[int, list[RunProcess]]

    @property
    def is_live(self) -> bool:
        return self.snapshot.state in LIVE

    def steadily_alive(self, node: int) -> list[RunProcess]:
        return [process for process in self.before[node] if process in self.after[node]]

    def has(self, node: int, role: str) -> bool:
        return any(process.role == role for process in self.steadily_alive(node))

    def lives(self) -> bool:
        return any(self.after.values())

    def contradiction(self, truth: MachinesTruth) -> str | None:
        """Return what is false about the snapshot, or None."""
        return self._false_end(truth) or self._false_life(truth) or self._false_node(truth)

    def _false_end(self, truth: MachinesTruth) -> str | None:
        if self.is_live:
            return None
        for node in (0, 1):
            ranks = [a for a in self.steadily_alive(node) if a.role.startswith(("rank", "engine"))]
            # Nobody on machine 0 can know of the other machine without a link, without a
            # supervisor, or before its agent has reported.
            nodes = self.snapshot.nodes
            has_reported = len(nodes) == 2 and nodes[1].state is not NodeState.JOINING
            connected = truth.cable.is_settled() and has_reported
            excused = node == 1 and not (connected and self.has(0, "supervisor"))
            if ranks and not excused:
                state = self.snapshot.state.value
                return f"shown as {state} while {[a.role for a in ranks]} lived on machine {node}"
        return None

    def _false_life(self, truth: MachinesTruth) -> str | None:
        snapshot = self.snapshot
        nobody = not self.lives() and not any(self.before.values())
        if self.is_live and nobody and snapshot.state is not RunState.QUEUED:
            return f"shown as {snapshot.state.value} while nothing of it lived"
        pid = snapshot.supervisor_pid
        known = [*self.before[0], *self.after[0]]
        if pid is not None and not any(a.mark.pid == pid for a in known):
            return f"supervisor {pid} is shown and was not alive"
        return None

    def _false_node(self, truth: MachinesTruth) -> str | None:
        """Return what is false about machine 1 in a run whose supervisor answers."""
        snapshot, cable = self.snapshot, truth.cable
        if not self.is_live or snapshot.supervisor_pid is None or len(snapshot.nodes) < 2:
            truth.absent_for_s("agent", False)
            return None
        state = snapshot.nodes[1].state
        if state in _LOST_STATES and cable.is_cut:
            cable.named_after_s = cable.named_after_s or cable.cut_for_s()
        agent_is_absent = not self.has(1, "supervisor")
        absent_s = truth.absent_for_s("agent", agent_is_absent)
        if state is NodeState.CONNECTED and cable.cut_for_s() > NOTICE_S:
            return f"machine 1 is shown as connected {cable.cut_for_s():.0f} s after the cut"
        if state is NodeState.CONNECTED and absent_s > NOTICE_S:
            return f"machine 1 is shown as connected, and its agent is dead since {absent_s:.0f} s"
        if absent_s == 0 and state in _LOST_STATES and cable.is_settled():
            return f"machine 1 is shown as {state.value}, and its link is whole"
        return None

    def verdict_names_the_cut(self) -> bool:
        return any(
            v.kind == VerdictKind.NODE_UNREACHABLE and v.ended is None
            for v in self.snapshot.verdicts
        )

    def at_rest(self, least_steps: Mapping[int, int]) -> bool:
        """Ended with nothing left, or training or paused on both machines under supervisors.

        ``least_steps``: rank -> step that it must have passed, also if it is paused.
        """
        if not self.is_live:
            return not self.lives()
        snapshot = self.snapshot
        alive = {a.mark.pid for node in (0, 1) for a in self.steadily_alive(node)}
        return (
            snapshot.state in (RunState.RUNNING, RunState.PAUSED)
            and snapshot.supervisor_pid in alive
            and self.has(1, "supervisor")
            and all(node.state is NodeState.CONNECTED for node in snapshot.nodes)
            and len(snapshot.ranks) == len(snapshot.nodes) == 2
            and all(r.pid in alive for r in snapshot.ranks)
            and all(
                r.state in (RankState.OK, RankState.WAITING, RankState.PAUSED)
                for r in snapshot.ranks
            )
            and all((r.global_step or 0) > least_steps.get(r.rank, -1) for r in snapshot.ranks)
        )

    def describe(self) -> str:
        snapshot = self.snapshot
        ranks = [(r.rank, r.pid, r.state.value, r.global_step) for r in snapshot.ranks]
        nodes = [(n.name, n.state.value, n.link_age_s, n.note) for n in snapshot.nodes]
        alive = {n: [(a.role, a.mark.pid) for a in those] for n, those in self.after.items()}
        return (
            f"{snapshot.state.value} ({snapshot.detail}), attempt {snapshot.attempt}, supervisor "
            f"{snapshot.supervisor_pid}, step {snapshot.global_step}, ranks {ranks}, nodes "
            f"{nodes}; verdicts {[v.cause for v in snapshot.verdicts if v.ended is None]}; "
            f"alive {alive}"
        )


def listening_sockets(holder: int) -> list[str]:
    """Return the TCP addresses at which somebody listens in the network namespace of a process."""
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{holder}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                listening.append(fields[1])
    return listening
