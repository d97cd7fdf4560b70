"""The protocol between the agents and the head: reports and the orders that answer them.

An agent sends a report several times a second. The head answers each with orders, which describe
the complete state that it wants: nothing depends on an earlier message, so a message that is lost,
late or repeated changes nothing. What has to arrive (records, logs, evidence) is acknowledged in
the orders by position and is sent again until then.

Both messages are a list of frames. The first holds JSON; the others hold bytes whose meaning and
order the first one states.

Observations of one machine about its ranks and itself, and their union over all machines. The
supervisor of node 0 makes them of its own machine. An agent makes them of its machine and sends
them to node 0. Everything that needs /proc, a signal or a driver is observed on the machine itself;
node 0 only merges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge_input import Death
from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.nodes.link_limits import HEAD_LOST_S
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import RankUsage
from ltui.training.state.run_snapshot import GpuSnapshot, Verdict

MIN_SHIFT_S = 0.5
"""Seconds from which the clocks of two machines differ for the times of readings."""


class RankObservations(Struct, frozen=True, kw_only=True):
    """What was observed of the processes of ranks. Sent in every report."""

    dead: tuple[int, ...] = ()
    """Ranks whose process has ended although they had not finished."""
    deaths: Mapping[int, Death] = field(default_factory=dict)
    """How processes of ranks ended, as far as that is known."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid of a process that is stopped (SIGSTOP or a debugger)."""
    stopped_workers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank -> pids of its children that are stopped."""
    silent_s: Mapping[int, float] = field(default_factory=dict)
    """Ranks that have a process but no pulse -> seconds since the process was first seen."""
    oom_kills: int | None = None
    """Recent out-of-memory kills on the machine; None if none of its ranks is dying."""


class MachineObservations(Struct, frozen=True, kw_only=True):
    """What was read of the machine and its processes. Not in every report."""

    processes: Mapping[int, ProcessIdentity] = field(default_factory=dict)
    """Processes of ranks that have not sent a pulse."""
    usage: Mapping[int, RankUsage] = field(default_factory=dict)
    host: HostEvidence | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
    gpu_note: str | None = None
    gpu_verdicts: tuple[Verdict, ...] = ()

    def with_times_shifted(self, seconds: float) -> MachineObservations:
        """Return the same readings with ``seconds`` added to their unix times.

        Differences that no screen shows are left, so that the readings of a thousand GPUs are
        seldom copied.
        """
        if abs(seconds) < MIN_SHIFT_S:
            return self
        return replace(
            self,
            gpus=tuple(
                replace(gpu, sampled_at=_shifted(gpu.sampled_at, seconds)) for gpu in self.gpus
            ),
            gpu_verdicts=tuple(
                replace(verdict, began=_shifted(verdict.began, seconds))
                for verdict in self.gpu_verdicts
            ),
        )


def _shifted(unix_time: float | None, seconds: float) -> float | None:
    """Return a unix time of one machine on the clock of another; None remains None."""
    return None if unix_time is None else unix_time + seconds


def merge_ranks(parts: Iterable[RankObservations]) -> RankObservations:
    """Return the observations of all machines together. A rank runs on one machine only."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    oom = [part.oom_kills for part in parts if part.oom_kills is not None]
    return RankObservations(
        dead=tuple(sorted(rank for part in parts for rank in part.dead)),
        deaths={rank: death for part in parts for rank, death in part.deaths.items()},
        stopped_pids={rank: pid for part in parts for rank, pid in part.stopped_pids.items()},
        stopped_workers={r: pids for part in parts for r, pids in part.stopped_workers.items()},
        silent_s={rank: s for part in parts for rank, s in part.silent_s.items()},
        oom_kills=sum(oom) if oom else None,
    )


_PARTS = 4
"""Number of frames of a report before those of logs."""
PROTOCOL = 1
"""Version of the protocol. Increase it with every change that the other side would misread."""


def own_version() -> str:
    """Return the version of ltui, which must be the same on all nodes of a run."""
    return version("ltui-train")


class MessageError(ValueError):
    """A message that is damaged or of another version of the protocol."""


class LogPart(Struct, frozen=True, kw_only=True):
    """Bytes of a log file of the attempt, in a frame of the message."""

    name: str
    """File name below the attempt's folder of logs."""
    at: int
    """Offset in the file."""


class NodeReport(Struct, frozen=True, kw_only=True):
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


class ReportMessage(Struct, frozen=True):
    """A report with its binary parts."""

    report: NodeReport
    barrier: bytes = b""
    """Rows of the node's ranks in the table of the step consensus."""
    evidence: bytes = b""
    """``Evidence`` as JSON."""
    queues: bytes = b""
    """Parts of the ranks' queue files (``queue_tail.pack_chunks``)."""
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


class StopOrder(Struct, frozen=True, kw_only=True):
    """The stop that is in progress, as the head has escalated it."""

    elapsed_s: float
    """Seconds since it began."""
    timeout_s: float
    telemetry: bool
    kill_at_once: bool = False


class Orders(Struct, frozen=True, kw_only=True):
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


class OrdersMessage(Struct, frozen=True):
    """Orders, with the rows and the request of the step consensus."""

    orders: Orders
    barrier: bytes = b""
    queues: bytes = b""
    """How much of each rank's queue the head has (``queue_tail.pack_positions``)."""

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
        document = parse_json(frames[0])
    except (IndexError, ValueError) as error:
        raise MessageError("its first frame is not JSON") from error
    if not isinstance(document, dict):
        raise MessageError("its first frame is not an object")
    if document.get("protocol") != PROTOCOL:
        raise MessageError(f"it has version {document.get('protocol')} of the protocol")
    return document
