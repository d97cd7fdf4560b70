"""Everything that one judgement looks at, put in order once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import Evidence, RankEvidence
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.tensor_queue.record_types import Outcome, Phase, PulseState

STEP_PHASES = frozenset(
    {
        Phase.FETCH,
        Phase.TRANSFER,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.BATCH_END,
    }
)
BEFORE_TRAINING = frozenset({Phase.UNKNOWN, Phase.STARTING, Phase.SETUP, Phase.SANITY})
LIVE_STATES = frozenset({RankState.OK, RankState.STARTING})
_SETTLED_NS = 700_000_000
"""Evidence counts for a rank that stood where it stands at least so long before it was taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthHistory:
    """What ``judge`` remembers between calls."""

    judged_ns: int | None = None
    forgiven_ns: int = 0
    """Stillness before this moment does not count."""
    active: Mapping[str, Verdict] = field(default_factory=dict)
    """By ``key_of``: the verdicts of the last call, with when they began."""
    places: Mapping[int, tuple[Phase, int]] = field(default_factory=dict)
    """rank -> (phase, since when in ns) at the last call."""
    longest_s: Mapping[Phase, float] = field(default_factory=dict)
    """The longest that any rank stood in a phase and went on."""
    drift_ns: tuple[int, int] | None = None
    """Since when ranks drift, and when they were last seen to."""
    straggling_since_ns: int | None = None
    evaluated: Mapping[int, int] = field(default_factory=dict)
    """rank -> batches of the last validation that it was seen at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedInput:
    now_ns: int
    now_s: float | None
    pulses: Mapping[int, PulseState | None]
    policy: StallPolicy
    history: HealthHistory
    fold: FoldState
    dead: Mapping[int, str]
    held: Mapping[int, int]
    held_workers: Mapping[int, tuple[int, ...]]
    still: Mapping[int, float]
    silent: Mapping[int, float]
    """Ranks that have a process and no pulse yet -> for how many seconds."""
    states: dict[int, RankState]
    evidence: Evidence | None
    close: Mapping[int, RankEvidence]
    """Of ``evidence``: the ranks that have not moved since."""
    devices: Sequence[Verdict] = ()
    """What is wrong with GPUs now."""
    delays: Mapping[int, float] = field(default_factory=dict)
    """rank -> share of the last seconds in which its main thread waited for a processor."""

    @property
    def alive(self) -> dict[int, PulseState]:
        """Ranks that train or are about to, and are judged."""
        return {
            r: p for r, p in self.pulses.items() if p is not None and self.states[r] in LIVE_STATES
        }

    @property
    def ended(self) -> list[int]:
        return [r for r, s in self.states.items() if s is RankState.ENDED]


def settled_evidence(
    evidence: Evidence | None, pulses: Mapping[int, PulseState | None]
) -> dict[int, RankEvidence]:
    """The ranks whose evidence still tells where they are."""
    if evidence is None:
        return {}
    found = {}
    for rank, of_rank in evidence.ranks.items():
        pulse = pulses.get(rank)
        if pulse is None or (
            pulse.pid == of_rank.pid and pulse.changed_ns + _SETTLED_NS < evidence.taken_ns
        ):
            found[rank] = of_rank
    return found


def initial_state(pulse: PulseState | None, rank: int, dead: Mapping[int, str]) -> RankState:
    """The state before stillness is looked at."""
    if pulse is None:
        return RankState.DEAD if rank in dead else RankState.STARTING
    if pulse.outcome is Outcome.RAISED or pulse.phase is Phase.EXCEPTION:
        return RankState.DEAD
    if pulse.outcome is not Outcome.RUNNING or pulse.phase is Phase.ENDED:
        return RankState.ENDED
    if rank in dead:
        return RankState.DEAD
    if not pulse.telemetry_ok:
        return RankState.UNKNOWN
    if pulse.phase is Phase.PAUSED:
        return RankState.PAUSED
    return RankState.STARTING if pulse.phase in BEFORE_TRAINING else RankState.OK


def position_facts(pulse: PulseState) -> dict[str, Any]:
    return {
        "phase": pulse.phase.label,
        "epoch": pulse.epoch,
        "batch": pulse.batch,
        "global_step": pulse.global_step,
    }


def progress_key(pulse: PulseState) -> tuple[bool, int, int, int, int]:
    """How far a rank is: optimizer steps first, then the place within the batch.

    A rank that validates or saves after step g is behind one that already works on the batch after
    g; its batch counter may be validation's own, so it is not compared.
    """
    batch = pulse.batch if pulse.phase in STEP_PHASES else -1
    started = pulse.phase not in BEFORE_TRAINING
    return started, pulse.global_step, pulse.epoch, batch, int(pulse.phase)


def verdict_key(verdict: Verdict) -> str:
    """What makes a verdict the same one from call to call."""
    return f"{verdict.kind} {','.join(map(str, verdict.culprits))}"
