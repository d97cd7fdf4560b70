"""Verdicts: the kinds of problems that the judge can report, and how they change over time.

The kinds compare equal to the plain strings that runs store and send, so a kind that was read from
a file is used without conversion. Kinds of a later version stay plain strings. The tracker says
which verdicts are new, which have ended, and which have lasted long enough to act on. The one-line
headline of a verdict is here too, so that all user interfaces show the same. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import BLOCKING_LEVELS, StallPolicy, severity
from ltui.training.state.run_snapshot import Verdict


class VerdictKind(str, Enum):
    """Kinds of problems of a run. The values are stored and must not change.

    Each group names the level that its kinds usually have; a verdict's level may rise with time.
    """

    # Dead: a rank has ended.
    KILLED = "killed"
    """A signal ended the rank."""
    OUT_OF_MEMORY = "out_of_memory"
    RAISED = "raised"
    """The rank raised an exception."""
    EXITED = "exited"
    """The rank exited, with or without an exit code that is known."""
    WORKER_DIED = "worker_died"
    """A DataLoader worker ended."""
    NODE_GONE = "node_gone"
    """A machine was unreachable for longer than the limit, so its ranks count as lost."""

    # Stalled: the run makes no progress.
    STOPPED = "stopped"
    """The rank is stopped by SIGSTOP or a debugger."""
    WORKER_STOPPED = "worker_stopped"
    """A DataLoader worker is stopped by SIGSTOP or a debugger."""
    DISK = "disk"
    """The rank waits in uninterruptible disk I/O."""
    GIL_HELD = "gil_held"
    FROZEN = "frozen"
    """The rank does not move and uses no processor time."""
    BUSY = "busy"
    """The rank uses processor time without progress."""
    WAITS_FOR_GPU = "waits_for_gpu"
    """The GPU does not finish its kernels, or its driver does not answer."""
    WORKER_FROZEN = "worker_frozen"
    WORKER_BUSY = "worker_busy"
    MISMATCH = "mismatch"
    """Ranks called different collectives, or the same one with different arguments."""
    UNEVEN = "uneven"
    """Ranks have different numbers of batches."""
    LEFT_EARLY = "left_early"
    """A rank left its epoch before the planned number of batches."""
    FINISHED_EARLY = "finished_early"
    """A rank finished training while others still train."""
    UNUSED_PARAMETERS = "unused_parameters"
    """DDP waits for gradients of parameters that were not used."""
    SIGTERM = "sigterm"
    """The rank received SIGTERM and hangs in Lightning's handler, which calls a collective."""
    RENDEZVOUS = "rendezvous"
    """Ranks have not joined the process group."""
    TRANSPORT = "transport"
    """All ranks wait in the same collective."""
    UNKNOWN = "unknown"
    """The evidence does not show a cause."""

    # Slow: the run makes progress.
    STRAGGLER = "straggler"
    """One rank is slower than the others."""
    SLOW_RANK = "slow_rank"
    """One rank advances while the others wait for it."""
    SLOW_DATA = "slow_data"
    """All ranks wait for their data loaders."""
    SLOW_STEP = "slow_step"
    """All ranks compute, or the machine is overloaded."""
    COMPILING = "compiling"
    """A rank compiles code (torch.compile, Triton, Numba) while the others wait."""
    CHECKPOINT = "checkpoint"
    """A rank writes a checkpoint while the others wait."""
    SLOW_NODE = "slow_node"
    """All ranks of one machine are slower than those of the others."""

    # Warning: the run is not affected yet.
    NOT_EXITING = "not_exiting"
    """A rank finished training and its process does not exit."""
    DRIFT = "drift"
    """Ranks are at different epochs or batches at the same step."""
    DIVERGING = "diverging"
    """A rank called a collective that the others did not, so later collectives will not match."""
    MEMORY = "memory"
    """The machine or container is almost out of memory."""
    SHARED_MEMORY = "shared_memory"
    """``/dev/shm`` is almost full, or a worker died because it was."""
    NAN_LOSS = "nan_loss"
    """The loss is not finite."""
    NODE_UNREACHABLE = "node_unreachable"
    """A machine does not answer: its link is cut, or it is down."""
    AGENT_KILLED = "agent_killed"
    """A machine answers and no agent runs there."""
    AGENT_FROZEN = "agent_frozen"
    """A machine answers but its agent does not run."""
    CLOCK_JUMP = "clock_jump"
    """The wall clock of a machine was set to another time."""

    __str__ = str.__str__


GPU_KIND_PREFIX = "gpu_"
"""Kinds that begin with this are findings about a GPU (``training/gpu/findings.py``)."""


def is_gpu_kind(kind: str) -> bool:
    """Return True if a verdict of this kind is about a GPU and not about a rank."""
    return kind.startswith(GPU_KIND_PREFIX)


def most_severe_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sort verdicts: active before ended, then by level, then the oldest first."""
    return sorted(
        verdicts,
        key=lambda v: (v.ended is not None, severity(v.level), v.began is None, v.began or 0.0),
    )


def headline(verdict: Verdict) -> str:
    """Return a line such as ``STALLED: rank 2 makes no progress in forward``.

    It contains text that the run wrote: remove control characters before showing it.
    """
    return f"{verdict.level.upper()}: {verdict.cause}"


class ActiveVerdict(Struct, frozen=True):
    """A verdict that has not ended, with its newest wording."""

    verdict: Verdict
    since_s: float
    """Monotonic seconds when it was first seen, or when its level became more severe."""
    reported_level: str | None = None
    """The most severe level at which it was reported; None until it is reported."""

    @property
    def reported(self) -> bool:
        return self.reported_level is not None


class VerdictTracker(Struct, frozen=True):
    """The active verdicts, from one judgement to the next."""

    active: tuple[ActiveVerdict, ...] = ()

    def update(
        self, current: Sequence[Verdict], now_s: float, monotonic_s: float, *, settle_s: float = 0.0
    ) -> tuple[VerdictTracker, list[Verdict], list[Verdict]]:
        """Return the next tracker, the verdicts to report now, and the reported ones that ended.

        A verdict is reported once it has lasted ``settle_s`` seconds, because the death of a rank
        is seen before its cause is known. It is reported again if it becomes more severe.
        ``now_s`` is the unix time that ended verdicts get as ``ended``.
        """
        unmatched, active, to_report = list(self.active), [], []
        for verdict in current:
            if verdict.ended is not None:
                continue
            previous = next((a for a in unmatched if _is_same(a.verdict, verdict)), None)
            if previous is not None:
                unmatched.remove(previous)
            if previous is None or severity(verdict.level) < severity(previous.verdict.level):
                reported_level = None if previous is None else previous.reported_level
                entry = ActiveVerdict(verdict, monotonic_s, reported_level)
            else:
                entry = replace(previous, verdict=verdict)
            is_news = entry.reported_level is None or severity(verdict.level) < severity(
                entry.reported_level
            )
            if is_news and monotonic_s - entry.since_s >= settle_s:
                to_report.append(verdict)
                entry = replace(entry, reported_level=verdict.level)
            active.append(entry)
        ended = [_ended(a.verdict, now_s) for a in unmatched if a.reported]
        return VerdictTracker(tuple(active)), to_report, ended

    def verdict_to_act_on(self, policy: StallPolicy, monotonic_s: float) -> Verdict | None:
        """Return the most severe verdict that has lasted ``policy.then_after_s`` seconds.

        Return None if there is none, or if the policy only reports verdicts.
        """
        if policy.then not in ("stop", "restart"):
            return None
        candidates = [
            a.verdict
            for a in self.active
            if a.verdict.level in BLOCKING_LEVELS and monotonic_s - a.since_s >= policy.then_after_s
        ]
        return most_severe_first(candidates)[0] if candidates else None


def _ended(verdict: Verdict, now_s: float) -> Verdict:
    return replace(verdict, ended=max(now_s, verdict.began or now_s))


def _is_same(one: Verdict, other: Verdict) -> bool:
    """Return True if both describe one problem; its wording and known cause may have changed."""
    if (one.nodes or other.nodes) and not one.culprits and not other.culprits:
        return one.kind == other.kind and bool({*one.nodes} & {*other.nodes})
    if one.kind == other.kind and one.began == other.began:
        return True
    if one.culprits != other.culprits or one.level != other.level:
        return False
    return (one.kind, one.place) == (other.kind, other.place) or (
        one.level in BLOCKING_LEVELS and bool(one.culprits)
    )


def is_superseded(verdict: Verdict, others: Sequence[Verdict]) -> bool:
    """Return True if another verdict on the same problem began with this one and lasted longer."""
    return any(
        (o.culprits, o.nodes, o.level) == (verdict.culprits, verdict.nodes, verdict.level)
        and o.kind != verdict.kind
        and abs((o.began or 0.0) - (verdict.began or 0.0)) < 1.0
        and (o.ended is None or (verdict.ended is not None and o.ended > verdict.ended))
        for o in others
    )


def triggers_hook(verdict: Verdict, policy: StallPolicy) -> bool:
    """Return True if the policy's ``on_verdict`` is to be called for the verdict."""
    return policy.on_verdict is not None and severity(verdict.level) <= severity(
        policy.on_verdict_level
    )
