"""The protocol between the agents and the head: reports and the orders that answer them.

An agent sends a report several times a second. The head answers each with orders, which describe
the complete state that it wants: nothing depends on an earlier message, so a message that is lost,
late or repeated changes nothing. What has to arrive (records, logs, evidence) is acknowledged in
the orders by position and is sent again until then.

Both messages are a list of frames. The first holds JSON; the others hold bytes whose meaning and
order the first one states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.shim_files import EngineExit
from ltui.training.nodes.link_limits import HEAD_LOST_S
from ltui.training.nodes.observations import MachineObservations, RankObservations
from ltui.training.state.json_decoder import from_json
from ltui.training.state.run_snapshot import to_json

_PARTS = 4
"""Number of frames of a report before those of logs."""
PROTOCOL = 1
"""Version of the protocol. Increase it with every change that the other side would misread."""


def own_version() -> str:
    """Return the version of ltui, which must be the same on all nodes of a run."""
    return version("ltui-train")


class MessageError(ValueError):
    """A message that is damaged or of another version of the protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    """Bytes of a log file of the attempt, in a frame of the message."""

    name: str
    """File name below the attempt's folder of logs."""
    at: int
    """Offset in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """Everything that an agent has to say."""

    node: int
    version: str
    """Version of ltui."""
    host: str
    machine_id: str = ""
    """Text that tells the agent's machine and directory from all others."""
    pid: int = 0
    address: str | None = None
    """Numeric address that leads to the head."""
    probe_port: int | None = None
    """Port on which the agent's machine accepts connections while the agent exists."""
    attempt: int = 0
    """Attempt of which it reports."""
    sent_ns: int = 0
    """CLOCK_MONOTONIC of its machine."""
    sent_at: float = 0.0
    """Unix time of its machine."""
    ranks: tuple[int, ...] = ()
    signal: int = 0
    """Number of a stop signal that a process of its node received; 0 if none."""
    engine_exit: EngineExit | None = None
    """How its engine ended; None while the engine runs."""
    failures: tuple[WorkerFailure, ...] = ()
    last_line: str | None = None
    """The line of a log of its node that most likely states the error."""
    error: str | None = None
    """Why its engine could not be started."""
    killed: bool = False
    """True if all processes of the attempt on its node have exited."""
    leaving: bool = False
    """True in the last report of an agent that was told to leave."""
    observations: RankObservations = field(default_factory=RankObservations)
    machine: MachineObservations | None = None
    """None if it was not read since the last report."""
    evidence_number: int = 0
    """Number of the round of evidence that the message holds; 0 if none."""
    logs: tuple[LogPart, ...] = ()
    """Parts of logs in the message, in the order of their frames."""


@dataclass(frozen=True, slots=True)
class ReportMessage:
    """A report with its binary parts."""

    report: NodeReport
    barrier: bytes = b""
    """Rows of the node's ranks in the table of the step consensus."""
    evidence: bytes = b""
    """``Evidence`` as JSON."""
    queues: bytes = b""
    """Parts of the ranks' queue files (``queue_chunk.pack_chunks``)."""
    logs: Sequence[tuple[LogPart, bytes]] = ()

    def encode(self) -> list[bytes]:
        """Return the frames of the message."""
        head = {"protocol": PROTOCOL, **to_json(self.report)}
        head["logs"] = [to_json(part) for part, _ in self.logs]
        return [
            json.dumps(head).encode(),
            self.barrier,
            self.evidence,
            self.queues,
            *(data for _, data in self.logs),
        ]

    @classmethod
    def decode(cls, frames: Sequence[bytes]) -> ReportMessage:
        """Return the message in ``frames``. Raise ``MessageError``."""
        report = from_json(NodeReport, _head(frames))
        if len(frames) != _PARTS + len(report.logs):
            raise MessageError("the number of its frames is wrong")
        logs = list(zip(report.logs, frames[_PARTS:], strict=True))
        return cls(report, frames[1], frames[2], frames[3], logs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOrder:
    """The stop that is in progress, as the head has escalated it."""

    elapsed_s: float
    """Seconds since it began."""
    timeout_s: float
    telemetry: bool
    kill_at_once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """The state that the head wants of one agent, and what it has received from it."""

    attempt: int = 0
    """Attempt whose engine is to run; 0 while none is to."""
    refusal: str | None = None
    """Sentence that says why the head does not accept this node. The agent then exits."""
    resume_from: str | None = None
    """Path of the checkpoint on node 0."""
    resume_step: int | None = None
    changes: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    """Nodes without which the attempt runs."""
    stop: StopOrder | None = None
    end: bool = False
    """True if the attempt is over: the agent kills what is left of it."""
    leave: bool = False
    """True if the run is over too: the agent exits after that."""
    urgent: bool = False
    """True while ranks wait for each other at a boundary: the agent reports often."""
    evidence: int = 0
    """Number of the latest round of evidence that is wanted; 0 before the first."""
    evidence_received: int = 0
    signal_received: bool = False
    head_lost_s: float = HEAD_LOST_S
    """Seconds without orders after which the agent ends its ranks."""
    logs: Mapping[str, int] = field(default_factory=dict)
    """Name of a log -> bytes that the head has of it."""


@dataclass(frozen=True, slots=True)
class OrdersMessage:
    """Orders, with the rows and the request of the step consensus."""

    orders: Orders
    barrier: bytes = b""
    queues: bytes = b""
    """How much of each rank's queue the head has (``queue_chunk.pack_positions``)."""

    def encode(self) -> list[bytes]:
        """Return the frames of the message."""
        head = {"protocol": PROTOCOL, **to_json(self.orders)}
        return [json.dumps(head).encode(), self.barrier, self.queues]

    @classmethod
    def decode(cls, frames: Sequence[bytes]) -> OrdersMessage:
        """Return the message in ``frames``. Raise ``MessageError``."""
        orders = from_json(Orders, _head(frames))
        if len(frames) != 3:
            raise MessageError("the number of its frames is wrong")
        return cls(orders, frames[1], frames[2])


def _head(frames: Sequence[bytes]) -> dict[str, Any]:
    try:
        document = json.loads(frames[0])
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise MessageError("its first frame is not JSON") from error
    if not isinstance(document, dict):
        raise MessageError("its first frame is not an object")
    if document.get("protocol") != PROTOCOL:
        raise MessageError(f"it has version {document.get('protocol')} of the protocol")
    return document
