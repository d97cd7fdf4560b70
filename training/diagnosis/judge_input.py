"""The input of ``judge``, and the history that it keeps from one call to the next. Pure.

``prepare`` adds the values that most rules need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import Evidence, Frame, HostEvidence, RankEvidence
from ltui.training.diagnosis.verdict_words import rank_machines, ranks_text
from ltui.training.shared.record_types import STEP_PHASES, Outcome, Phase, PulseState
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    NodeSnapshot,
    NodeState,
    RankState,
    Verdict,
)
from ltui.training.state.verdicts import VerdictKind

BEFORE_TRAINING = frozenset({Phase.UNKNOWN, Phase.STARTING, Phase.SETUP, Phase.SANITY})
"""Phases before the first training step."""
LIVE_STATES = frozenset({RankState.OK, RankState.STARTING})
"""States of ranks that train or are about to train."""
CLOCK_JUMP_S = 5.0
"""A longer gap in seconds between two judgements means that the supervisor itself was asleep."""
_SETTLED_NS = 700_000_000
"""Evidence is valid for a rank that had made no progress for this long when it was collected."""
_CLOCK_ERROR_NS = 200_000_000
"""Error in nanoseconds up to which clocks of several machines are compared."""
LOST_AFTER_S = 3.0
"""Age in seconds of a machine's last report beyond which its ranks cannot be observed any more.
A report that is a second or two late is common on a busy network."""
_LOST_STATES = frozenset(
    {NodeState.UNREACHABLE, NodeState.FROZEN, NodeState.AGENT_DEAD, NodeState.GONE}
)
MAY_BE_LATE = frozenset({NodeState.CONNECTED, NodeState.SILENT})
"""States in which it is not known why a report is late."""
RANKS_WITH_FACTS = 64
"""Maximum number of ranks about which a verdict contains facts, because verdicts are published
several times a second."""


class Death(Struct, frozen=True, kw_only=True):
    """How the process of one rank ended, as far as that could be observed."""

    signal: str | None = None
    """Name of the signal that ended it, such as ``SIGSEGV``."""
    exit_code: int | None = None
    frame: Frame | None = None
    """The line of user code that ran when the process crashed, from faulthandler."""
    last_line: str | None = None
    """The line of the rank's log that most likely contains the reason."""

    @property
    def text(self) -> str:
        """``killed by SIGSEGV``, ``exit code 3`` or ``its process is gone``."""
        if self.signal is not None:
            return f"killed by {self.signal}"
        return "its process is gone" if self.exit_code is None else f"exit code {self.exit_code}"


class HealthHistory(Struct, frozen=True, kw_only=True):
    """The state that ``judge`` keeps from one call to the next."""

    judged_ns: int | None = None
    """CLOCK_MONOTONIC of the last call."""
    forgiven_ns: int = 0
    """Time without progress before this instant does not count."""
    active: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts of the last call by ``verdict_key``; ``began`` is set in each."""
    places: Mapping[int, tuple[Phase, int]] = field(default_factory=dict)
    """rank -> (phase, nanosecond at which it last changed) at the last call."""
    longest_s: Mapping[Phase, float] = field(default_factory=dict)
    """The longest time that any rank made no progress in a phase and then continued."""
    drift_ns: tuple[int, int] | None = None
    """When ranks began to drift, and when they were last observed to drift."""
    straggling_since_ns: int | None = None
    evaluated: Mapping[int, int] = field(default_factory=dict)
    """rank -> batches of the last validation in which the rank was observed."""
    lost: frozenset[int] = frozenset()
    """Machines whose ranks could not be observed at the last call."""
    judged_s: float | None = None
    """Unix time of the last call."""
    clock_skews_s: Mapping[int, float] = field(default_factory=dict)
    """node -> seconds by which its clock was ahead of node 0's at the last call."""

    def active_of(self, kind: VerdictKind) -> Verdict | None:
        """Return an active verdict of this kind, or None."""
        return next((v for v in self.active.values() if v.kind == kind), None)


class JudgeInput(Struct, frozen=True, kw_only=True):
    """Everything that one judgement is based on."""

    now_ns: int
    """CLOCK_MONOTONIC, the clock of the pulses."""
    now_s: float | None = None
    """Unix time, for ``began`` and ``ended`` of verdicts."""
    policy: StallPolicy
    history: HealthHistory = field(default_factory=HealthHistory)
    """The history that the last judgement returned."""
    pulses: Mapping[int, PulseState | None]
    """The current status of every rank; None if the rank has not written one yet."""
    fold: FoldState = field(default_factory=FoldState)
    """Totals of the records of all ranks."""
    dead: frozenset[int] = frozenset()
    """Ranks whose process is gone although they had not finished."""
    deaths: Mapping[int, Death] = field(default_factory=dict)
    """How processes of ranks ended, as far as that is known."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid of its process that is stopped (SIGSTOP or a debugger). No budget applies."""
    stopped_workers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank -> pids of its DataLoader workers that are stopped."""
    silent_s: Mapping[int, float] = field(default_factory=dict)
    """Ranks that have a process but no pulse yet -> seconds since the process was first seen."""
    oom_kills: int | None = None
    """Processes that the kernel's out-of-memory killer ended recently; None if unknown."""
    cpu_delays: Mapping[int, float] = field(default_factory=dict)
    """rank -> fraction of the last seconds in which its main thread waited for a processor."""
    evidence: Evidence | None = None
    """The last evidence that was collected."""
    evidence_expected: bool = False
    """True if evidence will be collected for suspects, so pulses need not decide alone."""
    host: HostEvidence | None = None
    """The current condition of this machine."""
    nodes: Sequence[NodeSnapshot] = ()
    """The machines of a run on several machines, by number; empty on one machine."""
    hosts: Mapping[int, HostEvidence] = field(default_factory=dict)
    """node -> the current condition of that machine, of a run on several machines."""
    gpu_verdicts: Sequence[Verdict] = ()
    """Active findings about GPUs."""
    checkpoints: Sequence[CheckpointInfo] = ()
    """Checkpoints of the run, for advice about a loss that is NaN."""


def verdict_key(verdict: Verdict) -> str:
    """Return the key that identifies a verdict from one judgement to the next."""
    key = f"{verdict.kind} {','.join(map(str, verdict.culprits))}"
    return f"{key} @{','.join(map(str, verdict.nodes))}" if verdict.nodes else key


class PreparedInput(JudgeInput, frozen=True, kw_only=True):
    """The input of one judgement, with the state and the stillness of every rank."""

    still_s: Mapping[int, float]
    """rank -> seconds since its pulse last changed."""
    states: Mapping[int, RankState]
    settled: Mapping[int, RankEvidence]
    """Evidence of the ranks that have not moved since it was collected."""
    machines: Mapping[int, str]
    """rank -> name of its machine, as sentences name it; empty on one machine."""
    node_of: Mapping[int, int]
    """rank -> number of its machine; empty on one machine."""
    lost: Mapping[int, NodeSnapshot]
    """node -> machines whose ranks cannot be observed now; their state is ``UNKNOWN``."""

    @property
    def alive(self) -> dict[int, PulseState]:
        """Pulses of the ranks that train or are about to train."""
        return {
            r: p for r, p in self.pulses.items() if p is not None and self.states[r] in LIVE_STATES
        }

    @property
    def ended(self) -> list[int]:
        return [r for r, s in self.states.items() if s is RankState.ENDED]

    def ranks_text(self, ranks: Collection[int]) -> str:
        """Return ``rank 2``, or ``rank 2 on b`` in a run on several machines."""
        return ranks_text(ranks, self.machines)

    def oom_kills_of(self, rank: int) -> int | None:
        """Return how many processes the kernel ended recently on the machine of the rank."""
        host = self.hosts.get(self.node_of.get(rank, 0))
        return self.oom_kills if host is None or host.oom_kills is None else host.oom_kills

    def pulses_of(self, ranks: Iterable[int]) -> dict[int, PulseState]:
        """Return the pulses of those of ``ranks`` that have one."""
        return {r: p for r in ranks if (p := self.pulses.get(r)) is not None}

    def still_facts(self, ranks: Iterable[int]) -> dict[str, float]:
        """Return the seconds without progress, as the evidence of a verdict contains them."""
        observed = [r for r in ranks if r in self.still_s]
        return {str(r): round(self.still_s[r], 1) for r in observed[:RANKS_WITH_FACTS]}


def prepare(inputs: JudgeInput) -> PreparedInput:
    """Compute the values that rules share.

    After a clock jump, such as a suspended laptop, ranks get their whole budget again. So do all
    ranks when a machine is observed again that was not, because they may have waited for it.

    A rank of another machine is judged at the time of the last report from there: the age of the
    report is no time without progress. If that report is old, nothing is concluded about the rank.
    """
    history, lost = inputs.history, lost_machines(inputs.nodes)
    slept = history.judged_ns is not None and inputs.now_ns - history.judged_ns > CLOCK_JUMP_S * 1e9
    if slept or history.lost - lost.keys():
        history = replace(history, forgiven_ns=inputs.now_ns)
    given = {f: getattr(inputs, f) for f in JudgeInput.__struct_fields__}
    pulses = {**inputs.pulses, **dict.fromkeys(inputs.dead - inputs.pulses.keys())}
    given["history"] = history
    unseen = {rank for node in lost.values() for rank in node.ranks}
    if unseen:
        for name in ("stopped_pids", "stopped_workers", "silent_s", "cpu_delays"):
            given[name] = {r: value for r, value in given[name].items() if r not in unseen}
    ages_ns = report_ages_ns(inputs.nodes)
    seen_ns = {r: inputs.now_ns - ages_ns.get(r, 0) for r in inputs.pulses}
    states = {r: _initial_state(p, is_dead=r in inputs.dead) for r, p in pulses.items()}
    states.update({r: RankState.UNKNOWN for r in unseen if states.get(r) in LIVE_STATES})
    return PreparedInput(
        **given,
        still_s={
            r: max(0.0, (seen_ns[r] - max(p.changed_ns, history.forgiven_ns)) / 1e9)
            for r, p in inputs.pulses.items()
            if p is not None
        },
        states=states,
        settled=_settled_evidence(inputs.evidence, inputs.pulses, seen_ns),
        machines=rank_machines(inputs.nodes),
        node_of=rank_nodes(inputs.nodes),
        lost=lost,
    )


def rank_nodes(nodes: Sequence[NodeSnapshot]) -> dict[int, int]:
    """Return rank -> number of its machine; empty on one machine."""
    return {rank: node.node for node in nodes for rank in node.ranks}


def lost_machines(nodes: Sequence[NodeSnapshot]) -> dict[int, NodeSnapshot]:
    """Return number -> machine of those whose ranks cannot be observed now."""
    return {
        node.node: node
        for node in nodes
        if node.state in _LOST_STATES
        or (node.state in MAY_BE_LATE and (node.link_age_s or 0.0) > LOST_AFTER_S)
    }


def report_ages_ns(nodes: Sequence[NodeSnapshot]) -> dict[int, int]:
    """Return rank -> age in nanoseconds of the report that contains its pulse.

    Ranks of node 0, which the head observes itself, are left out.
    """
    return {
        rank: round(node.link_age_s * 1e9)
        for node in nodes
        if node.link_age_s is not None
        for rank in node.ranks
    }


def _initial_state(pulse: PulseState | None, *, is_dead: bool) -> RankState:
    if pulse is None:
        return RankState.DEAD if is_dead else RankState.STARTING
    if pulse.outcome is Outcome.RAISED or pulse.phase is Phase.EXCEPTION:
        return RankState.DEAD
    if pulse.outcome is not Outcome.RUNNING or pulse.phase is Phase.ENDED:
        return RankState.ENDED
    if is_dead:
        return RankState.DEAD
    if not pulse.telemetry_ok:
        return RankState.UNKNOWN
    if pulse.phase is Phase.PAUSED:
        return RankState.PAUSED
    return RankState.STARTING if pulse.phase in BEFORE_TRAINING else RankState.OK


def _settled_evidence(
    evidence: Evidence | None,
    pulses: Mapping[int, PulseState | None],
    seen_ns: Mapping[int, int],
) -> dict[int, RankEvidence]:
    """Return the evidence of the ranks that are still where they were when it was collected.

    ``seen_ns`` is when each pulse was read. A pulse that is older than the evidence does not show
    whether the rank has moved since.
    """
    if evidence is None:
        return {}
    settled = {}
    for rank, rank_evidence in evidence.ranks.items():
        pulse = pulses.get(rank)
        taken_ns = evidence.taken_of(rank)
        if pulse is None or (
            pulse.pid == rank_evidence.pid
            and pulse.changed_ns + _SETTLED_NS < taken_ns <= seen_ns[rank] + _CLOCK_ERROR_NS
        ):
            settled[rank] = rank_evidence
    return settled


def position_facts(pulses: Mapping[int, PulseState]) -> dict[str, Any]:
    """Return where the first ranks are, as the evidence of a verdict contains it."""
    return {
        str(rank): {
            "phase": pulse.phase.label,
            "epoch": pulse.known_epoch,
            "batch": pulse.batch if pulse.known_epoch is not None else None,
            "global_step": pulse.global_step,
        }
        for rank, pulse in islice(pulses.items(), RANKS_WITH_FACTS)
    }


def first_change_s(pulses: Mapping[int, PulseState]) -> float | None:
    """Return the unix time at which the first of the pulses last changed."""
    return min((p.changed_wall_s for p in pulses.values()), default=None)


def progress_key(pulse: PulseState) -> tuple[bool, int, int, int, int]:
    """Return a sort key for how far a rank is: optimizer steps, then the place within the batch.

    A rank that validates or saves after step g is behind one that already works on the batch after
    g. Its batch counter may be validation's own, so it is not compared.
    """
    batch = pulse.batch if pulse.phase in STEP_PHASES else -1
    started = pulse.phase not in BEFORE_TRAINING
    return started, pulse.global_step, pulse.epoch, batch, int(pulse.phase)
