"""Take the reports of agents: store what they bring, and answer with the current orders.

Runs in the thread of the link. The loop sets ``wanted``, an immutable value that is only replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ltui.training.diagnosis.evidence import Evidence
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.join_messages import is_join
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
from ltui.training.nodes.queue_chunk import pack_positions, unpack_chunks
from ltui.training.nodes.queue_mirror import QueueMirrors
from ltui.training.state.json_decoder import from_json
from ltui.training.state.run_event import Event
from ltui.training.store.run_directory import RunDir, open_private_log
from ltui.training.supervise.nodes.node_reports import RemoteNode

_MAX_LOG_BYTES = 1 << 28
"""Size of a rank's log in the run directory from which on no more is copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the loop wants of all agents."""

    stop: StopEscalation | None = None
    end: bool = False
    leave: bool = False
    evidence: int = 0


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
        self.wanted = Wanted()
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

    def report(self, identity: str, frames: list[bytes]) -> list[bytes]:
        """Take a message of an agent or of ``ltui join``. Return the answer."""
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
        self.refused(f"A node was refused: {reason}.")
        return OrdersMessage(Orders(refusal=reason)).encode()

    def _take(self, node: RemoteNode, message: ReportMessage) -> None:
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
            self.signal = report.signal
        node.signal_received = bool(report.signal)
        if report.machine is not None:
            node.machine = report.machine.with_times_shifted(node.offset.wall_s)
        if report.engine_exit is not None and not self.wanted.end:
            node.ended_by_itself = True
        node.has_left = report.leaving
        node.report = report

    def _append_log(self, node: RemoteNode, part: LogPart, data: bytes) -> None:
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
        with contextlib.suppress(OSError), open_private_log(path) as file:
            file.write(fresh)
            node.logs[part.name] = size + len(fresh)

    def _answer(self, node: RemoteNode) -> OrdersMessage:
        wanted = self.wanted
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
        positions = pack_positions(self._mirrors.positions(node.number))
        return OrdersMessage(orders, self._barrier.export(node.number), positions)
