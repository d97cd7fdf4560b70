"""Which rank is dead, stalled, slow or only waiting, and why: a pure judgement of one moment.

Calls the rules in ``diagnosis/rules``. Pulses alone show which ranks make no progress; with
evidence the verdict names the line, the process or the collective that is at fault. A paused or
finished run never stalls. Call ``judge`` at least every two seconds with the history it
returned: a longer gap means that the watcher slept (a suspended laptop), and the ranks get their
budget anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import Evidence, HostEvidence
from ltui.training.diagnosis.rules import data_slowdown, early_warnings, straggler
from ltui.training.diagnosis.rules.deaths import Death, death_verdicts
from ltui.training.diagnosis.rules.judge_input import (
    BEFORE_TRAINING,
    LIVE_STATES,
    STEP_PHASES,
    HealthHistory,
    PreparedInput,
    initial_state,
    position_facts,
    settled_evidence,
    verdict_key,
)
from ltui.training.diagnosis.rules.stalls import Stalls, stalls
from ltui.training.diagnosis.rules.thresholds import slowest_step_s
from ltui.training.diagnosis.rules.verdict_words import ranks_text, verb, waiting_text
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.tensor_queue.record_types import Phase, PulseState

CLOCK_JUMP_S = 5.0
"""A gap between two judgements that means that the watcher itself was asleep."""
STOPPED_AFTER_S = 1.0
"""A process stopped for less (a debugger that looks and goes on) is not worth a word."""
_STRAGGLING_S = 2.0
_LOOKED_S = 0.9
"""A round that ends so long after a beginning has seen something of what began."""
_UNSEEN_S = 6.0
"""After so long a straggler is told without a closer look at it."""
_GRAVITY = {"dead": 0, "stalled": 1, "slow": 2, "warning": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    states: Mapping[int, RankState]
    verdicts: tuple[Verdict, ...]
    """In force now, the gravest first."""
    ended: tuple[Verdict, ...]
    """In force at the last call and no longer, with ``ended`` set."""
    history: HealthHistory
    suspects: frozenset[int] = frozenset()
    """Ranks that a closer look should be taken at."""


def judge(
    now_ns: int,
    pulses: Mapping[int, PulseState | None],
    policy: StallPolicy,
    history: HealthHistory,
    *,
    fold: FoldState | None = None,
    dead: Mapping[int, str] | None = None,
    held: Mapping[int, int] | None = None,
    held_workers: Mapping[int, tuple[int, ...]] | None = None,
    silent: Mapping[int, float] | None = None,
    deaths_told: Mapping[int, Death] | None = None,
    oom_kills: int | None = None,
    evidence: Evidence | None = None,
    host: HostEvidence | None = None,
    devices: Sequence[Verdict] = (),
    delays: Mapping[int, float] | None = None,
    closer: bool = False,
    now_s: float | None = None,
) -> Judgement:
    """Every rank's state, and what is wrong with the run.

    ``now_ns`` is CLOCK_MONOTONIC, as in the pulses; ``now_s`` unix time, for ``began``, ``ended``.
    ``dead`` names the ranks whose process is gone without having finished, and how it ended
    (``killed by SIGKILL``); ``deaths_told`` says more of them. ``held`` gives the pids of ranks
    whose process is stopped: no budget need pass for them; ``held_workers`` the stopped DataLoader
    workers of ranks. ``silent``: ranks that have a process and no pulse, for how many seconds.
    ``oom_kills``: processes that the kernel killed for want of memory in the last moments.
    ``host``: the machine as it is now; ``devices``: what is wrong with GPUs now. ``delays``:
    the share of the last seconds in which each rank waited for a processor. ``evidence`` is the
    last closer look; ``closer`` says that there will be one for suspects.
    """
    m = _moment(
        now_ns, pulses, policy, history, fold or FoldState(), dead or {}, held or {},
        held_workers or {}, silent or {}, evidence, devices, now_s,
    )  # fmt: skip
    m = replace(m, delays=delays or {})
    found: list[Verdict] = death_verdicts(m, deaths_told or {}, oom_kills)
    stopped = _stopped(m)
    paused = RankState.PAUSED in m.states.values()
    suspects: frozenset[int] = frozenset()
    since_ns: int | None = None
    looked = Stalls() if paused else stalls(m, slowest_step_s(m.fold), closer=closer)
    told = [v for v in looked.verdicts if not stopped or _stands_by_itself(v, stopped)]
    if stopped:
        found.append(_held(m, stopped, {r for v in told for r in v.culprits}))
    if not paused:
        suspects = looked.suspects
        if RankState.DEAD in m.states.values():
            told = [v for v in told if v.level == "stalled" and v.kind not in _AFTER_DEATH]
        found += told
        _mark(m, found, looked.waiting, dead=bool(found and found[0].level == "dead"))
        since_ns, straggles = _add_straggler(m, found, closer=closer)
        suspects |= straggles
    _add_warnings(m, found, host)
    drift_ns = _add_drift(m, found)
    found.sort(key=lambda v: _GRAVITY.get(v.level, 4))
    verdicts = tuple(_begun(v, history, now_s) for v in found)
    active = {verdict_key(v): v for v in verdicts}
    kinds = {v.kind for v in verdicts}
    ended = tuple(
        replace(v, ended=now_s)
        for k, v in history.active.items()
        if k not in active and not (v.kind in kinds and v.level == "warning")
    )
    return Judgement(
        states=m.states,
        verdicts=verdicts,
        ended=ended,
        suspects=suspects,
        history=_remember(m, active, drift_ns, since_ns),
    )


_AFTER_DEATH = frozenset(
    {"transport", "unknown", "finished_early", "left_early", "uneven", "rendezvous"}
)
"""What the end of a rank looks like to those that are left."""


def _moment(
    now_ns: int,
    pulses: Mapping[int, PulseState | None],
    policy: StallPolicy,
    history: HealthHistory,
    fold: FoldState,
    dead: Mapping[int, str],
    held: Mapping[int, int],
    held_workers: Mapping[int, tuple[int, ...]],
    silent: Mapping[int, float],
    evidence: Evidence | None,
    devices: Sequence[Verdict],
    now_s: float | None,
) -> PreparedInput:
    if history.judged_ns is not None and now_ns - history.judged_ns > CLOCK_JUMP_S * 1e9:
        history = replace(history, forgiven_ns=now_ns)
    since = history.forgiven_ns
    states = {r: initial_state(p, r, dead) for r, p in pulses.items()}
    states.update(
        {
            r: RankState.DEAD
            for r in dead
            if states.get(r) is not RankState.ENDED or pulses.get(r) is None
        }
    )
    return PreparedInput(
        now_ns=now_ns,
        now_s=now_s,
        pulses=pulses,
        policy=policy,
        history=history,
        fold=fold,
        dead=dead,
        held=held,
        held_workers=held_workers,
        silent=silent,
        still={
            r: max(0.0, (now_ns - max(p.changed_ns, since)) / 1e9)
            for r, p in pulses.items()
            if p is not None
        },
        states=states,
        evidence=evidence,
        close=settled_evidence(evidence, pulses),
        devices=devices,
    )


def _stopped(m: PreparedInput) -> list[int]:
    return sorted(
        r
        for r in m.held
        if r in m.silent
        or (m.states.get(r) in LIVE_STATES and m.still.get(r, 0.0) > STOPPED_AFTER_S)
    )


def _stands_by_itself(verdict: Verdict, stopped: list[int]) -> bool:
    """Whether it names a line or a worker of other ranks than those that are stopped: a second
    fault, which the first does not explain."""
    line = verdict.evidence.get("frame") or verdict.evidence.get("worker")
    return bool(line and verdict.culprits and not set(verdict.culprits) & set(stopped))


def _held(m: PreparedInput, stopped: list[int], at_fault: set[int]) -> Verdict:
    """Ranks whose process was stopped from outside; the others that stand still wait for them,
    but for those with a fault of their own."""
    waiting = sorted(
        r
        for r, s in m.states.items()
        if s is RankState.OK
        and r not in stopped
        and r not in at_fault
        and m.still.get(r, 0.0) > STOPPED_AFTER_S
    )
    alive = {r: p for r in stopped if (p := m.pulses.get(r)) is not None}
    who = f"the process of {ranks_text(stopped)}" if len(stopped) == 1 else ranks_text(stopped)
    cause = f"{who} {verb(stopped, 'is', 'are')} stopped (SIGSTOP or a debugger)"
    if alive:
        seconds = max(m.still[r] for r in alive)
        cause += f" in {next(iter(alive.values())).phase.label} for {seconds:.0f} s"
    cause += waiting_text(waiting, None)
    return Verdict(
        kind="stopped",
        level="stalled",
        culprits=tuple(stopped),
        waiting=tuple(waiting),
        place=next((p.phase.label for p in alive.values()), None),
        cause=cause,
        remedy=f"To continue it: kill -CONT {' '.join(str(m.held[r]) for r in stopped)}",
        confidence=1.0,
        began=min((p.changed_wall_s for p in alive.values()), default=None),
        evidence={
            "stopped_pids": {str(r): m.held[r] for r in stopped},
            "still_s": {str(r): round(m.still[r], 1) for r in (*stopped, *waiting) if r in m.still},
            "ranks": {str(r): position_facts(p) for r, p in alive.items()},
        },
    )


def _mark(m: PreparedInput, found: list[Verdict], waiting: frozenset[int], *, dead: bool) -> None:
    """Rank states as the verdicts have them."""
    live = set(m.alive)
    stopped = {r for v in found if v.kind == "stopped" for r in v.culprits}
    m.states.update(dict.fromkeys(stopped & m.silent.keys(), RankState.STALLED))
    if dead:
        held_up = {r for r in live if m.still.get(r, 0.0) > m.policy.floor_s}
        m.states.update(dict.fromkeys(held_up, RankState.WAITING))
    m.states.update(dict.fromkeys(live & waiting, RankState.WAITING))
    for verdict in found:
        if verdict.level == "dead":
            continue
        m.states.update(dict.fromkeys(live.intersection(verdict.waiting), RankState.WAITING))
    for verdict in found:
        if verdict.level == "stalled":
            blamed = verdict.culprits or verdict.waiting
            m.states.update(dict.fromkeys(live.intersection(blamed), RankState.STALLED))


def _add_straggler(
    m: PreparedInput, found: list[Verdict], *, closer: bool
) -> tuple[int | None, frozenset[int]]:
    """Add the straggler's verdict once it lasts. Since when there is one, and its rank, which is
    looked at closely."""
    if any(v.level in ("dead", "stalled") for v in found):
        return None, frozenset()
    since_ns = m.history.straggling_since_ns or m.now_ns
    if any(v.kind == "straggler" for v in found):
        return since_ns, frozenset()
    slow = straggler.find(m)
    before = next((v for v in m.history.active.values() if v.kind == "straggler"), None)
    if slow is None and before is not None and straggler.still(m, before.culprits[0]):
        found.append(before)
        return since_ns, frozenset(before.culprits)
    if slow is None:
        if not any(v.kind in ("slow_data", "slow_step") for v in found):
            found += [v for v in (data_slowdown.slow_data_verdict(m),) if v is not None]
        return None, frozenset()
    lasted_s = (m.now_ns - since_ns) / 1e9
    seen = m.evidence is not None and m.evidence.taken_ns > since_ns + _LOOKED_S * 1e9
    if lasted_s > _STRAGGLING_S and (seen or not closer or lasted_s > _UNSEEN_S):
        of_rank = m.evidence.ranks.get(slow.rank) if m.evidence is not None and seen else None
        found.append(straggler.verdict(m, slow, of_rank))
    return since_ns, frozenset((slow.rank,))


def _add_warnings(m: PreparedInput, found: list[Verdict], host: HostEvidence | None) -> None:
    """Add the early warnings of the loss, the machine and the call sites."""
    if (bad := early_warnings.bad_loss(m.fold)) is not None:
        found.append(bad)
    if host is not None and m.alive:
        for warned in (early_warnings.memory(host), early_warnings.shared_memory(host)):
            if warned is not None and warned.kind not in {v.kind for v in found}:
                found.append(warned)
    if m.evidence is not None and m.now_ns - m.evidence.taken_ns < 60e9:
        apart = early_warnings.diverging(dict(m.evidence.ranks))
        if apart is not None and not any(v.kind == "mismatch" for v in found):
            found.append(apart)


def _add_drift(m: PreparedInput, found: list[Verdict]) -> tuple[int, int] | None:
    """Add a drift that lasts. Since when ranks drift, and when they were last seen to; ns."""
    drifting = early_warnings.drifting(m)
    known = m.history.drift_ns
    told = any(v.kind in ("uneven", "finished_early", "left_early") for v in found)
    if (
        drifting is None
        and known is not None
        and m.now_ns - known[1] < early_warnings.DRIFT_KEPT_S * 1e9
    ):
        found += [v for v in m.history.active.values() if v.kind == "drift" and not told]
        return known
    if not drifting:
        return None
    since_ns = known[0] if known is not None else m.now_ns
    if m.now_ns - since_ns > early_warnings.DRIFT_S * 1e9 and not told:
        found.append(early_warnings.drift(m, drifting))
    return since_ns, m.now_ns


def _begun(verdict: Verdict, history: HealthHistory, now_s: float | None) -> Verdict:
    """With when it began: as the same verdict said before, else what the pulse says, else now."""
    before = history.active.get(verdict_key(verdict))
    if before is not None and before.began is not None:
        return replace(verdict, began=before.began)
    return verdict if verdict.began is not None else replace(verdict, began=now_s)


def _remember(
    m: PreparedInput,
    active: dict[str, Verdict],
    drift_ns: tuple[int, int] | None,
    straggling_ns: int | None,
) -> HealthHistory:
    """What the phases took, and how far evaluations went."""
    longest = dict(m.history.longest_s)
    evaluated = dict(m.history.evaluated)
    places: dict[int, tuple[Phase, int]] = {}
    for rank, pulse in m.pulses.items():
        if pulse is None:
            continue
        places[rank] = (pulse.phase, pulse.changed_ns)
        phase, since_ns = m.history.places.get(rank, places[rank])
        if phase in (Phase.VALIDATION, Phase.TEST) and pulse.phase is phase:
            evaluated[rank] = pulse.batch + 1
        if pulse.changed_ns > since_ns and phase not in STEP_PHASES | BEFORE_TRAINING:
            took_s = (pulse.changed_ns - max(since_ns, m.history.forgiven_ns)) / 1e9
            longest[phase] = max(longest.get(phase, 0.0), took_s)
    return HealthHistory(
        judged_ns=m.now_ns,
        forgiven_ns=m.history.forgiven_ns,
        active=active,
        places=places,
        longest_s=longest,
        evaluated=evaluated,
        drift_ns=drift_ns,
        straggling_since_ns=straggling_ns,
    )
