"""The judge's input with the values that most rules need, computed once. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ltui.training.diagnosis.evidence import Evidence, RankEvidence
from ltui.training.diagnosis.judge_input import (
    BEFORE_TRAINING,
    LIVE_STATES,
    STEP_PHASES,
    JudgeInput,
)
from ltui.training.state.run_snapshot import RankState
from ltui.training.tensor_queue.record_types import Outcome, Phase, PulseState

CLOCK_JUMP_S = 5.0
"""A longer gap in seconds between two judgements means that the supervisor itself was asleep."""
_SETTLED_NS = 700_000_000
"""Evidence is valid for a rank that had made no progress for this long when it was collected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedInput(JudgeInput):
    """The input of one judgement, with the state and the stillness of every rank."""

    still_s: Mapping[int, float]
    """rank -> seconds since its pulse last changed."""
    states: Mapping[int, RankState]
    settled: Mapping[int, RankEvidence]
    """Evidence of the ranks that have not moved since it was collected."""

    @property
    def alive(self) -> dict[int, PulseState]:
        """Pulses of the ranks that train or are about to train."""
        return {
            r: p for r, p in self.pulses.items() if p is not None and self.states[r] in LIVE_STATES
        }

    @property
    def ended(self) -> list[int]:
        return [r for r, s in self.states.items() if s is RankState.ENDED]


def prepare(inputs: JudgeInput) -> PreparedInput:
    """Compute the values that rules share.

    After a clock jump, such as a suspended laptop, ranks get their whole budget again.
    """
    history = inputs.history
    if history.judged_ns is not None and inputs.now_ns - history.judged_ns > CLOCK_JUMP_S * 1e9:
        history = replace(history, forgiven_ns=inputs.now_ns)
    given = {f.name: getattr(inputs, f.name) for f in fields(JudgeInput)}
    given["history"] = history
    return PreparedInput(
        **given,
        still_s={
            r: max(0.0, (inputs.now_ns - max(p.changed_ns, history.forgiven_ns)) / 1e9)
            for r, p in inputs.pulses.items()
            if p is not None
        },
        states=_initial_states(inputs.pulses, inputs.dead),
        settled=_settled_evidence(inputs.evidence, inputs.pulses),
    )


def _initial_states(
    pulses: Mapping[int, PulseState | None], dead: Collection[int]
) -> dict[int, RankState]:
    """Return the state of every rank before it is known which ranks are stalled."""
    states = {r: _initial_state(p, is_dead=r in dead) for r, p in pulses.items()}
    states.update(
        {
            r: RankState.DEAD
            for r in dead
            if states.get(r) is not RankState.ENDED or pulses.get(r) is None
        }
    )
    return states


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
    evidence: Evidence | None, pulses: Mapping[int, PulseState | None]
) -> dict[int, RankEvidence]:
    """Return the evidence of the ranks that are still where they were when it was collected."""
    if evidence is None:
        return {}
    settled = {}
    for rank, rank_evidence in evidence.ranks.items():
        pulse = pulses.get(rank)
        if pulse is None or (
            pulse.pid == rank_evidence.pid and pulse.changed_ns + _SETTLED_NS < evidence.taken_ns
        ):
            settled[rank] = rank_evidence
    return settled


def position_facts(pulse: PulseState) -> dict[str, Any]:
    """Return where a rank is, as the evidence of a verdict contains it."""
    return {
        "phase": pulse.phase.label,
        "epoch": pulse.epoch,
        "batch": pulse.batch,
        "global_step": pulse.global_step,
    }


def progress_key(pulse: PulseState) -> tuple[bool, int, int, int, int]:
    """Return a sort key for how far a rank is: optimizer steps, then the place within the batch.

    A rank that validates or saves after step g is behind one that already works on the batch after
    g. Its batch counter may be validation's own, so it is not compared.
    """
    batch = pulse.batch if pulse.phase in STEP_PHASES else -1
    started = pulse.phase not in BEFORE_TRAINING
    return started, pulse.global_step, pulse.epoch, batch, int(pulse.phase)
