"""What the other machines of a run have reported last.

Written by the thread of the link, read by the supervisor's loop.

Take the reports of agents: store what they bring, and answer with the current orders. Runs in the
thread of the link. The loop sets ``wanted``, an immutable value that is only replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Evidence, HostEvidence, merge_evidence
from ltui.training.json_codec import from_json, parse_json
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.link_wire import RefusalLog
from ltui.training.nodes.messages import (
    JoinDecline,
    JoinRequest,
    MachineObservations,
    MessageError,
    NodeReport,
    Orders,
    OrdersMessage,
    RankObservations,
    ReportMessage,
    decode,
    encode,
    own_version,
)
from ltui.training.nodes.node_places import NodePlaces
from ltui.training.nodes.node_watch import ClockOffset, NodeWatch
from ltui.training.nodes.queue_mirror import QueueMirrors
from ltui.training.nodes.queue_tail import LogPart
from ltui.training.process.process_activity import RankUsage
from ltui.training.state.run_snapshot import Event, GpuSnapshot, NodeState, Verdict
from ltui.training.store.run_directory import RunDir, open_private_log
from ltui.training.tensor_queue.heartbeat_table import RankActivity


class RemoteNode(Struct, eq=False):
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

    def usage(self) -> dict[int, RankUsage]:
        """Return what the ranks of the other machines use."""
        return {r: u for node in self._nodes.values() for r, u in node.machine.usage.items()}

    def activity(self) -> dict[int, RankActivity]:
        """Return what the heartbeat threads of the ranks of the other machines have counted."""
        return {
            rank: RankActivity(*counts)
            for node in self._nodes.values()
            if node.report is not None
            for rank, counts in node.machine.activity.items()
            if rank in node.report.ranks
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


_MAX_LOG_BYTES = 1 << 28
"""Size of a rank's log in the run directory from which on no more is copied."""


class ReportIntake:
    """Takes the reports of all agents of one attempt."""

    def __init__(
        self,
        run_dir: RunDir,
        orders: Orders,
        nodes: Mapping[int, RemoteNode],
        places: NodePlaces,
        barrier: BarrierMirror,
    ) -> None:
        """``orders`` are those of an agent that has not reported yet."""
        self._run_dir, self._orders, self._attempt = run_dir, orders, orders.attempt
        self._nodes, self._places, self._barrier = nodes, places, barrier
        self._mirrors = QueueMirrors(run_dir.queue_dir(orders.attempt))
        self._version = own_version()
        self._refusals = RefusalLog()
        self.wanted = orders
        """What the loop wants of all agents."""
        self.events = deque[Event]()
        """What happened since the loop last took them. Both threads append."""
        self.signal = 0
        """Number of a stop signal that a process of another machine received; 0 if none."""

    def close(self) -> None:
        """Close the mirrors of the queues."""
        self._mirrors.close()

    def take_events(self) -> list[Event]:
        """Return what happened since the last call."""
        return [self.events.popleft() for _ in range(len(self.events))]

    def refused(self, sentence: str) -> None:
        """Record that the link refused a peer."""
        self.events.append(Event(time.time(), "node_refused", sentence, {}))

    def report(self, identity: str, payload: bytes) -> bytes:
        """Take a message of an agent or of ``ltui join``. Return the answer."""
        received_ns, received_at = time.monotonic_ns(), time.time()
        try:
            message = decode(payload)
            if isinstance(message, (JoinRequest, JoinDecline)):
                return encode(self._places.answer(message, received_ns / 1e9))
            if not isinstance(message, ReportMessage):
                raise MessageError("its message is no report")
            number = self._number(identity, message.report)
            if message.report.version != self._version:
                raise MessageError(
                    f"it runs ltui {message.report.version}, and node 0 runs ltui {self._version}"
                )
        except MessageError as error:
            return self._refuse(str(error))
        node = self._nodes[number]
        report = message.report
        if report.attempt != self._attempt:
            # It has not heard yet that another attempt has begun.
            return encode(OrdersMessage(self._orders))
        node.offset.update(report.sent_ns, report.sent_at, received_ns, received_at)
        node.watch.heard(received_ns / 1e9, report.address, report.probe_port)
        self._take(node, message)
        return encode(self._answer(node))

    def _number(self, identity: str, report: NodeReport) -> int:
        """Return the number of the machine. Raise ``MessageError`` if it has no place."""
        if identity != str(report.node):
            raise MessageError(f"it reports as node {report.node} with the identity {identity}")
        reason = self._places.reported(report.node, report.machine_id, report.host, report.pid)
        if reason is not None:
            raise MessageError(reason)
        return report.node

    def _refuse(self, reason: str) -> bytes:
        if self._refusals.add("a node", reason, time.monotonic()) is not None:
            self.refused(f"A node was refused: {reason}.")
        return encode(OrdersMessage(Orders(refusal=reason)))

    def _take(self, node: RemoteNode, message: ReportMessage) -> None:
        """Store everything that a report brings."""
        report = message.report
        with contextlib.suppress(ValueError):  # A damaged part is not acknowledged.
            for chunk in message.queues.values():
                chunk.check()
            offset = node.offset
            self._mirrors.apply(node.number, message.queues, offset.monotonic_ns, offset.wall_s)
        for part in message.logs:
            self._append_log(node, part)
        with contextlib.suppress(ValueError):
            self._barrier.merge(message.barrier, node.number)
        if message.evidence and report.evidence_number > node.evidence_number:
            with contextlib.suppress(ValueError):
                node.evidence = from_json(Evidence, parse_json(message.evidence))
            node.evidence_number = report.evidence_number
        if report.signal and not node.signal_received:
            self.signal = report.signal
        node.signal_received = bool(report.signal)
        if report.machine is not None:
            node.machine = report.machine.with_times_shifted(node.offset.wall_s)
        if report.engine_exit is not None and not self.wanted.end:
            node.ended_by_itself = True
        node.has_left = report.leaving
        node.report = report

    def _append_log(self, node: RemoteNode, part: LogPart) -> None:
        name = os.path.basename(part.name)
        if name == "engine.log":
            name = f"engine-{node.number}.log"
        path = self._run_dir.logs_dir(self._attempt) / name
        size = node.logs.get(part.name)
        if size is None:
            size = node.logs[part.name] = path.stat().st_size if path.exists() else 0
        fresh = part.data[max(0, size - part.at) :] if part.at <= size else b""
        if not fresh or size + len(fresh) > _MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError), open_private_log(path) as file:
            file.write(fresh)
            node.logs[part.name] = size + len(fresh)

    def _answer(self, node: RemoteNode) -> OrdersMessage:
        stop = self.wanted.stop
        orders = replace(
            self.wanted,
            stop=stop and replace(stop, began_s=stop.began_s - time.monotonic()),
            urgent=self._barrier.is_open(),
            evidence_received=node.evidence_number,
            signal_received=node.signal_received,
            logs=dict(node.logs),
        )
        positions = self._mirrors.positions(node.number)
        return OrdersMessage(orders, self._barrier.export(node.number), positions)
