"""What the other machines of a run have reported last.

Written by the thread of the link (``report_intake.py``), read by the supervisor's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ltui.training.diagnosis.evidence import Evidence, HostEvidence
from ltui.training.diagnosis.merge_evidence import merge_evidence
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.shim_files import EngineExit
from ltui.training.nodes.clock_offset import ClockOffset
from ltui.training.nodes.messages import NodeReport
from ltui.training.nodes.node_watch import NodeWatch
from ltui.training.nodes.observations import MachineObservations, RankObservations
from ltui.training.state.run_snapshot import GpuSnapshot, NodeState, Verdict


@dataclass(slots=True, eq=False)
class RemoteNode:
    """One other machine. Written by the thread of the link, read by the loop."""

    number: int
    watch: NodeWatch
    report: NodeReport | None = None
    """The latest report of the current attempt."""
    machine: MachineObservations = field(default_factory=MachineObservations)
    offset: ClockOffset = field(default_factory=ClockOffset)
    logs: dict[str, int] = field(default_factory=dict)
    evidence_number: int = 0
    evidence: Evidence | None = None
    signal_received: bool = False
    ended_by_itself: bool = False
    """True if its engine had ended before the head ended the attempt."""
    has_left: bool = False
    """True if its agent exits because the run is over."""

    @property
    def has_ended(self) -> bool:
        """True if all processes of the attempt on it have exited."""
        return self.report is not None and self.report.killed


class NodeReports:
    """The latest reports of all other machines of one attempt."""

    def __init__(self, nodes: Mapping[int, RemoteNode]) -> None:
        self._nodes = nodes
        self._merged: tuple[dict[int, Evidence], Evidence] | None = None
        """The parts that were merged last, and the result."""

    def rank_observations(self) -> list[RankObservations]:
        """Return the latest observations of every machine that has reported."""
        return [n.report.observations for n in self._nodes.values() if n.report is not None]

    def machines(self) -> dict[int, MachineObservations]:
        """Return the latest readings of every other machine."""
        return {number: node.machine for number, node in self._nodes.items()}

    def hosts(self, own: HostEvidence | None) -> dict[int, HostEvidence]:
        """Return the condition of every machine that is known; ``own`` is that of this one."""
        hosts = {0: own, **{number: node.machine.host for number, node in self._nodes.items()}}
        return {number: host for number, host in hosts.items() if host is not None}

    def gpus(self) -> tuple[GpuSnapshot, ...]:
        """Return the GPUs of the other machines."""
        return tuple(gpu for node in self._nodes.values() for gpu in node.machine.gpus)

    def gpu_verdicts(self) -> tuple[Verdict, ...]:
        """Return the active findings about GPUs of the other machines."""
        return tuple(v for node in self._nodes.values() for v in node.machine.gpu_verdicts)

    def merged_evidence(self, own: Evidence | None, names: Mapping[int, str]) -> Evidence | None:
        """Return the latest evidence of all machines as one; ``own`` is that of this machine.

        ``names`` are those of the machines.
        """
        parts = {0: own, **{number: node.evidence for number, node in self._nodes.items()}}
        known = {number: part for number, part in parts.items() if part is not None}
        if not known:
            return None
        if self._merged is not None and _same_objects(self._merged[0], known):
            return self._merged[1]
        offsets = {number: node.offset for number, node in self._nodes.items()}
        merged = merge_evidence(
            known,
            {number: offset.monotonic_ns for number, offset in offsets.items()},
            {number: offset.wall_s for number, offset in offsets.items()},
            names,
        )
        self._merged = known, merged
        return merged

    def has_evidence_since(self, since_s: float) -> bool:
        """Return True if every machine that reports has sent evidence of after a monotonic time."""
        return all(
            node.evidence is not None
            and node.evidence.taken_ns + node.offset.monotonic_ns >= since_s * 1e9
            for node in self._nodes.values()
            if node.watch.state is NodeState.CONNECTED
        )

    def cpu_delays(self) -> dict[int, float]:
        """Return rank -> fraction of the last seconds in which it waited for a processor."""
        return {
            rank: usage.delay_share
            for node in self._nodes.values()
            for rank, usage in node.machine.usage.items()
            if usage.delay_share is not None
        }

    def failures(self) -> list[WorkerFailure]:
        """Return the ranks that failed on the other machines, as their engines report them."""
        return [f for n in self._nodes.values() if n.report is not None for f in n.report.failures]

    def last_line(self) -> str | None:
        """Return the line of a log of another machine that most likely states the error."""
        reports = (node.report for node in self._nodes.values())
        return next((r.last_line for r in reports if r is not None and r.last_line), None)

    def lost_engines(self) -> dict[int, EngineExit]:
        """Return how the engines of other machines ended that were killed, without a failed rank.

        Engines that were killed because the head has ended the attempt are left out.
        """
        reports = {n: node.report for n, node in self._nodes.items() if node.ended_by_itself}
        return {
            number: report.engine_exit
            for number, report in reports.items()
            if report is not None
            and not report.failures
            and report.engine_exit is not None
            and (report.engine_exit.signal or report.engine_exit.error)
        }

    def engines_ended(self, *, of_all: bool) -> bool:
        """Return True if every other engine has ended, or its machine is gone or never joined.

        ``of_all``: also of the machines that do not answer now.
        """
        return all(
            node.report is None
            or node.report.engine_exit is not None
            or node.report.error is not None
            or node.watch.state is NodeState.GONE
            or (not of_all and node.watch.state is not NodeState.CONNECTED)
            for node in self._nodes.values()
        )

    def all_killed(self) -> bool:
        """Return True if nothing of the attempt is left on any machine that can be reached."""
        return all(
            node.report is None or node.report.killed or node.watch.state is not NodeState.CONNECTED
            for node in self._nodes.values()
        )


def end_text(report: NodeReport) -> str:
    """Return how the engine of a report ended: by its first failed rank, if there is one."""
    end = report.engine_exit or EngineExit()
    first = next((f for f in report.failures if f.first), None)
    if first is not None and first.exit_code < 0:
        return f"rank {first.rank} was killed by signal {-first.exit_code}"
    if first is not None:
        error = f": {report.last_line}" if report.last_line else ""
        return f"rank {first.rank} exited with code {first.exit_code}{error}"
    return end.error or (f"signal {end.signal}" if end.signal else f"exit code {end.exit_code}")


def _same_objects(one: Mapping[int, object], other: Mapping[int, object]) -> bool:
    return one.keys() == other.keys() and all(one[k] is other[k] for k in one)
