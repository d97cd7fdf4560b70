"""The other machines of a run, as node 0 sees them through the reports of their agents.

A thread of the link takes the reports (``node_reports.py``). The supervisor's loop reads there what
they brought, and says here what it wants of the agents.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.diagnosis.evidence import Evidence
from ltui.training.diagnosis.verdict_words import rank_machines, ranks_text, verb
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.nodes.messages import Orders, head_lost_s, node_gone_s, own_version
from ltui.training.nodes.node_address import (
    LinkPlace,
    format_host_and_port,
    read_link_place,
    write_link_place,
)
from ltui.training.nodes.node_places import NodePlaces, make_offer, training_versions
from ltui.training.nodes.node_watch import RECONNECT_S, SILENT_AFTER_S, NodeWatch, probe_all
from ltui.training.state.run_snapshot import Event, NodeSnapshot, NodeState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.node_reports import NodeReports, RemoteNode, ReportIntake, end_text

_WATCH_S = 0.02
"""Seconds between two looks at the table of the step consensus."""
_AWAITED_S = 1.0
"""Seconds after which ranks for which others wait are named."""
_EVIDENCE_S = 3.0
"""Least seconds between two requests of evidence."""
_DISMISS_S = 10.0
"""Seconds to wait until every agent that can be reached knows that the run is over."""
_PROBE_S = 1.0
"""Seconds between two probes of silent machines, and time limit of each."""
_SILENT_STATES = frozenset(
    {NodeState.SILENT, NodeState.UNREACHABLE, NodeState.FROZEN, NodeState.AGENT_DEAD}
)


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
        self._run_dir, self._spec = run_dir, spec
        self._layout: Nodes = spec.nodes
        orders = Orders(
            attempt=attempt,
            head_lost_s=head_lost_s(),
            plan=AttemptPlan(
                number=attempt,
                resume_from=plan.resume_from,
                resume_step=plan.resume_step,
                changes=plan.changes,
                left_out=spec.nodes.left_out,
            ),
        )
        self._began_s = time.monotonic()
        self._recovered = plan.recover
        self._failed_at_s: float | None = None
        """Monotonic time since when an engine of another machine has failed."""
        self._awaited: tuple[list[int], float] = [], self._began_s
        """Ranks for which the others wait, and monotonic time since when."""
        self._evidence_requested_s = 0.0
        self._training_versions: Mapping[str, str] = {}
        """Versions in the training interpreter; empty until it has answered."""
        self._closing = threading.Event()
        self._barrier = BarrierMirror(run_dir.queue_dir(attempt))
        gone_s = node_gone_s()
        others = self._layout.present[1:]
        self._nodes = {n: RemoteNode(n, NodeWatch(gone_s)) for n in others}
        self.reports = NodeReports(self._nodes)
        key = LinkKey.find(run_dir.path / KEY_FILE_NAME, os.environ)
        self._places = NodePlaces(
            run_id=run_dir.id,
            count=self._layout.count,
            left_out=self._layout.left_out,
            version=own_version(),
            offer=lambda node: make_offer(spec, node, self._training_versions, orders),
        )
        self._intake = ReportIntake(run_dir, orders, self._nodes, self._places, self._barrier)
        # An earlier supervisor of the run may have let the kernel choose the port.
        stored = read_link_place(run_dir)
        port = self._layout.control_port if stored is None else stored.port
        address = self._layout.address
        self._link = HeadLink(key, address, port, self._intake.report, self._intake.refused)
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

    def update(self, now_s: float, *, is_requested: bool) -> list[Event]:
        """Update the state of the machines. Return what happened since the last call.

        ``is_requested``: there is a request on which not all ranks have acted.
        """
        awaited = self._barrier.missing_ranks(is_requested=is_requested)
        if awaited != self._awaited[0]:
            self._awaited = awaited, now_s
        for node in self._nodes.values():
            change = node.watch.update(now_s, ended=node.has_ended)
            if change is not None:
                name = self.name(node.number)
                text = f"{name}: {change}."
                self._intake.events.append(Event(time.time(), "node", text, {"node": node.number}))
        return self._intake.take_events()

    def name(self, number: int) -> str:
        """Return the name of a machine for display, unique within the run."""
        return self._names()[number]

    def _names(self) -> dict[int, str]:
        hosts = {0: os.uname().nodename}
        for number, node in self._nodes.items():
            hosts[number] = node.report.host if node.report is not None else f"node {number}"
        names: dict[int, str] = {}
        count = Counter[str]()
        for number, host in sorted(hosts.items()):
            count[host] += 1
            names[number] = f"{host}#{count[host]}" if count[host] > 1 else host
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

    def _snapshot(self, node: RemoteNode, name: str) -> NodeSnapshot:
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
        if self._recovered and waited_s < RECONNECT_S:
            return f"waiting for {names} of {self._layout.count} to report again"
        text = (
            f"waiting for {names} of {self._layout.count} to join, {waited_s:.0f} s of "
            f"{self._layout.join_timeout_s:.0f} s{self._places.declined_text(missing)}"
        )
        if self._layout.start != "by hand":
            return text
        key_file = self._run_dir.path / KEY_FILE_NAME
        return f"{text}; on each of them: ltui join {self.place} --key-file {key_file}"

    def awaited_text(self, local_ranks: Iterable[int]) -> str | None:
        """Return for which ranks the others wait at a boundary or for a checkpoint, or None."""
        ranks, since_s = self._awaited
        if not ranks or time.monotonic() - since_s < _AWAITED_S:
            return None
        machines = rank_machines(self.snapshots(local_ranks))
        return f"{ranks_text(ranks, machines)} {verb(ranks, 'is', 'are')} missing"

    def delays_text(self, local_ranks: Iterable[int]) -> str | None:
        """Return what delays a request: ranks that are missing, machines that do not answer."""
        texts = (self.awaited_text(local_ranks), self.silence_text())
        return "; ".join(text for text in texts if text) or None

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

    def gone(self) -> tuple[int, ...]:
        """Return the machines that are gone."""
        return tuple(n for n, node in self._nodes.items() if node.watch.state is NodeState.GONE)

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
            reasons = self._places.declined_text(missing)
            return f"{names} did not join within {self._layout.join_timeout_s:.0f} s{reasons}"
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
                name = self.name(number)
                if end.signal is not None and not node.report.failures:
                    return f"on {name} the launcher was killed by signal {end.signal}"
                return f"the launcher of {name} has ended ({end_text(node.report)})"
        self._failed_at_s = (self._failed_at_s or now_s) if failed else None
        return None

    @property
    def place(self) -> str:
        """Return ``HOST:PORT`` of the link."""
        return format_host_and_port(self._link.address, self._link.port)

    def merged_evidence(self, own: Evidence | None) -> Evidence | None:
        """Return the latest evidence of all machines as one; ``own`` is that of this machine."""
        return self.reports.merged_evidence(own, self._names())

    def stop_signal(self) -> int:
        """Return the number of a stop signal that a process of another machine received, or 0."""
        number, self._intake.signal = self._intake.signal, 0
        return number

    # -- what the loop wants -------------------------------------------------------------------

    def set_stop(self, escalation: StopEscalation | None) -> None:
        """Pass the stop that is in progress, or its end, on to all agents."""
        if escalation != self._intake.wanted.stop:
            self._want(replace(self._intake.wanted, stop=escalation))

    def end(self, *, leave: bool) -> None:
        """Let all agents end the attempt and, with ``leave``, exit."""
        self._want(replace(self._intake.wanted, end=True, leave=leave))

    def request_evidence(self) -> None:
        """Let all agents collect evidence at once, but not more often than they can."""
        if time.monotonic() - self._evidence_requested_s < _EVIDENCE_S:
            return
        self._evidence_requested_s = time.monotonic()
        self._want(replace(self._intake.wanted, evidence=self._intake.wanted.evidence + 1))

    def dismiss(self) -> None:
        """Let all agents exit, because the run is over, and wait until they have said so."""
        self.end(leave=True)
        deadline_s = time.monotonic() + _DISMISS_S
        present = (NodeState.CONNECTED, NodeState.ENDED)
        while time.monotonic() < deadline_s and not all(
            node.has_left or node.watch.state not in present for node in self._nodes.values()
        ):
            time.sleep(_WATCH_S)

    def _want(self, wanted: Orders) -> None:
        self._intake.wanted = wanted
        self._wake_all()

    def close(self) -> None:
        """Close the link and all files."""
        self._closing.set()
        self._link.close()
        for thread in self._threads:
            thread.join(_PROBE_S)  # the training interpreter may still be starting
        self._barrier.close()
        self._intake.close()

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


def _is_silent(node: RemoteNode) -> bool:
    return node.watch.state in _SILENT_STATES
