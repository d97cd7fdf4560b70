"""Who stands still and why: the procedure of judging a stall. Pure.

1. Ranks that stand past a first threshold are suspects: they are to be looked at closely.
2. With evidence: where is the first unfinished collective? Ranks that came to it and can't match
   are a mismatch; ranks that did not come are the culprits, each explained by its process, workers
   and stack; if all came, the transport is at fault.
3. How long is too long depends on the reason: none for what can't mend itself, a step's budget for
   a frozen rank, more for one that moves.
4. Without evidence the pulses alone say who is furthest behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ltui.training.diagnosis.rules import left_early, thresholds
from ltui.training.diagnosis.rules.collective_mismatch import (
    completed_batches,
    crossed,
    find_uneven_ranks,
    mismatch_verdict,
    stall_verdict,
    uneven_verdict,
)
from ltui.training.diagnosis.rules.collective_positions import (
    UnfinishedCollective,
    collective_on_stack,
    find_mismatch_by_stacks,
    find_unfinished_collective,
)
from ltui.training.diagnosis.rules.judge_input import STEP_PHASES, PreparedInput, progress_key
from ltui.training.diagnosis.rules.stack_frames import has_frame, in_rendezvous
from ltui.training.diagnosis.rules.stall_causes import (
    STARVED_REMEDY,
    StallReason,
    explain_stall,
    working_child,
)
from ltui.training.diagnosis.rules.verdict_words import (
    activity_text,
    ranks_text,
    verb,
    waiting_text,
)
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.tensor_queue.record_types import Phase

_WORKER_HELD_S = 1.0
_WATCHED_S = 1.5
"""Two rounds of looking."""
_PATIENCE_S = 6.0
"""A closer look that is not there by then will not come."""
MORE_WORKERS = "More DataLoader workers, or cheaper samples."
_REPEATED_S = 2.5
"""A step this long, where steps are short, that is followed by another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stalls:
    verdicts: tuple[Verdict, ...] = ()
    suspects: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()


def suspects(m: PreparedInput, slowest_s: float | None) -> frozenset[int]:
    """Ranks that are to be looked at closely."""
    found = set()
    for rank, pulse in m.alive.items():
        full_s = thresholds.budget_s(pulse, m.fold.ranks.get(rank), m.policy, slowest_s)
        evidence_due_s = thresholds.evidence_due_s(pulse, m.fold.ranks.get(rank), slowest_s, full_s)
        if rank in m.held_workers:
            evidence_due_s = min(evidence_due_s, _WORKER_HELD_S)
        if pulse.phase in STEP_PHASES and _slow_before(m, (rank,)):
            evidence_due_s = min(evidence_due_s, thresholds.REPEATED_EVIDENCE_DUE_S)
        if m.still[rank] > evidence_due_s:
            found.add(rank)
    # A program that never sends telemetry is not interrupted for ever to see what it does.
    joining = any(v.kind == "rendezvous" for v in m.history.active.values())
    until_s = float("inf") if joining else m.policy.slow_phase_s
    found |= {r for r, s in m.silent.items() if thresholds.FROZEN_BUDGET_S < s <= until_s}
    return frozenset(found)


def stalls(m: PreparedInput, slowest_s: float | None, *, closer: bool) -> Stalls:
    """``closer``: a closer look will come, so the pulses need not decide alone."""
    alive = m.alive
    if m.ended and not alive and not m.silent:
        return _leaving(m)
    suspicious = suspects(m, slowest_s)
    if not suspicious:
        return Stalls()
    close = {r: m.close[r] for r in m.close if r in alive or r in m.silent}
    overdue = {
        r
        for r, p in alive.items()
        if m.still[r] > thresholds.budget_s(p, m.fold.ranks.get(r), m.policy, slowest_s)
    }
    found = _rendezvous(m, suspicious) if close else None
    known = bool(alive) and alive.keys() <= close.keys()
    if found is None and known:
        found = _looked(m, slowest_s)
    still_looking = closer and not known and _patience(m, overdue, slowest_s)
    if found is None and overdue and not still_looking:
        found = _by_pulses(m, overdue, slowest_s)
    waiting = frozenset(r for v in found or () for r in v.waiting)
    if not found and overdue:
        behind = _furthest_behind(m)
        waiting = frozenset(overdue - behind)
    return Stalls(verdicts=tuple(found or ()), suspects=suspicious, waiting=waiting)


def _patience(m: PreparedInput, overdue: set[int], slowest_s: float | None) -> bool:
    """Whether a closer look may still be under way."""
    over_s = [
        m.still[r] - thresholds.budget_s(m.pulses[r], m.fold.ranks.get(r), m.policy, slowest_s)
        for r in overdue
    ]
    return min(over_s, default=0.0) < _PATIENCE_S


# -- with evidence -----------------------------------------------------------------------------


def _looked(m: PreparedInput, slowest_s: float | None) -> list[Verdict] | None:
    """Verdicts from evidence of all ranks that are alive; None: the pulses must decide."""
    ranks = set(m.alive)
    found = find_unfinished_collective(m.close, ranks)
    if found is not None:
        return _in_collectives(m, found, slowest_s)
    if any(m.close[r].main_stack is None for r in ranks - m.held.keys()):
        return None
    standing = {r for r in ranks if collective_on_stack(m.close[r]) is not None}
    if standing and standing != ranks:
        return _absent(m, sorted(ranks - standing), tuple(sorted(standing)), None, slowest_s)
    if standing:
        return _all_wait(m, tuple(sorted(standing)), None, slowest_s)
    return _nobody_waits(m, slowest_s)


def _in_collectives(
    m: PreparedInput, found: UnfinishedCollective, slowest_s: float | None
) -> list[Verdict] | None:
    waiting = found.waiting
    least_s = min((m.still[r] for r in found.at if r in m.still), default=0.0)
    if found.differs:
        return [mismatch_verdict(m, found)] if least_s > thresholds.FAULT_SETTLE_S else []
    if found.absent:
        return _absent(m, list(found.absent), waiting, found, slowest_s)
    early = [r for r in m.ended if r not in found.at]
    if early:
        if least_s <= thresholds.FAULT_SETTLE_S:
            return []
        return [_finished_early(m, tuple(early), waiting, found)]
    if RankState.DEAD in m.states.values():
        return []
    return _all_wait(m, tuple(sorted(found.at)), found, slowest_s)


def _absent(
    m: PreparedInput,
    ranks: list[int],
    waiting: tuple[int, ...],
    found: UnfinishedCollective | None,
    slowest_s: float | None,
) -> list[Verdict]:
    """One verdict for each reason that keeps ranks away."""
    if found is not None and all(collective_on_stack(m.close[r]) for r in ranks):
        left = find_uneven_ranks(m, {*ranks, *waiting})
        age_s = min(m.still.get(r, 0.0) for r in (*ranks, *waiting))
        if left is not None:
            return [uneven_verdict(m, *left, found)] if age_s > thresholds.FAULT_SETTLE_S else []
        if found.crossed:
            return [crossed(m, found)] if age_s > thresholds.FAULT_SETTLE_S else []
    grouped: dict[tuple[str, str | None, str], list[int]] = {}
    reasons: dict[int, StallReason] = {}
    for rank in ranks:
        reason = reasons[rank] = explain_stall(m.close[rank], m.pulses.get(rank))
        line = str(reason.facts.get("frame"))
        grouped.setdefault((reason.kind, reason.place, line), []).append(rank)
    verdicts = []
    for members in grouped.values():
        verdict = _if_due(m, tuple(members), reasons[members[0]], waiting, found, slowest_s)
        if verdict is not None:
            verdicts.append(verdict)
    return verdicts


def _if_due(
    m: PreparedInput,
    culprits: tuple[int, ...],
    reason: StallReason,
    waiting: tuple[int, ...],
    found: UnfinishedCollective | None,
    slowest_s: float | None,
) -> Verdict | None:
    """The verdict once the ranks have stood longer than its reason allows."""
    age_s = min(m.still.get(r, 0.0) for r in (*culprits, *(w for w in waiting if w in m.still)))
    pulse = m.pulses.get(culprits[0])
    phase = pulse.phase if pulse is not None else Phase.UNKNOWN
    folded = m.fold.ranks.get(culprits[0])
    frozen_s = thresholds.frozen_budget_s(phase, m.policy, slowest_s, m.history.longest_s)
    level = "stalled"
    if reason.motion == "fault":
        allowed_s = thresholds.FAULT_SETTLE_S if reason.kind != "worker_stopped" else _WORKER_HELD_S
    elif reason.kind == "checkpoint":
        learned_s = m.policy.factor * m.history.longest_s.get(Phase.CHECKPOINT, 0.0)
        allowed_s = max(thresholds.CHECKPOINT_BUDGET_S, min(learned_s, m.policy.slow_phase_s))
        level = "slow"
    elif reason.motion == "frozen":
        if _too_short(reason):
            return None
        allowed_s = frozen_s
        if phase in STEP_PHASES and age_s <= allowed_s and _slow_before(m, culprits):
            # The slow step before has made this one's budget long.
            allowed_s, level = thresholds.FAULT_SETTLE_S, "slow"
            reason = _straggles(reason)
    elif reason.motion == "compiling":
        allowed_s = max(thresholds.compiling_budget_s(_starved(m, culprits[0])), frozen_s)
        level = "slow" if age_s <= m.policy.slow_phase_s else "stalled"
    elif phase not in STEP_PHASES or not thresholds.warmed_up(folded):
        # Some indexing, scoring or writing, of which nobody knows how long it takes.
        prepares = has_frame(m.close[culprits[0]].main_stack, "prepare_data")
        least_s = m.policy.slow_phase_s if prepares else thresholds.WARM_UP_BUDGET_S
        allowed_s = thresholds.moving_budget_s(frozen_s, least_s)
        level = "slow" if age_s <= m.policy.slow_phase_s else "stalled"
    elif reason.motion == "busy":
        allowed_s = thresholds.busy_budget_s(frozen_s, reason.cpu_share)
    else:
        allowed_s = thresholds.moving_budget_s(frozen_s)
        if _slow_before(m, culprits):
            allowed_s = thresholds.FAULT_SETTLE_S
            reason = _straggles(reason)
        # What wakes up now and then may be slow, or look around for what never comes.
        level = "slow" if age_s <= max(m.policy.cap_s, frozen_s) else "stalled"
    if age_s <= allowed_s:
        return None
    return stall_verdict(m, culprits, reason, waiting, found, level=level, budget_s=allowed_s)


def _straggles(reason: StallReason) -> StallReason:
    return replace(reason, kind="straggler", text=f"is the STRAGGLER: it {reason.text}")


def _too_short(reason: StallReason) -> bool:
    """Whether what looks frozen may only be slow: it was watched for too short a time."""
    watched_s = reason.watched_s
    return reason.motion == "frozen" and watched_s is not None and watched_s < _WATCHED_S


def _slow_before(m: PreparedInput, ranks: tuple[int, ...]) -> bool:
    """Whether the step before was slow too: then it is no single hiccup."""
    for rank in ranks:
        folded = m.fold.ranks.get(rank)
        if folded is None or len(folded.recent_step_s) < 6:
            return False
        *before, last = folded.recent_step_s
        usual = sorted(before)[len(before) // 2]
        if last < max(_REPEATED_S, 4 * usual):
            return False
    return True


def _finished_early(
    m: PreparedInput, early: tuple[int, ...], waiting: tuple[int, ...], found: UnfinishedCollective
) -> Verdict:
    departure = left_early.departure(m, early)
    if departure is not None:
        reason = left_early.reason(departure, waiting, "ended")
        return stall_verdict(m, early, reason, waiting, found)
    done = completed_batches(m, early[0])
    late = max((completed_batches(m, r) or 0 for r in waiting), default=0)
    after = f" after {done} batches" if done is not None else ""
    reason = StallReason(
        kind="finished_early",
        text=f"finished early{after} while others are at batch {late + 1}: batch counts differ"
        " (uneven)",
        motion="fault",
        place="ended",
        remedy="Give every rank the same number of batches: a DistributedSampler, drop_last=True,"
        " or limit_train_batches.",
        confidence=0.9,
    )
    return stall_verdict(m, early, reason, waiting, found)


def _all_wait(
    m: PreparedInput,
    ranks: tuple[int, ...],
    found: UnfinishedCollective | None,
    slowest_s: float | None,
) -> list[Verdict] | None:
    """Every rank is in a collective: in the same one, as far as is recorded."""
    early = [r for r in m.ended if r not in ranks]
    age_s = min(m.still.get(r, 0.0) for r in ranks)
    phases = {p.phase for r in ranks if (p := m.pulses.get(r)) is not None}
    one = len(phases) == 1 or phases <= STEP_PHASES
    phase = min(phases) if phases and one else Phase.UNKNOWN
    left = find_uneven_ranks(m, set(ranks)) if found is None else None
    if left is not None and age_s > thresholds.FAULT_SETTLE_S:
        return [uneven_verdict(m, *left, found)]
    if early:
        return None
    if len(ranks) < 2 or age_s <= thresholds.frozen_budget_s(
        phase, m.policy, slowest_s, m.history.longest_s
    ):
        return []
    if found is None and (apart := find_mismatch_by_stacks(m.close, set(ranks))) is not None:
        return [mismatch_verdict(m, apart)]
    entry = found.at[ranks[0]] if found is not None else None
    what = f"{entry.op} #{entry.seq}" if entry else "the same collective"
    sent = {r: m.close[r].unacknowledged_bytes for r in ranks}
    again = sum(m.close[r].retransmits or 0 for r in ranks)
    stuck = {str(r): b for r, b in sent.items() if b}
    unacked = f"; unacknowledged bytes: {sum(stuck.values())}" if stuck else ""
    gpus = any(m.close[r].gpu for r in ranks)
    first = entry is not None and entry.seq <= 2
    reason = StallReason(
        kind="transport",
        text=f"all wait in {what} and no rank is missing: the network between them does not"
        f" deliver the data{unacked}",
        motion="frozen",
        place=what,
        remedy="Try NCCL_P2P_DISABLE=1, and check ACS and the IOMMU."
        if gpus and first
        else "Check the network between the ranks (link, firewall, MTU).",
        confidence=0.8 if stuck else 0.6,
        facts={"unacknowledged_bytes": stuck, "retransmits": again},
    )
    verdict = stall_verdict(m, ranks, reason, (), found)
    return [replace(verdict, culprits=(), waiting=ranks)]


def _nobody_waits(m: PreparedInput, slowest_s: float | None) -> list[Verdict] | None:
    """No rank is in a collective: each is where it is on its own account."""
    ranks = tuple(sorted(m.alive))
    reasons = {r: explain_stall(m.close[r], m.pulses.get(r)) for r in ranks}
    verdicts = []
    for rank, reason in reasons.items():
        if reason.motion == "fault" and m.still[rank] > _WORKER_HELD_S:
            verdicts.append(stall_verdict(m, (rank,), reason, (), None))
    if verdicts:
        return verdicts
    works = all(r.motion in ("moving", "busy") for r in reasons.values())
    # One rank alone that is busy may be in a loop without an end.
    alone_busy = len(ranks) == 1 and reasons[ranks[0]].motion == "busy"
    again = works and not alone_busy and _slow_before(m, ranks)
    overdue = [
        r
        for r in ranks
        if m.still[r] > thresholds.budget_s(m.pulses[r], m.fold.ranks.get(r), m.policy, slowest_s)
        or (again and m.still[r] > thresholds.FAULT_SETTLE_S)
    ]
    if len(overdue) < len(ranks):
        return []
    if any(_too_short(reason) for reason in reasons.values()):
        return []
    frozen = tuple(r for r in ranks if reasons[r].motion == "frozen")
    if frozen:
        first = reasons[frozen[0]]
        same = all(reasons[r].place == first.place for r in frozen)
        if len(frozen) == len(ranks) > 1 and same:
            text = f"are all stuck at the same place: each {first.text}"
            return [stall_verdict(m, frozen, replace(first, text=text), (), None)]
        return [stall_verdict(m, (r,), reasons[r], (), None) for r in frozen]
    if any(r.motion == "compiling" for r in reasons.values()):
        return _some_compile(m, ranks, reasons)
    return _all_slow(m, ranks, reasons, slowest_s)


def _some_compile(
    m: PreparedInput, ranks: tuple[int, ...], reasons: dict[int, StallReason]
) -> list[Verdict]:
    """No rank waits for another, and some compile."""
    compiling = tuple(r for r in ranks if reasons[r].motion == "compiling")
    starved = any(_starved(m, r) for r in compiling)
    if min(m.still[r] for r in ranks) <= thresholds.compiling_budget_s(starved):
        return []
    reason = reasons[compiling[0]]
    verdict = stall_verdict(m, compiling, reason, (), None, level="slow")
    return [replace(verdict, culprits=(), waiting=compiling)]


def _all_slow(
    m: PreparedInput,
    ranks: tuple[int, ...],
    reasons: dict[int, StallReason],
    slowest_s: float | None,
) -> list[Verdict]:
    """Every rank works, longer than ever before."""
    age_s = min(m.still[r] for r in ranks)
    usual_s = thresholds.step_budget_s(m.policy, slowest_s)
    if age_s <= max(thresholds.MOVING_BUDGET_S, 1.5 * usual_s) and not _slow_before(m, ranks):
        return []
    pulses = [p for r in ranks if (p := m.pulses.get(r)) is not None]
    data = all(p.phase is Phase.FETCH for p in pulses)
    busy = all(reasons[r].motion == "busy" for r in ranks)
    if len(ranks) == 1 and busy:
        return [stall_verdict(m, ranks, reasons[ranks[0]], (), None)]
    starved = all(_starved(m, r) for r in ranks)
    bound = "data-bound" if data else "compute-bound" if busy else "slow"
    what = "short of processors (the machine is overloaded)" if starved else bound
    motion = activity_text(m.close[ranks[0]].process)
    line = reasons[ranks[0]].place
    reason = StallReason(
        kind="slow_data" if data and not starved else "slow_step",
        text=f"{'all ranks are' if len(ranks) > 1 else 'is'} {what} in {line}{motion};"
        " training continues slowly",
        motion="moving",
        place=line,
        remedy=STARVED_REMEDY if starved else MORE_WORKERS if data else None,
        confidence=0.8,
        facts=reasons[ranks[0]].facts,
    )
    verdict = stall_verdict(m, ranks, reason, (), None, level="slow")
    cause = verdict.cause if len(ranks) == 1 else reason.text
    return [replace(verdict, culprits=(), cause=cause)]


def _starved(m: PreparedInput, rank: int) -> bool:
    process = m.close[rank].process
    return process is not None and process.starved


# -- after training ------------------------------------------------------------------------------


def _leaving(m: PreparedInput) -> Stalls:
    """No rank trains any more: those that have finished, stand still and do not exit. What computes
    or writes, itself or by a child, may export or upload what was trained."""
    leaving = frozenset(
        r for r in m.ended if m.still.get(r, 0.0) > thresholds.SLOW_PHASE_EVIDENCE_DUE_S
    )
    grouped: dict[str | None, list[int]] = {}
    reasons: dict[int, StallReason] = {}
    for rank in sorted(leaving & m.close.keys()):
        process = m.close[rank].process
        if process is None or process.state in (None, "Z", "X"):
            continue
        if working_child(m.close[rank]) is not None:
            continue
        reason = reasons[rank] = explain_stall(m.close[rank], m.pulses.get(rank))
        if reason.motion in ("frozen", "fault") and m.still[rank] > thresholds.EXIT_BUDGET_S:
            grouped.setdefault(reason.place, []).append(rank)
    verdicts = []
    for ranks in grouped.values():
        reason = reasons[ranks[0]]
        have = verb(ranks, "has finished and does", "have finished and do")
        text = f"{have} not exit: {verb(ranks, 'it', 'each')} {reason.text}"
        told = replace(reason, kind="not_exiting", text=text)
        long = min(m.still[r] for r in ranks) > m.policy.slow_phase_s
        level = "stalled" if long else "warning"
        verdicts.append(stall_verdict(m, tuple(ranks), told, (), None, level=level))
    return Stalls(verdicts=tuple(verdicts), suspects=leaving)


# -- before training -----------------------------------------------------------------------------


def _rendezvous(m: PreparedInput, suspicious: frozenset[int]) -> list[Verdict] | None:
    """Ranks that wait in ``init_process_group`` for others that have not come; None: not so."""
    inside = [r for r, e in m.close.items() if in_rendezvous(e.main_stack)]
    if not inside or not suspicious:
        return None
    outside = [
        r
        for r, e in m.close.items()
        if r not in inside and e.joined is not True and (r in m.alive or r in m.silent)
    ]
    never = [r for r, s in m.states.items() if s is RankState.DEAD]
    if not outside or never:
        return None
    waited_s = min(_age(m, r) for r in inside)
    verdicts = []
    for rank in outside:
        reason = explain_stall(m.close[rank], m.pulses.get(rank))
        patient_s = thresholds.FROZEN_BUDGET_S if reason.motion in ("frozen", "fault") else 60.0
        if waited_s <= patient_s or _age(m, rank) <= patient_s:
            continue
        told = replace(
            reason,
            kind="rendezvous",
            text=f"has not joined init_process_group: it {reason.text}",
        )
        others = tuple(sorted(inside))
        level = "stalled" if reason.motion in ("frozen", "fault") else "slow"
        verdict = stall_verdict(m, (rank,), told, (), None, level=level)
        cause = verdict.cause + waiting_text(others, "the rendezvous")
        verdicts.append(replace(verdict, waiting=others, cause=cause))
    return verdicts


def _age(m: PreparedInput, rank: int) -> float:
    return m.still.get(rank, m.silent.get(rank, 0.0))


# -- by pulses alone -------------------------------------------------------------------------------


def _by_pulses(m: PreparedInput, overdue: set[int], slowest_s: float | None) -> list[Verdict]:
    """Who is furthest behind. Nothing where those that are behind are within their own budget: they
    write a checkpoint, or are merely slow."""
    alive = m.alive
    left = _left_the_epoch(m, overdue)
    behind = left or _furthest_behind(m)
    culprits = tuple(sorted(left or behind & overdue))
    if not culprits:
        return []
    waiting = tuple(sorted(overdue - behind))
    told_apart = len(behind) < len(alive) or len(alive) == 1
    longest_s = max(m.still[r] for r in culprits)
    pulse = alive[culprits[0]]
    if left:
        uneven = find_uneven_ranks(m, set(alive))
        if uneven is not None:
            return [uneven_verdict(m, *uneven, None)]
    if told_apart:
        text = (
            f"{verb(culprits, 'has', 'have')} made no progress in {pulse.phase.label}"
            f" for {longest_s:.0f} s"
        )
    else:
        text = (
            f"all {len(alive)} ranks have made no progress in {pulse.phase.label} for"
            f" {longest_s:.0f} s; none is behind the others"
        )
    ended = m.ended
    after = f"; {ranks_text(ended)} already ended" if ended else ""
    of_first = m.close.get(culprits[0])
    if told_apart and of_first is not None and of_first.process is not None:
        text += activity_text(of_first.process)
    reason = StallReason(
        kind="unknown",
        text=text,
        motion="frozen",
        place=pulse.phase.label,
        confidence=0.7 if told_apart else 0.3,
    )
    first = min(culprits, key=lambda r: alive[r].changed_ns)
    budget_s = thresholds.budget_s(alive[first], m.fold.ranks.get(first), m.policy, slowest_s)
    verdict = stall_verdict(m, culprits, reason, waiting, None, budget_s=budget_s)
    if told_apart:
        return [replace(verdict, cause=verdict.cause + after)]
    return [replace(verdict, culprits=(), waiting=culprits, cause=text + after)]


def _left_the_epoch(m: PreparedInput, overdue: set[int]) -> set[int]:
    """Ranks that ended an epoch in which others, overdue, still wait in a batch's backward.

    With equal batch counts that cannot happen, so their own budget need not pass.
    """
    alive = m.alive
    stuck = [alive[r] for r in overdue if alive[r].phase is Phase.BACKWARD]
    if not stuck or len(stuck) < sum(p.phase in STEP_PHASES for p in alive.values()):
        return set()
    epoch = min(p.epoch for p in stuck)
    past = (Phase.EPOCH_END, Phase.TEARDOWN)
    return {r for r, p in alive.items() if p.phase in past and p.epoch == epoch}


def _furthest_behind(m: PreparedInput) -> set[int]:
    alive = m.alive
    least = min(progress_key(p) for p in alive.values())
    return {r for r, p in alive.items() if progress_key(p) == least}
