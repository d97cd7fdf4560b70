"""The agent of one machine of a run on several: it starts the engine there and reports to the head.

An agent does what a supervisor does on its machine: it starts the shim and the engine, reads the
queues of its ranks, samples processes and GPUs, collects evidence, and escalates a stop. It writes
no history, and judges only to choose of which ranks it collects evidence: verdicts about ranks are
given on node 0, whose orders it carries out. Training never waits for the link: if it is cut, the
agent keeps what is in the queues and continues to try.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.config.run_spec import Nodes
from ltui.training.diagnosis.evidence import shorten_for_link
from ltui.training.diagnosis.judge import Judgement
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.delete_runs import mark_delivered
from ltui.training.lifecycle.elastic_log import likely_error_line, log_tail, worker_failures
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.nodes.messages import (
    MachineObservations,
    NodeReport,
    Orders,
    OrdersMessage,
    ReportMessage,
    decode,
    encode,
    head_lost_s,
    own_version,
    readings_period_s,
    report_period_s,
)
from ltui.training.nodes.node_address import LinkPlace, machine_id, read_link_place
from ltui.training.nodes.node_watch import SILENT_AFTER_S, ProbeSocket
from ltui.training.nodes.queue_tail import LogTails, QueueChunk, QueuePosition, QueueTails
from ltui.training.problem import ProblemError
from ltui.training.process.identity import release_lock
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.live_attempt import LiveAttempt

ANSWER_S = 1.0
"""Seconds to wait for the orders that answer a report."""
_FAILED_START_S = 15.0
"""Seconds to wait until the head has answered that the engine could not be started."""
_LAST_REPORTS_S = 60.0
"""Seconds for which an agent whose engine has ended tries to report that.

If the run may be restarted, it waits for as long as it would for a lost head.
"""
_LOST_REPORTS_S = 5.0
"""The same for an agent that has ended its ranks because the head is lost."""


class NodeAgent:
    """The agent of one attempt. It has the methods that ``main.py`` needs of a supervisor."""

    restart_waits = False

    def __init__(self, live: LiveAttempt) -> None:
        self.live = live
        spec, run_dir, attempt = live.spec, live.run_dir, live.number
        assert spec.nodes is not None
        self._node, self._nodes = spec.nodes.rank, spec.nodes.count
        self._version = own_version()
        self._machine_id = machine_id(run_dir.home)
        live.begin(time.time())
        queue_dir = run_dir.queue_dir(attempt)
        self._barrier = BarrierMirror(queue_dir)
        self._tails = QueueTails(queue_dir)
        self._chunks: Mapping[int, QueueChunk] = {}
        """The parts of the queues in the last report."""
        self._acknowledged: Mapping[int, QueuePosition] = {}
        self._logs = LogTails(run_dir.logs_dir(attempt))
        self._orders = Orders(attempt=attempt, head_lost_s=head_lost_s())
        self._answered_s = time.monotonic()
        self._machine: MachineObservations | None = None
        self._read_at = 0.0
        self._evidence_number = 0
        self._evidence_requested = 0
        self._evidence = b""
        self._received_signal = 0
        self._judgement: Judgement | None = None
        self._link = _link_to_head(run_dir, spec.nodes)
        self._probe: ProbeSocket | None = None
        self._address = self._link.local_address
        if self._address is not None:
            with contextlib.suppress(OSError):
                self._probe = ProbeSocket(self._address)

    def request_stop(self, number: int) -> None:
        """Pass a stop signal on to the head. Called by the handler of signal ``number``."""
        self._received_signal = number

    def abort(self) -> None:
        """Exit without an engine, because nothing was started."""
        self._close()

    def run(self) -> AttemptPlan | None:
        """Run the attempt until the head ends it. Return the plan of the next one, or None."""
        try:
            plan = self._finish(self._supervise())
        except BaseException:
            # The lock stays as that of a process that has died, so that another one continues.
            self.live.close()
            raise
        self._close(keep_lock=plan is not None)
        return plan

    # -- the loop ------------------------------------------------------------------------------

    def _supervise(self) -> EngineExit | None:
        """Run the loop until the engine ends or the shim dies. Return how the engine ended."""
        while True:
            begun_s = time.monotonic()
            self._observe()
            self._exchange(self._report())
            silent_s = time.monotonic() - self._answered_s
            self._barrier.set_unreachable(int(silent_s > SILENT_AFTER_S))
            self._carry_out()
            if not self.live.shim.is_running():
                return self.live.shim.end()
            urgent = self._orders.urgent or self._barrier.is_open()
            pause_s = report_period_s(self._nodes, urgent=urgent)
            self._link.woken(max(0.0, pause_s - (time.monotonic() - begun_s)))

    def _observe(self) -> None:
        """Read the queues, and less often the machine."""
        live, now_s = self.live, time.time()
        poll = live.poll()
        self._observations = live.evidence.observe(poll)
        live.sample_machine(now_s)
        live.update_state(now_s)
        if time.monotonic() - self._read_at >= readings_period_s(self._nodes):
            self._read_at = time.monotonic()
            self._judgement = live.judge(poll)
            live.build_snapshot(self._judgement, now_s)
            machine = live.machine
            self._machine = MachineObservations(
                processes=machine.unreported_processes,
                usage=machine.readings,
                activity=live.limits.activity(),
                host=live.evidence.host,
                gpus=tuple(replace(gpu, node=self._node) for gpu in machine.gpu_view.gpus),
                gpu_verdicts=tuple(replace(v, nodes=(self._node,)) for v in machine.gpu_verdicts),
            )
        if self._judgement is not None:
            live.evidence.update(self._judgement, poll, live.fold, live.snapshot)
        evidence = live.evidence.rounds.evidence
        if evidence is not None and evidence.taken_ns != self._evidence_number:
            self._evidence_number = evidence.taken_ns
            self._evidence = json.dumps(to_json(shorten_for_link(evidence))).encode()

    def _report(self) -> NodeReport:
        return NodeReport(
            node=self._node,
            version=self._version,
            host=socket.gethostname(),
            machine_id=self._machine_id,
            pid=os.getpid(),
            address=self._address,
            probe_port=None if self._probe is None else self._probe.port,
            attempt=self.live.number,
            sent_ns=time.monotonic_ns(),
            sent_at=time.time(),
            ranks=tuple(sorted({*self.live.pulses, *self.live.machine.rank_processes})),
            signal=self._received_signal or self.live.stops.signal_of_rank(),
            observations=self._observations,
            machine=self._machine,
            evidence_number=self._evidence_number,
        )

    def _exchange(self, report: NodeReport) -> bool:
        """Send a report with everything that the head does not have yet, and store its orders.

        Return True if it was answered.
        """
        pending = self._evidence if self._evidence_number > self._orders.evidence_received else b""
        self._chunks = self._tails.chunks(self._acknowledged)
        message = ReportMessage(
            report, self._barrier.export(), pending, self._chunks, self._logs.parts()
        )
        payload = self._link.exchange(encode(message), ANSWER_S)
        if payload is None:
            return False
        try:
            answer = decode(payload)
            if not isinstance(answer, OrdersMessage):
                return False
            if answer.orders.attempt == self.live.number:
                self._acknowledged = answer.queues
                self._logs.acknowledge(answer.orders.logs)
                self._barrier.merge(answer.barrier)
        except ValueError:
            return False  # A damaged answer is like none: the report is repeated.
        self._orders = answer.orders
        self._answered_s = time.monotonic()
        self._machine = None
        return True

    def _carry_out(self) -> None:
        """Carry out the orders: stop, collect evidence, end."""
        live, orders, now_s = self.live, self._orders, time.monotonic()
        if orders.signal_received:
            self._received_signal = 0
        if orders.evidence > self._evidence_requested:
            self._evidence_requested = orders.evidence
            live.evidence.rounds.request_diagnosis()
        stop = orders.stop
        if stop is not None:
            current = live.stops.escalation
            began_s = self._answered_s + stop.began_s if current is None else current.began_s
            live.stops.escalation = replace(stop, began_s=began_s)
        elif not self._head_is_lost():
            live.stops.escalation = None
        if (
            self._head_is_lost()
            or orders.end
            or orders.attempt > self.live.number
            or orders.refusal
        ):
            live.stops.kill(now_s)
        live.stops.escalate(now_s, live.pulses, live.engine(), live.machine.unreported_processes)

    def _head_is_lost(self) -> bool:
        return time.monotonic() - self._answered_s > self._orders.head_lost_s

    # -- the end -------------------------------------------------------------------------------

    def _finish(self, end: EngineExit | None) -> AttemptPlan | None:
        """Kill what is left, report the end, and wait until the head has everything."""
        live = self.live
        live.kill_processes()
        log = log_tail(self.live.run_dir.engine_log_path(self.live.number))
        failures = tuple(worker_failures(log))
        poll = live.last_poll()
        self._observations = live.evidence.observe(poll, failures)
        report = replace(
            self._report(),
            engine_exit=end or EngineExit(error="its shim process was killed"),
            failures=failures,
            last_line=likely_error_line(log, self.live.run_dir, self.live.number, failures),
            killed=True,
        )
        patience_s = _LOST_REPORTS_S
        if not self._head_is_lost():
            restarts = self.live.spec.restarts or self.live.spec.stall.then == "restart"
            patience_s = self._orders.head_lost_s if restarts else _LAST_REPORTS_S
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            report = replace(report, sent_ns=time.monotonic_ns(), sent_at=time.time())
            if not self._exchange(report):
                if self._orders.leave:
                    break  # node 0 has ended, and has said so before
                continue
            deadline_s = time.monotonic() + patience_s
            orders = self._orders
            complete = not any(chunk.data for chunk in self._chunks.values())
            logs_left = bool(self._logs.parts())
            if orders.refusal is not None:
                break
            if orders.leave and complete and not (logs_left and self._logs.advanced):
                self._exchange(replace(report, leaving=True))
                if not logs_left:
                    mark_delivered(self.live.run_dir)
                break
            if orders.attempt > self.live.number:
                return self._next_attempt(orders)
            if logs_left and self._logs.advanced:
                continue
            self._link.woken(report_period_s(self._nodes, urgent=False))
        self.live.run_dir.engine_final_path(self.live.number).touch()
        return None

    def _next_attempt(self, orders: Orders) -> AttemptPlan:
        """Return the plan of the attempt that the head has begun."""
        self.live.run_dir.engine_final_path(self.live.number).touch()
        return replace(
            orders.plan.on_another_node(), restarted_because="the run was restarted on node 0"
        )

    def _close(self, *, keep_lock: bool = False) -> None:
        self.live.close()
        self._link.close()
        self._barrier.close()
        self._tails.remove_acknowledged(self._acknowledged)
        self._tails.close()
        if self._probe is not None:
            self._probe.close()
        self.live.store.close()
        if not keep_lock:
            release_lock(self.live.lock)


def report_failed_start(run_dir: RunDir, attempt: int, error: Exception) -> None:
    """Tell the head why the engine of ``attempt`` could not be started on this node."""
    nodes = run_dir.read_spec().nodes
    if nodes is None:
        return
    report = NodeReport(
        node=nodes.rank,
        version=own_version(),
        host=socket.gethostname(),
        machine_id=machine_id(run_dir.home),
        pid=os.getpid(),
        attempt=attempt,
        sent_ns=time.monotonic_ns(),
        sent_at=time.time(),
        error=str(error).splitlines()[0],
    )
    with (
        contextlib.suppress(ProblemError),
        contextlib.closing(_link_to_head(run_dir, nodes)) as link,
    ):
        link.exchange(encode(ReportMessage(report)), _FAILED_START_S)


def _link_to_head(run_dir: RunDir, nodes: Nodes) -> AgentLink:
    """Raise ``ProblemError`` if the key is unusable."""
    place = read_link_place(run_dir) or LinkPlace(nodes.address, nodes.control_port)
    key = LinkKey.find(run_dir.path / KEY_FILE_NAME, os.environ)
    return AgentLink(key, place.address, place.port, str(nodes.rank))
