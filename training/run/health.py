"""Which rank is dead, stalled or only waiting: a pure judgement of pulses at one moment.

A rank is overdue when its pulse has not changed for longer than the budget of its phase. Of the
overdue ranks, those furthest behind are the culprits; the rest wait for them in a collective. A
paused or finished run never stalls. Call ``judge`` at least every two seconds with the history it
returned: a longer gap means that the watcher slept (a suspended laptop), and the ranks get their
budget anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ltui.training.queue.records import Outcome, Phase, PulseState
from ltui.training.run.fold import Fold, RankFold
from ltui.training.run.snapshot import RankState, Verdict
from ltui.training.run.spec import StallPolicy

JUMP_S = 5.0
"""A gap between two judgements that means that the watcher itself was asleep."""
WARM_UP_STEPS = 3
"""A rank's first steps compile, allocate and connect: they get the slow phases' budget."""
FIRST_BATCH_S = 30.0
"""Least budget of an epoch's first batch, where loader workers start."""
HELD_S = 1.0
"""A process stopped for less (a debugger that looks and goes on) is not worth a word."""
BAD_LOSSES = 3
"""Batches in a row without a finite loss before it is reported (one may be a skipped batch)."""

_STEP_PHASES = frozenset(
    {
        Phase.FETCH,
        Phase.TRANSFER,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.BATCH_END,
    }
)
_BEFORE_TRAINING = frozenset({Phase.UNKNOWN, Phase.STARTING, Phase.SETUP, Phase.SANITY})
_PAST_THE_EPOCH = frozenset({Phase.EPOCH_END, Phase.TEARDOWN})


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthHistory:
    """What ``judge`` remembers between calls."""

    judged_ns: int | None = None
    forgiven_ns: int = 0
    """Stillness before this moment does not count."""
    active: Mapping[str, Verdict] = field(default_factory=dict)
    """By kind: the verdicts of the last call, with when they began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    states: Mapping[int, RankState]
    verdicts: tuple[Verdict, ...]
    """In force now, the gravest first."""
    ended: tuple[Verdict, ...]
    """In force at the last call and no longer, with ``ended`` set."""
    history: HealthHistory


def judge(
    now_ns: int,
    pulses: Mapping[int, PulseState | None],
    policy: StallPolicy,
    history: HealthHistory,
    *,
    fold: Fold | None = None,
    dead: Mapping[int, str] | None = None,
    held: Mapping[int, int] | None = None,
    now_s: float | None = None,
) -> Judgement:
    """Every rank's state, and what is wrong with the run.

    ``now_ns`` is CLOCK_MONOTONIC, as in the pulses; ``now_s`` unix time, for ``began``, ``ended``.
    ``dead`` names the ranks whose process is gone without having finished, and how it ended
    (``killed by SIGKILL``). ``held`` gives the pids of ranks whose process is stopped: no budget
    need pass for them. ``fold`` gives the step times that budgets adapt to.
    """
    fold = fold or Fold()
    forgiven_ns = history.forgiven_ns
    if history.judged_ns is not None and now_ns - history.judged_ns > JUMP_S * 1e9:
        forgiven_ns = now_ns
    still = {r: _still_s(p, now_ns, forgiven_ns) for r, p in pulses.items() if p is not None}
    slowest_s = _slowest_step_s(fold)
    states = {r: _state(p, r, dead or {}) for r, p in pulses.items()}
    states.update(dict.fromkeys(dead or {}, RankState.DEAD))
    overdue = {
        r
        for r, seconds in still.items()
        if states[r] in (RankState.OK, RankState.STARTING)
        and seconds > budget_s(pulses[r], fold.ranks.get(r), policy, slowest_s)
    }
    found: list[Verdict] = []
    died = sorted(r for r, s in states.items() if s is RankState.DEAD)
    if died:
        states.update(dict.fromkeys(overdue, RankState.WAITING))
        found.append(_dead(died, states, pulses, fold, dead or {}))
    elif stopped := _stopped(held or {}, states, still):
        found.append(_held(stopped, held or {}, states, pulses, still))
    elif overdue and RankState.PAUSED not in states.values():
        stall = _stall(overdue, states, pulses, still, policy, fold, slowest_s)
        if stall is not None:
            found.append(stall)
    bad = _bad_loss(fold)
    if bad is not None:
        found.append(bad)
    verdicts = tuple(_begun(v, history, now_s) for v in found)
    active = {v.kind: v for v in verdicts}
    ended = tuple(replace(v, ended=now_s) for k, v in history.active.items() if k not in active)
    return Judgement(
        states=states,
        verdicts=verdicts,
        ended=ended,
        history=HealthHistory(judged_ns=now_ns, forgiven_ns=forgiven_ns, active=active),
    )


def budget_s(
    pulse: PulseState | None, rank: RankFold | None, policy: StallPolicy, slowest_s: float | None
) -> float:
    """Seconds that the rank may stay where it is before it counts as overdue."""
    slow_s = max(policy.slow_phase_s, policy.floor_s)
    if pulse is None or pulse.phase not in _STEP_PHASES or slowest_s is None:
        return slow_s
    if rank is None or rank.total is None or rank.total.batches < WARM_UP_STEPS:
        return slow_s
    budget = max(policy.floor_s, min(policy.cap_s, policy.factor * slowest_s))
    if pulse.batch <= 0:
        first_s = max(FIRST_BATCH_S, policy.factor * (rank.between_epochs_s or 0.0))
        return max(budget, min(first_s, slow_s))
    return budget


def _slowest_step_s(fold: Fold) -> float | None:
    return max((s for r in fold.ranks.values() for s in r.recent_step_s), default=None)


def _still_s(pulse: PulseState, now_ns: int, forgiven_ns: int) -> float:
    return max(0.0, (now_ns - max(pulse.changed_ns, forgiven_ns)) / 1e9)


def _state(pulse: PulseState | None, rank: int, dead: Mapping[int, str]) -> RankState:
    """The state before stillness is looked at."""
    if pulse is None:
        return RankState.STARTING
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
    return RankState.STARTING if pulse.phase in _BEFORE_TRAINING else RankState.OK


def _stopped(
    held: Mapping[int, int], states: Mapping[int, RankState], still: Mapping[int, float]
) -> list[int]:
    live = (RankState.OK, RankState.STARTING)
    return sorted(r for r in held if states.get(r) in live and still.get(r, 0.0) > HELD_S)


def _held(
    stopped: list[int],
    held: Mapping[int, int],
    states: dict[int, RankState],
    pulses: Mapping[int, PulseState | None],
    still: Mapping[int, float],
) -> Verdict:
    """Ranks whose process was stopped from outside; the others that stand still wait for them."""
    waiting = sorted(
        r
        for r, s in states.items()
        if s is RankState.OK and r not in stopped and still.get(r, 0.0) > HELD_S
    )
    states.update(dict.fromkeys(waiting, RankState.WAITING))
    states.update(dict.fromkeys(stopped, RankState.STALLED))
    alive = {r: p for r in stopped if (p := pulses[r]) is not None}
    seconds = max(still[r] for r in stopped)
    who = f"the process of {_ranks(stopped)}" if len(stopped) == 1 else _ranks(stopped)
    cause = f"{who} {'is' if len(stopped) == 1 else 'are'} stopped (SIGSTOP or a debugger)"
    cause += f" in {alive[stopped[0]].phase.label} for {seconds:.0f} s"
    if waiting:
        cause += f"; {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return Verdict(
        kind="stall",
        level="stalled",
        culprits=tuple(stopped),
        waiting=tuple(waiting),
        place=alive[stopped[0]].phase.label,
        cause=cause,
        remedy=f"Let it go on with: kill -CONT {' '.join(str(held[r]) for r in stopped)}",
        confidence=1.0,
        began=min(p.changed_wall_s for p in alive.values()),
        evidence={
            "stopped_pids": {str(r): held[r] for r in stopped},
            "still_s": {str(r): round(still[r], 1) for r in (*stopped, *waiting)},
            "ranks": {str(r): _where(p) for r, p in alive.items()},
        },
    )


def _stall(
    overdue: set[int],
    states: dict[int, RankState],
    pulses: Mapping[int, PulseState | None],
    still: Mapping[int, float],
    policy: StallPolicy,
    fold: Fold,
    slowest_s: float | None,
) -> Verdict | None:
    """The verdict, after marking in ``states`` who is stalled and who waits.

    None where the overdue ranks wait for one that is within its own budget (it writes a checkpoint,
    or is merely slow): nothing is stuck as far as can be told.
    """
    live = (RankState.OK, RankState.STARTING)
    alive = {r: p for r, p in pulses.items() if p is not None and states[r] in live}
    ended = [r for r, s in states.items() if s is RankState.ENDED]
    left = _left_the_epoch(alive, overdue)
    behind = left or _furthest_behind(alive)
    culprits = sorted(left or behind & overdue)
    waiting = sorted(overdue - behind)
    states.update(dict.fromkeys(waiting, RankState.WAITING))
    states.update(dict.fromkeys(culprits, RankState.STALLED))
    if not culprits:
        return None
    # Where all stand at one place, the pulses alone name nobody.
    told_apart = len(behind) < len(alive) or len(alive) == 1
    first = min(culprits, key=lambda r: alive[r].changed_ns)
    longest_s = max(still[r] for r in culprits)
    if left:
        cause = _left_cause(culprits, alive, longest_s)
    else:
        cause = _still_cause(culprits, alive, longest_s, told_apart)
    if waiting:
        cause += f"; {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    if ended:
        cause += f"; {_ranks(ended)} already ended"
    return Verdict(
        kind="stall",
        level="stalled",
        culprits=tuple(culprits) if told_apart else (),
        waiting=tuple(waiting if told_apart else culprits),
        place=alive[first].phase.label,
        cause=cause,
        confidence=0.8 if told_apart else 0.3,
        began=alive[first].changed_wall_s,
        evidence={
            "still_s": {str(r): round(still[r], 1) for r in sorted({*overdue, *culprits})},
            "budget_s": round(budget_s(alive[first], fold.ranks.get(first), policy, slowest_s), 1),
            "ranks": {str(r): _where(alive[r]) for r in sorted({*overdue, *culprits})},
        },
    )


def _left_cause(culprits: list[int], alive: Mapping[int, PulseState], seconds: float) -> str:
    late = max(p.batch for r, p in alive.items() if r not in culprits)
    return (
        f"{_ranks(culprits)} left epoch {alive[culprits[0]].epoch} while others still train"
        f" at batch {late}, for {seconds:.0f} s: batch counts differ"
    )


def _still_cause(
    culprits: list[int], alive: Mapping[int, PulseState], seconds: float, told_apart: bool
) -> str:
    place = f"{alive[culprits[0]].phase.label} for {seconds:.0f} s"
    if not told_apart:
        return f"all {len(alive)} ranks stand still in {place}; none is behind"
    return f"{_ranks(culprits)} {'stands' if len(culprits) == 1 else 'stand'} still in {place}"


def _left_the_epoch(alive: Mapping[int, PulseState], overdue: set[int]) -> set[int]:
    """Ranks that ended an epoch in which others, overdue, still wait in a batch's backward.

    With equal batch counts that cannot happen, so their own budget need not pass.
    """
    stuck = [alive[r] for r in overdue if alive[r].phase is Phase.BACKWARD]
    if not stuck or len(stuck) < sum(p.phase in _STEP_PHASES for p in alive.values()):
        return set()
    epoch = min(p.epoch for p in stuck)
    return {
        r for r, p in alive.items() if p.phase in _PAST_THE_EPOCH and p.epoch == epoch
    }  # fmt: skip


def _furthest_behind(alive: Mapping[int, PulseState]) -> set[int]:
    least = min(_position(p) for p in alive.values())
    return {r for r, p in alive.items() if _position(p) == least}


def _position(pulse: PulseState) -> tuple[bool, int, int, int, int]:
    """How far a rank is: optimizer steps first, then the place within the batch.

    A rank that validates or saves after step g is behind one that already works on the batch after
    g; its batch counter may be validation's own, so it is not compared.
    """
    batch = pulse.batch if pulse.phase in _STEP_PHASES else -1
    started = pulse.phase not in _BEFORE_TRAINING
    return started, pulse.global_step, pulse.epoch, batch, int(pulse.phase)


def _dead(
    died: list[int],
    states: Mapping[int, RankState],
    pulses: Mapping[int, PulseState | None],
    fold: Fold,
    reasons: Mapping[int, str],
) -> Verdict:
    first = min(died, key=lambda r: _changed_s(pulses.get(r)))
    pulse = pulses.get(first)
    living = [r for r, s in states.items() if s not in (RankState.DEAD, RankState.ENDED)]
    return Verdict(
        kind="dead",
        level="dead",
        culprits=tuple(died),
        waiting=tuple(sorted(living)),
        place=pulse.phase.label if pulse else None,
        cause=f"rank {first} {_death(first, fold, reasons)}",
        began=pulse.changed_wall_s if pulse else None,
        evidence={
            "reasons": {str(r): _death(r, fold, reasons) for r in died},
            "ranks": {str(r): _where(p) for r in died if (p := pulses.get(r)) is not None},
        },
    )


def _death(rank: int, fold: Fold, reasons: Mapping[int, str]) -> str:
    folded = fold.ranks.get(rank)
    if folded is not None and folded.exception is not None:
        fields = folded.exception.fields
        name, message = fields.get("type"), fields.get("message")
        if name:
            return f"raised {name}: {message}" if message else f"raised {name}"
        return folded.exception.text or "raised an exception"
    return reasons.get(rank, "raised an exception")


def _changed_s(pulse: PulseState | None) -> float:
    return float("inf") if pulse is None else pulse.changed_wall_s


def _bad_loss(fold: Fold) -> Verdict | None:
    bad = {r: f for r, f in sorted(fold.ranks.items()) if f.bad_loss >= BAD_LOSSES}
    if not bad:
        return None
    first = min(bad, key=lambda r: (bad[r].bad_loss_step or 0, r))
    step = bad[first].bad_loss_step
    since = "" if step is None else f" since step {step}"
    return Verdict(
        kind="nan_loss",
        level="warning",
        culprits=tuple(bad),
        place="loss",
        cause=f"the loss of {_ranks(list(bad))} is not a finite number{since}",
        remedy="Stop, and resume from a checkpoint before that step with a lower learning rate.",
        began=bad[first].bad_loss_wall_s,
        evidence={
            "step": step,
            "batches": {str(r): f.bad_loss for r, f in bad.items()},
        },
    )


def _begun(verdict: Verdict, history: HealthHistory, now_s: float | None) -> Verdict:
    """With when it began: as the same verdict said before, else what the pulse says, else now."""
    before = history.active.get(verdict.kind)
    if before is not None and before.culprits == verdict.culprits and before.began is not None:
        return replace(verdict, began=before.began)
    return verdict if verdict.began is not None else replace(verdict, began=now_s)


def _where(pulse: PulseState) -> dict[str, Any]:
    return {
        "phase": pulse.phase.label,
        "epoch": pulse.epoch,
        "batch": pulse.batch,
        "global_step": pulse.global_step,
    }


def _ranks(ranks: Collection[int]) -> str:
    """``rank 2``; ``ranks 0, 1 and 3``; ``ranks 0, 1, 2 and 61 others``."""
    names = [str(r) for r in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > 6:
        return f"ranks {', '.join(names[:3])} and {len(names) - 3} others"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
