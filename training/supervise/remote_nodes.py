"""The other machines of a run, as node 0 sees them through the reports of their agents.

Reports are received in a thread of the link, which writes records and logs into the run directory
and answers with the current orders. The supervisor's loop reads the observations and sets the
orders; both are immutable values that are only replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.diagnosis.evidence import Evidence, HostEvidence
from ltui.training.diagnosis.merge_evidence import merge_evidence
from ltui.training.lifecycle.attempt_plan import AttemptPlan
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.clock_offset import ClockOffset
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.join_messages import is_join
from ltui.training.nodes.join_offer import make_offer, training_versions
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.nodes.link_limits import head_lost_s, node_gone_s
from ltui.training.nodes.link_place import LinkPlace, read_link_place, write_link_place
from ltui.training.nodes.messages import (
    LogPart,
    MessageError,
    NodeReport,
    Orders,
    OrdersMessage,
    ReportMessage,
    StopOrder,
    own_version,
)
from ltui.training.nodes.node_places import NodePlaces
from ltui.training.nodes.node_watch import SILENT_AFTER_S, NodeWatch
from ltui.training.nodes.observations import MachineObservations, RankObservations
from ltui.training.nodes.probe import probe_all
from ltui.training.nodes.queue_chunk import pack_positions, unpack_chunks
from ltui.training.nodes.queue_mirror import QueueMirrors
from ltui.training.state.json_decoder import from_json
from ltui.training.state.run_event import Event
from ltui.training.state.run_snapshot import GpuSnapshot, NodeSnapshot, NodeState, Verdict
from ltui.training.store.run_directory import RunDir

_WATCH_S = 0.02
"""Seconds between two looks at the table of the step consensus."""
_EVIDENCE_S = 3.0
"""Least seconds between two requests of evidence."""
_DISMISS_S = 10.0
"""Seconds to wait until every agent that can be reached knows that the run is over."""
_PROBE_S = 1.0
"""Seconds between two probes of silent machines, and time limit of each."""
_SILENT_STATES = frozenset(
    {NodeState.SILENT, NodeState.UNREACHABLE, NodeState.FROZEN, NodeState.AGENT_DEAD}
)
_MAX_LOG_BYTES = 1 << 28
"""Size of a rank's log in the run directory from which on no more is copied."""


@dataclass(slots=True, eq=False)
class _RemoteNode:
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
    dismissed: bool = False
    """True if its agent has ended the attempt and was told that the run is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What the loop wants of all agents."""

    stop: StopEscalation | None = None
    end: bool = False
    leave: bool = False
    evidence: int = 0


class RemoteNodes:
    """All other machines of one attempt. Owned by the supervisor of node 0."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        attempt: int,
        plan: AttemptPlan,
    ) -> None:
        """Raise ``ProblemError`` if the port cannot be opened or the key is unusable."""
        assert spec.nodes is not None
        self._run_dir, self._spec, self._attempt = run_dir, spec, attempt
        self._layout: Nodes = spec.nodes
        self._orders = Orders(
            attempt=attempt,
            head_lost_s=head_lost_s(),
            resume_from=None if plan.resume_from is None else str(plan.resume_from),
            resume_step=plan.resume_step,
            changes=plan.changes,
        )
        self._version = own_version()
        self._began_s = time.monotonic()
        self._failed_at_s: float | None = None
        """Monotonic time since when an engine of another machine has failed."""
        self._evidence_requested_s = 0.0
        self._merged: tuple[dict[int, Evidence], Evidence] | None = None
        """The parts that were merged last, and the result."""
        self._training_versions: Mapping[str, str] = {}
        """Versions in the training interpreter; empty until it has answered."""
        self._wanted = _Wanted()
        self._events: list[Event] = []
        self._signal = 0
        self._closing = threading.Event()
        self._barrier = BarrierMirror(run_dir.queue_dir(attempt))
        self._mirrors = QueueMirrors(run_dir.queue_dir(attempt))
        gone_s = node_gone_s()
        self._nodes = {n: _RemoteNode(n, NodeWatch(gone_s)) for n in range(1, self._layout.count)}
        key = LinkKey.find(run_dir.path / KEY_FILE_NAME, os.environ)
        self._places = NodePlaces(
            run_id=run_dir.id,
            count=self._layout.count,
            version=self._version,
            offer=lambda node: make_offer(spec, node, self._training_versions),
        )
        # An earlier supervisor of the run may have let the kernel choose the port.
        stored = read_link_place(run_dir)
        port = self._layout.control_port if stored is None else stored.port
        self._link = HeadLink(key, self._layout.address, port, self._on_report, self._on_refused)
        write_link_place(run_dir, LinkPlace(self._link.address, self._link.port))
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._watch, "barrier watch"),
                (self._probe, "node probe"),
                (self._read_versions, "versions"),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- what the loop reads -------------------------------------------------------------------

    def update(self, now_s: float) -> list[Event]:
        """Update the state of the machines. Return what happened since the last call."""
        for node in self._nodes.values():
            change = node.watch.update(now_s, ended=self._has_ended(node))
            if change is not None:
                name = self.name(node.number)
                text = f"{name}: {change}."
                self._events.append(Event(time.time(), "node", text, {"node": node.number}))
        events, self._events = self._events, []
        return events

    def name(self, number: int) -> str:
        """Return the name of a machine for display, unique within the run."""
        return self._names()[number]

    def _names(self) -> dict[int, str]:
        hosts = {0: os.uname().nodename}
        for number, node in self._nodes.items():
            hosts[number] = node.report.host if node.report is not None else f"node {number}"
        names: dict[int, str] = {}
        for number, host in sorted(hosts.items()):
            same = sum(1 for other in range(number) if hosts.get(other) == host)
            names[number] = f"{host}#{same + 1}" if same else host
        return names

    def snapshots(self, local_ranks: Iterable[int]) -> tuple[NodeSnapshot, ...]:
        """Return all machines of the run by number, the own one included."""
        names = self._names()
        own = NodeSnapshot(
            node=0,
            name=names[0],
            host=names[0],
            address=self._link.address,
            state=NodeState.CONNECTED,
            ranks=tuple(local_ranks),
        )
        return (own, *(self._snapshot(node, names[n]) for n, node in self._nodes.items()))

    def _snapshot(self, node: _RemoteNode, name: str) -> NodeSnapshot:
        report, now_s, last_cut = node.report, time.monotonic(), node.watch.last_cut
        return NodeSnapshot(
            node=node.number,
            name=name,
            host=None if report is None else report.host,
            address=None if report is None else report.address,
            state=node.watch.state,
            ranks=() if report is None else report.ranks,
            link_age_s=node.watch.silent_s(now_s),
            clock_skew_s=None if report is None else -node.offset.wall_s,
            note=node.watch.note(now_s),
            cut_s=None if last_cut is None else last_cut.ended_s - last_cut.began_s,
            restored_s=None if last_cut is None else now_s - last_cut.ended_s,
        )

    def missing(self) -> tuple[int, ...]:
        """Return the machines whose agent has never reported in this attempt."""
        return tuple(n for n, node in self._nodes.items() if node.report is None)

    def waiting_text(self) -> str | None:
        """Return a sentence about the machines that are missing, or None if none is."""
        missing = self.missing()
        if not missing:
            return None
        names = ", ".join(f"node {n}" for n in missing)
        waited_s = time.monotonic() - self._began_s
        text = (
            f"waiting for {names} of {self._layout.count} to join, {waited_s:.0f} s of "
            f"{self._layout.join_timeout_s:.0f} s"
        )
        if self._layout.start != "by hand":
            return text
        key_file = self._run_dir.path / KEY_FILE_NAME
        return f"{text}; on each of them: ltui join {self.place} --key-file {key_file}"

    def silence_text(self) -> str | None:
        """Return which machines do not answer now, and why; None if all do."""
        silent = [(n, node.watch.state) for n, node in self._nodes.items() if _is_silent(node)]
        texts = []
        for number, state in silent:
            note = self._nodes[number].watch.note(time.monotonic())
            is_agent = state in (NodeState.FROZEN, NodeState.AGENT_DEAD)
            subject = f"{'the agent of ' if is_agent else ''}{self.name(number)}"
            texts.append(f"{subject} does not answer ({note})")
        return "; ".join(texts) or None

    def silent_ranks(self) -> frozenset[int]:
        """Return the ranks of machines that do not answer now: it is unknown how they ended."""
        reports = (node.report for node in self._nodes.values() if _is_silent(node))
        return frozenset(rank for report in reports if report is not None for rank in report.ranks)

    def failure(self, now_s: float, *, patience_s: float) -> str | None:
        """Return why the attempt cannot go on, or None.

        A machine did not join in time, could not start its engine, or is gone; or its engine has
        failed and the others have not ended within ``patience_s`` seconds.
        """
        missing = self.missing()
        if missing and now_s - self._began_s > self._layout.join_timeout_s:
            names = ", ".join(f"node {n}" for n in missing)
            return f"{names} did not join within {self._layout.join_timeout_s:.0f} s"
        failed = False
        for number, node in self._nodes.items():
            if node.watch.state is NodeState.GONE:
                return f"{self.name(number)} is gone ({node.watch.note(now_s)})"
            if node.report is None:
                continue
            if node.report.error is not None:
                return f"{self.name(number)} cannot run it: {node.report.error}"
            end = node.report.engine_exit
            if end is None or not (end.exit_code or end.signal or end.error):
                continue
            failed = True
            if self._failed_at_s is not None and now_s - self._failed_at_s > patience_s:
                return f"the engine of {self.name(number)} has ended"
        self._failed_at_s = (self._failed_at_s or now_s) if failed else None
        return None

    @property
    def place(self) -> str:
        """Return ``HOST:PORT`` of the link."""
        address = self._link.address
        return (
            f"[{address}]:{self._link.port}" if ":" in address else f"{address}:{self._link.port}"
        )

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
        return tuple(
            replace(gpu, node=number)
            for number, node in self._nodes.items()
            for gpu in node.machine.gpus
        )

    def gpu_verdicts(self) -> tuple[Verdict, ...]:
        """Return the active findings about GPUs of the other machines."""
        return tuple(
            replace(verdict, nodes=(number,))
            for number, node in self._nodes.items()
            for verdict in node.machine.gpu_verdicts
        )

    def merged_evidence(self, own: Evidence | None) -> Evidence | None:
        """Return the latest evidence of all machines as one; ``own`` is that of this machine."""
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
            self._names(),
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

    def stop_signal(self) -> int:
        """Return the number of a stop signal that a process of another machine received, or 0."""
        number, self._signal = self._signal, 0
        return number

    def _has_ended(self, node: _RemoteNode) -> bool:
        return node.report is not None and node.report.killed

    def engines_ended(self) -> bool:
        """Return True if every other engine has ended, or its machine is gone or never joined."""
        return all(
            node.report is None
            or node.report.engine_exit is not None
            or node.report.error is not None
            or node.watch.state is NodeState.GONE
            for node in self._nodes.values()
        )

    def all_killed(self) -> bool:
        """Return True if nothing of the attempt is left on any machine that can be reached."""
        return all(
            node.report is None or node.report.killed or node.watch.state is not NodeState.CONNECTED
            for node in self._nodes.values()
        )

    # -- what the loop wants -------------------------------------------------------------------

    def set_stop(self, escalation: StopEscalation | None) -> None:
        """Pass the stop that is in progress, or its end, on to all agents."""
        if escalation != self._wanted.stop:
            self._want(replace(self._wanted, stop=escalation))

    def end(self, *, leave: bool) -> None:
        """Let all agents end the attempt and, with ``leave``, exit."""
        self._want(replace(self._wanted, end=True, leave=leave))

    def request_evidence(self) -> None:
        """Let all agents collect evidence at once, but not more often than they can."""
        if time.monotonic() - self._evidence_requested_s < _EVIDENCE_S:
            return
        self._evidence_requested_s = time.monotonic()
        self._want(replace(self._wanted, evidence=self._wanted.evidence + 1))

    def dismiss(self) -> None:
        """Let all agents exit, because the run is over."""
        self.end(leave=True)
        deadline_s = time.monotonic() + _DISMISS_S
        present = (NodeState.CONNECTED, NodeState.ENDED)
        while time.monotonic() < deadline_s and not all(
            node.dismissed or node.watch.state not in present for node in self._nodes.values()
        ):
            time.sleep(_WATCH_S)

    def _want(self, wanted: _Wanted) -> None:
        self._wanted = wanted
        self._wake_all()

    def close(self) -> None:
        """Close the link and all files."""
        self._closing.set()
        self._link.close()
        for thread in self._threads:
            thread.join()
        self._barrier.close()
        self._mirrors.close()

    # -- the watching thread -------------------------------------------------------------------

    def _watch(self) -> None:
        """Ask the agents for reports as soon as rank 0 publishes a request."""
        request = None
        while not self._closing.wait(_WATCH_S):
            now_s = time.monotonic()
            silences = [
                node.watch.silent_s(now_s)
                for node in self._nodes.values()
                if node.watch.state is not NodeState.ENDED
            ]
            self._barrier.set_unreachable(sum((s or 0) > SILENT_AFTER_S for s in silences))
            current = self._barrier.request()
            if current != request:
                request = current
                self._wake_all()

    def _probe(self) -> None:
        """Probe the machines that are silent."""
        while not self._closing.wait(_PROBE_S):
            now_s = time.monotonic()
            due = {node: node.watch.target(now_s) for node in self._nodes.values()}
            targets = {node.number: place for node, place in due.items() if place is not None}
            for number, result in probe_all(targets, _PROBE_S).items():
                self._nodes[number].watch.probed(result, now_s)

    def _read_versions(self) -> None:
        self._training_versions = training_versions(self._spec)

    def _wake_all(self) -> None:
        for number in self._nodes:
            self._link.wake(str(number))

    # -- the thread of the link ----------------------------------------------------------------

    def _on_refused(self, sentence: str) -> None:
        self._events.append(Event(time.time(), "node_refused", sentence, {}))

    def _on_report(self, identity: str, frames: list[bytes]) -> list[bytes]:
        received_ns, received_at = time.monotonic_ns(), time.time()
        if is_join(frames):
            return self._places.answer(frames, received_ns / 1e9)
        try:
            message = ReportMessage.decode(frames)
            number = self._number(identity, message.report)
            if message.report.version != self._version:
                raise MessageError(
                    f"it runs ltui {message.report.version}, and node 0 runs ltui {self._version}"
                )
        except ValueError as error:
            return self._refuse(str(error))
        node = self._nodes[number]
        report = message.report
        if report.attempt != self._attempt:
            # It has not heard yet that another attempt has begun.
            return OrdersMessage(self._orders).encode()
        node.offset.update(report.sent_ns, report.sent_at, received_ns, received_at)
        node.watch.heard(received_ns / 1e9, report.address, report.probe_port)
        self._take(node, message)
        return self._answer(node).encode()

    def _number(self, identity: str, report: NodeReport) -> int:
        """Return the number of the machine. Raise ``MessageError`` if it has no place."""
        if identity != str(report.node):
            raise MessageError(f"it reports as node {report.node} with the identity {identity}")
        reason = self._places.reported(report.node, report.machine_id, report.host, report.pid)
        if reason is not None:
            raise MessageError(reason)
        return report.node

    def _refuse(self, reason: str) -> list[bytes]:
        self._on_refused(f"A node was refused: {reason}.")
        return OrdersMessage(Orders(refusal=reason)).encode()

    def _take(self, node: _RemoteNode, message: ReportMessage) -> None:
        """Store everything that a report brings."""
        report = message.report
        with contextlib.suppress(ValueError):  # A damaged part is not acknowledged.
            chunks = dict(unpack_chunks(message.queues))
            self._mirrors.apply(node.number, chunks, node.offset.monotonic_ns, node.offset.wall_s)
        for part, data in message.logs:
            self._append_log(node, part, data)
        with contextlib.suppress(ValueError):
            self._barrier.merge(message.barrier, node.number)
        if message.evidence and report.evidence_number > node.evidence_number:
            with contextlib.suppress(ValueError):
                node.evidence = from_json(Evidence, json.loads(message.evidence))
            node.evidence_number = report.evidence_number
        if report.signal and not node.signal_received:
            self._signal = report.signal
        node.signal_received = bool(report.signal)
        if report.machine is not None:
            node.machine = report.machine
        node.report = report

    def _append_log(self, node: _RemoteNode, part: LogPart, data: bytes) -> None:
        name = os.path.basename(part.name)
        if name == "engine.log":
            name = f"engine-{node.number}.log"
        path = self._run_dir.logs_dir(self._attempt) / name
        size = node.logs.get(part.name)
        if size is None:
            size = node.logs[part.name] = path.stat().st_size if path.exists() else 0
        fresh = data[max(0, size - part.at) :] if part.at <= size else b""
        if not fresh or size + len(fresh) > _MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError), open(path, "ab", opener=_open_private) as file:
            file.write(fresh)
            node.logs[part.name] = size + len(fresh)

    def _answer(self, node: _RemoteNode) -> OrdersMessage:
        wanted = self._wanted
        stop = None
        if wanted.stop is not None:
            stop = StopOrder(
                elapsed_s=time.monotonic() - wanted.stop.began_s,
                timeout_s=wanted.stop.timeout_s,
                telemetry=wanted.stop.telemetry,
                kill_at_once=wanted.stop.kill_at_once,
            )
        orders = replace(
            self._orders,
            stop=stop,
            end=wanted.end,
            leave=wanted.leave,
            urgent=self._barrier.is_open(),
            evidence=wanted.evidence,
            evidence_received=node.evidence_number,
            signal_received=node.signal_received,
            logs=dict(node.logs),
        )
        node.dismissed = wanted.leave and self._has_ended(node)
        positions = pack_positions(self._mirrors.positions(node.number))
        return OrdersMessage(orders, self._barrier.export(node.number), positions)


def _same_objects(one: Mapping[int, object], other: Mapping[int, object]) -> bool:
    return one.keys() == other.keys() and all(one[k] is other[k] for k in one)


def _is_silent(node: _RemoteNode) -> bool:
    return node.watch.state in _SILENT_STATES


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
