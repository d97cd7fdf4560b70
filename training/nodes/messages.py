"""The protocol between the other machines of a run and the head: messages, periods and limits.

An agent sends a report several times a second. The head answers each with orders, which describe
the complete state that it wants: nothing depends on an earlier message, so a message that is lost,
late or repeated changes nothing. What has to arrive (records, logs, evidence) is acknowledged in
the orders by position and is sent again until then.

A machine that has no agent yet asks for a place in the run. ``ltui join`` sends a ``JoinRequest``.
The head answers with a ``JoinOffer``, which contains the specification of the run, or with a
``JoinRefusal``. A machine that cannot run the specification sends a ``JoinDecline``; otherwise it
starts its agent, whose first report takes the place.

Everything that needs /proc, a signal or a driver is observed on the machine itself: an agent sends
its observations, and node 0 only merges them with its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge_input import Death
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.lifecycle.supervisor_client import AttemptPlan, to_path
from ltui.training.nodes.queue_tail import LogPart, QueueChunk, QueuePosition
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.process_activity import RankUsage
from ltui.training.state.run_snapshot import GpuSnapshot, Verdict

SAME_VERSION = "Install the same version of ltui on every node."
"""Remedy if a message of another machine cannot be used."""
NODE_GONE_VARIABLE = "LTUI_NODE_GONE_S"
HEAD_LOST_VARIABLE = "LTUI_HEAD_LOST_S"

NODE_GONE_S = 300.0
"""Seconds without a report after which the ranks of an unreachable machine count as lost.

A shorter cut of the link ends nothing: the connections of the training survive it.
"""
HEAD_LOST_S = 600.0
"""Seconds without orders after which an agent ends its ranks.

Without the head nobody could stop them, and they would hold their GPUs for ever.
"""
_REPORT_S = 0.25
"""Seconds between two reports of an agent."""
_URGENT_S = 0.03
"""Seconds between two reports while ranks wait for each other at a boundary."""
_READINGS_S = 1.0
"""Seconds between two reports with readings of the machine."""
_REPORTS_PER_S = 125.0
_URGENT_REPORTS_PER_S = 650.0
"""Reports of all agents together in a second from which on each reports less often."""
_LONGEST_REPORT_S = 1.0
"""Longest time between two reports. It must be clearly below the silence that is noticed."""


def report_period_s(nodes: int, *, urgent: bool) -> float:
    """Return the seconds between two reports of an agent in a run on ``nodes`` machines.

    ``urgent``: ranks wait for each other at a boundary.
    """
    shortest_s, per_s = (
        (_URGENT_S, _URGENT_REPORTS_PER_S) if urgent else (_REPORT_S, _REPORTS_PER_S)
    )
    return min(max(shortest_s, nodes / per_s), _LONGEST_REPORT_S)


def readings_period_s(nodes: int) -> float:
    """Return the seconds between two reports with readings of the machine and its processes."""
    return max(_READINGS_S, 2 * report_period_s(nodes, urgent=False))


def node_gone_s() -> float:
    """Return ``LTUI_NODE_GONE_S``, or ``NODE_GONE_S`` if it is not set or no positive number."""
    return _seconds(NODE_GONE_VARIABLE, NODE_GONE_S)


def head_lost_s() -> float:
    """Return ``LTUI_HEAD_LOST_S``, or ``HEAD_LOST_S`` if it is not set or no positive number."""
    return _seconds(HEAD_LOST_VARIABLE, HEAD_LOST_S)


def _seconds(variable: str, default: float) -> float:
    try:
        seconds = float(os.environ.get(variable, default))
    except ValueError:
        return default
    return seconds if math.isfinite(seconds) and seconds > 0 else default


def own_version() -> str:
    """Return the version of ltui, which must be the same on all nodes of a run."""
    return version("ltui-train")


# -- what a machine observes -----------------------------------------------------------------------

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Number of a rank, of which a file of node 0 has its name."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

MIN_SHIFT_S = 0.5
"""Seconds from which the clocks of two machines differ for the times of readings."""


class RankObservations(Struct, frozen=True, kw_only=True):
    """What was observed of the processes of ranks. Sent in every report."""

    dead: frozenset[int] = frozenset()
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
    activity: Mapping[Rank, tuple[_Count, _Count, _Count, _Count, _Count]] = field(
        default_factory=dict
    )
    """What the heartbeat threads of its ranks have counted (``RankActivity``)."""
    host: HostEvidence | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
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
        dead=frozenset(rank for part in parts for rank in part.dead),
        deaths={rank: death for part in parts for rank, death in part.deaths.items()},
        stopped_pids={rank: pid for part in parts for rank, pid in part.stopped_pids.items()},
        stopped_workers={r: pids for part in parts for r, pids in part.stopped_workers.items()},
        silent_s={rank: s for part in parts for rank, s in part.silent_s.items()},
        oom_kills=sum(oom) if oom else None,
    )


# -- messages --------------------------------------------------------------------------------------


class MessageError(ValueError):
    """A message that is damaged or that the head does not accept."""


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
    """Time (``taken_ns``) of the newest evidence of the machine; 0 if there is none."""


class ReportMessage(Struct, tag="report", frozen=True):
    """A report with everything that the head does not have yet."""

    report: NodeReport
    barrier: bytes = b""
    """Rows of the node's ranks in the table of the step consensus."""
    evidence: bytes = b""
    """``Evidence`` as JSON."""
    queues: Mapping[Rank, QueueChunk] = field(default_factory=dict)
    """Parts of the ranks' queue files."""
    logs: tuple[LogPart, ...] = ()


class Orders(Struct, frozen=True, kw_only=True):
    """The state that the head wants of one agent, and what it has received from it."""

    attempt: int = 0
    """Attempt whose engine is to run; 0 while none is to."""
    refusal: str | None = None
    """Sentence that says why the head does not accept this node. The agent then exits."""
    plan: AttemptPlan = AttemptPlan()
    """That attempt. Its checkpoint is a path on node 0."""
    stop: StopEscalation | None = None
    """The stop that is in progress. Its ``began_s`` is negative: it counts from these orders on."""
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


class OrdersMessage(Struct, tag="orders", frozen=True):
    """Orders, with the rows and the request of the step consensus."""

    orders: Orders
    barrier: bytes = b""
    queues: Mapping[int, QueuePosition] = field(default_factory=dict)
    """How much of each rank's queue the head has."""


class JoinRequest(Struct, tag="request", frozen=True, kw_only=True):
    """A machine asks to become a node of the run."""

    version: str
    """Version of ltui on the machine."""
    host: str
    """Host name of the machine."""
    machine: str
    """Text that tells this machine and its ``$LTUI_HOME`` from all others, also after a restart of
    ltui."""
    pid: int
    node: int | None = None
    """Number of the node that it wants to be; None for the lowest free number."""


class JoinOffer(Struct, tag="offer", frozen=True, kw_only=True):
    """The head offers a place: the number of a node, and what to run."""

    run_id: str
    node: int
    spec: str
    """Specification of the run as YAML, with ``nodes.rank`` of this node."""
    versions: Mapping[str, str]
    """Versions of Python, torch and Lightning in the head's training interpreter."""
    files: tuple[str, ...] = ()
    """Files and folders that the configuration names and that exist on the head."""
    head: str = ""
    """Host name of the head."""
    plan: AttemptPlan = AttemptPlan()
    """The attempt that the head runs. Its checkpoint is a path on the head."""


class JoinRefusal(Struct, tag="refusal", frozen=True, kw_only=True):
    """The head refuses the machine."""

    what: str
    """One sentence that says why."""
    remedy: str | None = None


class JoinDecline(Struct, tag="decline", frozen=True, kw_only=True):
    """A machine returns the place that it was offered."""

    node: int
    machine: str
    reason: str = ""
    """Why the machine cannot run the specification, in one line."""


Message: TypeAlias = (
    ReportMessage | OrdersMessage | JoinRequest | JoinOffer | JoinRefusal | JoinDecline
)
_DECODER = msgspec.msgpack.Decoder(Message, dec_hook=to_path)


def encode(message: Message) -> bytes:
    """Return the payload of a message."""
    try:
        return msgspec.msgpack.encode(message, enc_hook=os.fsencode)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=os.fsencode)
        return msgspec.msgpack.encode(_with_valid_text(plain))


def _with_valid_text(value: Any) -> Any:
    """Replace what is not UTF-8 in texts, which may contain the name of any file."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_with_valid_text(key): _with_valid_text(v) for key, v in value.items()}
    return [_with_valid_text(v) for v in value] if isinstance(value, (list, tuple)) else value


def decode(payload: bytes) -> Message:
    """Return the message that ``encode`` wrote. Raise ``MessageError``."""
    try:
        message: Message = _DECODER.decode(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"its message is damaged ({error!s:.100})") from error
    return message
