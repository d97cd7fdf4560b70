"""Stall rules: ranks wait for others that are missing, or for machines that do not answer. Pure.

Old pulses of a machine that does not answer say nothing about its ranks. So if no observed rank is
at fault, the ranks that make no progress wait for that machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.collective_positions import collective_on_stack
from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.judge_input import (
    MAY_BE_LATE,
    PreparedInput,
    position_facts,
    progress_key,
)
from ltui.training.diagnosis.stack_frames import has_frame, in_rendezvous
from ltui.training.diagnosis.stalls.collective_mismatch import crossed_groups_verdict
from ltui.training.diagnosis.stalls.stall_case import (
    STOPPED_WORKER_SETTLE_S,
    Activity,
    StallCase,
    StallReason,
    previous_step_was_slow,
    stall_verdict,
    watched_too_briefly,
)
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.uneven_batches import uneven_verdict
from ltui.training.diagnosis.verdict_words import (
    activity_text,
    collective_text,
    machines_text,
    verb,
    waiting_text,
)
from ltui.training.shared.record_types import STEP_PHASES, Phase
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState, RankState, Verdict
from ltui.training.state.verdicts import VerdictKind


def furthest_behind(case: StallCase) -> list[Verdict] | None:
    """Blame the rank that is furthest behind.

    Report nothing if the ranks that are behind are within their own budget: they write a checkpoint
    or are merely slow.
    """
    if not case.overdue or case.evidence_may_come:
        return None
    inputs, alive = case.inputs, case.inputs.alive
    left_epoch = _ranks_past_the_epoch(case)
    behind = left_epoch or ranks_furthest_behind(inputs)
    culprits = tuple(sorted(left_epoch or behind & case.overdue))
    if not culprits:
        return []
    if left_epoch and (uneven := uneven_verdict(inputs, set(alive), None)) is not None:
        return [uneven]
    culprits_known = len(behind) < len(alive) or len(alive) == 1
    phase = alive[culprits[0]].phase.label
    seconds = max(inputs.still_s[r] for r in culprits)
    if culprits_known:
        have = verb(culprits, "has", "have")
        text = f"{have} made no progress in {phase} for {seconds:.0f} s"
        evidence = inputs.settled.get(culprits[0])
        text += activity_text(evidence.process if evidence is not None else None)
    else:
        text = (
            f"all {len(alive)} ranks have made no progress in {phase} for"
            f" {seconds:.0f} s; none is behind the others"
        )
    ended = inputs.ended
    ended_text = f"; {inputs.ranks_text(ended)} already ended" if ended else ""
    reason = StallReason(
        kind=VerdictKind.UNKNOWN,
        text=text,
        activity=Activity.FROZEN,
        place=phase,
        confidence=0.7 if culprits_known else 0.3,
    )
    longest_still = min(culprits, key=lambda r: alive[r].changed_ns)
    waiting = tuple(sorted(case.overdue - behind))
    verdict = stall_verdict(
        inputs, culprits, reason, waiting, budget_s=case.budget_s(longest_still)
    )
    if culprits_known:
        return [replace(verdict, cause=verdict.cause + ended_text)]
    return [replace(verdict, culprits=(), waiting=culprits, cause=text + ended_text)]


def _ranks_past_the_epoch(case: StallCase) -> set[int]:
    """Return ranks that ended an epoch in which others still wait in a batch's backward pass.

    With equal batch counts that cannot happen, so the budget of these ranks need not pass.
    """
    alive = case.inputs.alive
    in_backward = [alive[r] for r in case.overdue if alive[r].phase is Phase.BACKWARD]
    in_step = sum(p.phase in STEP_PHASES for p in alive.values())
    if not in_backward or len(in_backward) < in_step:
        return set()
    epoch = min(p.epoch for p in in_backward)
    after_epoch = (Phase.EPOCH_END, Phase.TEARDOWN)
    return {r for r, p in alive.items() if p.phase in after_epoch and p.epoch == epoch}


def ranks_furthest_behind(inputs: PreparedInput) -> set[int]:
    """Return the ranks that have made the least progress, by their pulses."""
    progress = {r: progress_key(p) for r, p in inputs.alive.items()}
    least = min(progress.values())
    return {r for r, key in progress.items() if key == least}


_WORKING_BUDGET_S = 60.0
"""Budget in seconds of a rank that works while others wait for it to join."""


def incomplete_rendezvous(case: StallCase) -> list[Verdict] | None:
    """Blame the ranks that have not joined the process group while others wait for them."""
    inputs, alive = case.inputs, case.inputs.alive
    inside = tuple(sorted(r for r, e in inputs.settled.items() if in_rendezvous(e.main_stack)))
    outside = [
        r
        for r, e in inputs.settled.items()
        if r not in inside and e.joined is not True and (r in alive or r in inputs.silent_s)
    ]
    if not inside or not outside or RankState.DEAD in inputs.states.values():
        return None
    waited_s = min(_age_s(inputs, r) for r in inside)
    verdicts = []
    for ranks in _outside_alike(inputs, outside):
        rank = ranks[0]
        reason = explain_rank(inputs, rank)
        stuck = reason.activity in (Activity.FROZEN, Activity.FAULT)
        budget_s = thresholds.FROZEN_BUDGET_S if stuck else _WORKING_BUDGET_S
        if waited_s <= budget_s or min(_age_s(inputs, r) for r in ranks) <= budget_s:
            continue
        has, each = verb(ranks, "has", "have"), verb(ranks, "it", "each")
        text = f"{has} not joined init_process_group: {each} {reason.text}"
        verdict = stall_verdict(
            inputs,
            ranks,
            replace(reason, kind=VerdictKind.RENDEZVOUS, text=text),
            level=VerdictLevel.STALLED if stuck else VerdictLevel.SLOW,
        )
        cause = verdict.cause + waiting_text(inside, "the rendezvous", inputs.machines)
        verdicts.append(replace(verdict, waiting=inside, cause=cause))
    return verdicts


def _outside_alike(inputs: PreparedInput, outside: list[int]) -> list[tuple[int, ...]]:
    """Group the ranks of each machine that have not joined for the same reason.

    On one machine, every rank is reported by itself.
    """
    groups: dict[Any, list[int]] = {}
    for rank in outside:
        reason = explain_rank(inputs, rank)
        alike = (inputs.machines.get(rank, rank), reason.kind, reason.place)
        groups.setdefault(alike, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _age_s(inputs: PreparedInput, rank: int) -> float:
    """Return the seconds without progress, or since the process of a silent rank started."""
    return inputs.still_s.get(rank, inputs.silent_s.get(rank, 0.0))


def missing_ranks(case: StallCase) -> list[Verdict] | None:
    """Blame the missing ranks: one verdict for each reason that keeps them away."""
    if not case.absent or not case.waiting:
        return None
    inputs, unfinished = case.inputs, case.unfinished
    if unfinished is not None and all(collective_on_stack(inputs.settled[r]) for r in case.absent):
        # The missing ranks wait in another collective themselves.
        ranks = {*case.absent, *case.waiting}
        uneven = uneven_verdict(inputs, ranks, unfinished)
        proven = case.shortest_still_s(ranks) > thresholds.FAULT_SETTLE_S
        if uneven is not None:
            return [uneven] if proven else []
        if unfinished.crossed:
            return [crossed_groups_verdict(inputs, unfinished)] if proven else []
    ranks_by_reason: dict[tuple[str, str | None, Frame | None], list[int]] = {}
    reasons: dict[int, StallReason] = {}
    for rank in case.absent:
        reason = explain_rank(inputs, rank)
        reasons[rank] = reason
        ranks_by_reason.setdefault((reason.kind, reason.place, reason.frame), []).append(rank)
    verdicts = (
        _verdict_if_due(case, tuple(ranks), reasons[ranks[0]]) for ranks in ranks_by_reason.values()
    )
    return [v for v in verdicts if v is not None]


def _verdict_if_due(
    case: StallCase, culprits: tuple[int, ...], reason: StallReason
) -> Verdict | None:
    """Return the verdict once the ranks have made no progress for longer than allowed.

    The budget and the level depend on the reason, and on whether the step before was slow too.
    """
    inputs, policy = case.inputs, case.inputs.policy
    rank = culprits[0]
    age_s = case.shortest_still_s((*culprits, *(r for r in case.waiting if r in inputs.still_s)))
    pulse = inputs.pulses.get(rank)
    phase = pulse.phase if pulse is not None else Phase.UNKNOWN
    longest_s = inputs.history.longest_s
    frozen_s = thresholds.frozen_budget_s(phase, policy, case.slowest_step_s, longest_s)
    slow_or_stalled = VerdictLevel.SLOW if age_s <= policy.slow_phase_s else VerdictLevel.STALLED
    level = VerdictLevel.STALLED
    if reason.activity is Activity.FAULT:
        worker_stopped = reason.kind is VerdictKind.WORKER_STOPPED
        allowed_s = STOPPED_WORKER_SETTLE_S if worker_stopped else thresholds.FAULT_SETTLE_S
    elif reason.kind is VerdictKind.CHECKPOINT:
        learned_s = policy.factor * longest_s.get(Phase.CHECKPOINT, 0.0)
        allowed_s = max(thresholds.CHECKPOINT_BUDGET_S, min(learned_s, policy.slow_phase_s))
        level = VerdictLevel.SLOW
    elif reason.activity is Activity.FROZEN:
        if watched_too_briefly(reason):
            return None
        allowed_s = frozen_s
        in_step = phase in STEP_PHASES
        if in_step and age_s <= allowed_s and previous_step_was_slow(inputs, culprits):
            # The slow step before has raised the budget of this one.
            allowed_s, level = thresholds.FAULT_SETTLE_S, VerdictLevel.SLOW
            reason = _as_straggler(reason)
    elif reason.activity is Activity.COMPILING:
        allowed_s = max(thresholds.compiling_budget_s(case.is_starved(rank)), frozen_s)
        level = slow_or_stalled
    elif phase not in STEP_PHASES or not thresholds.warmed_up(inputs.fold.ranks.get(rank)):
        # The rank indexes, scores or writes, and it is unknown how long that takes.
        prepares = has_frame(inputs.settled[rank].main_stack, "prepare_data")
        minimum_s = policy.slow_phase_s if prepares else thresholds.WARM_UP_BUDGET_S
        allowed_s = thresholds.moving_budget_s(frozen_s, minimum_s)
        level = slow_or_stalled
    elif reason.activity is Activity.BUSY:
        allowed_s = thresholds.busy_budget_s(frozen_s, reason.cpu_share)
    else:
        allowed_s = thresholds.moving_budget_s(frozen_s)
        if previous_step_was_slow(inputs, culprits):
            allowed_s = thresholds.FAULT_SETTLE_S
            reason = _as_straggler(reason)
        # A process that wakes up now and then may be slow, or may poll for ever.
        if age_s <= max(policy.cap_s, frozen_s):
            level = VerdictLevel.SLOW
    if age_s <= allowed_s:
        return None
    return stall_verdict(
        inputs, culprits, reason, case.waiting, case.unfinished, level=level, budget_s=allowed_s
    )


def _as_straggler(reason: StallReason) -> StallReason:
    return replace(reason, kind=VerdictKind.STRAGGLER, text=f"is the STRAGGLER: it {reason.text}")


_UNREACHABLE_S = 7.0
"""Seconds without a report after which a machine is reported as unreachable. After a cut of five
seconds TCP sends again 6.2 s after the loss: it waits 0.2 s, then twice as long each time."""
_UNEXPLAINED_S = 8.0
"""Seconds after which it is reported that nothing is known about a silent machine's reason."""
_AGENT_LOST_S = 3.0
"""Seconds without a report after which a dead or frozen agent is reported. A dead one is normally
replaced within a second."""
_LOSSES = {
    VerdictKind.NODE_GONE: (
        ("is gone{}, and its ranks count as lost", "are gone{}, and their ranks count as lost"),
        "Resume the run from its last checkpoint, with that machine or without it.",
    ),
    VerdictKind.NODE_UNREACHABLE: (
        (
            "does not answer{}: the link is cut or it is down",
            "do not answer{}: the link is cut or they are down",
        ),
        "Check the link and whether {} runs (ping, ssh). The run continues by itself when the link"
        " is back, unless the ranks' own connections have failed.",
    ),
    VerdictKind.AGENT_KILLED: (
        ("answers, but its agent has ended{}", "answer, but their agents have ended{}"),
        "Its log says why it ended (logs/supervisor.log in its folder below $LTUI_HOME/nodes on"
        " {}); the machine can join again.",
    ),
    VerdictKind.AGENT_FROZEN: (
        (
            "answers, but its agent does not run, stopped or starved{}",
            "answer, but their agents do not run, stopped or starved{}",
        ),
        "Look for the agent on {} with `ps -o pid,stat,args -C ltui`; if it is stopped (state T),"
        " continue it with `kill -CONT PID`.",
    ),
}
"""kind -> what is wrong with one machine and with several, and the remedy."""


def unobserved_ranks(case: StallCase) -> list[Verdict] | None:
    """Blame the lost machines if observed ranks wait and none of them is at fault.

    Without evidence as well, because by pulses alone a rank that waits for a lost machine looks
    like one that is stuck.
    """
    inputs = case.inputs
    unfinished = any({*n.ranks} - {*inputs.ended} for n in inputs.lost.values())
    if not unfinished or (case.located and not case.waiting):
        return None
    waiting = tuple(sorted(case.overdue))
    if not waiting:
        return []
    where = None
    if case.unfinished is not None:
        entry = next(iter(case.unfinished.at.values()), None)
        where = collective_text(entry) if entry is not None else None
    return machine_verdicts(inputs, waiting, where)


def machine_verdicts(
    inputs: PreparedInput, waiting: tuple[int, ...] = (), where: str | None = None
) -> list[Verdict]:
    """Return one verdict for each reason why machines do not report.

    ``waiting`` are the ranks elsewhere that wait in ``where``. Without them it is a warning,
    because a run may do without the connection between its machines' agents.
    """
    by_kind: dict[VerdictKind, list[NodeSnapshot]] = {}
    for _, node in sorted(inputs.lost.items()):
        if (kind := _kind(node)) is not None:
            by_kind.setdefault(kind, []).append(node)
    return [_verdict(inputs, kind, nodes, waiting, where) for kind, nodes in by_kind.items()]


def _kind(node: NodeSnapshot) -> VerdictKind | None:
    """Return why the machine does not report; None if that is too short to say."""
    age_s = node.link_age_s
    kind, after_s = {
        NodeState.GONE: (VerdictKind.NODE_GONE, 0.0),
        NodeState.UNREACHABLE: (VerdictKind.NODE_UNREACHABLE, _UNREACHABLE_S),
        NodeState.AGENT_DEAD: (VerdictKind.AGENT_KILLED, _AGENT_LOST_S),
        NodeState.FROZEN: (VerdictKind.AGENT_FROZEN, _AGENT_LOST_S),
    }.get(node.state, (VerdictKind.NODE_UNREACHABLE, _UNEXPLAINED_S))
    return kind if age_s is None or age_s >= after_s else None


def _verdict(
    inputs: PreparedInput,
    kind: VerdictKind,
    nodes: Sequence[NodeSnapshot],
    waiting: tuple[int, ...],
    where: str | None,
) -> Verdict:
    names = [n.name for n in nodes]
    ages_s = [n.link_age_s for n in nodes if n.link_age_s is not None]
    lost = sorted(r for n in nodes for r in n.ranks if r not in inputs.ended)
    gone = kind is VerdictKind.NODE_GONE
    level = VerdictLevel.STALLED if waiting else VerdictLevel.WARNING
    predicates, remedy = _LOSSES[kind]
    age = f" (no report for {max(ages_s):.0f} s)" if ages_s else ""
    state = predicates[len(nodes) > 1].format(age)
    cause = f"{machines_text(names)} {state}"
    if waiting:
        wait, place = verb(waiting, "waits", "wait"), f" in {where}" if where else ""
        cause = (
            f"{inputs.ranks_text(waiting)} {wait}{place} for {machines_text(names)}, which {state}"
        )
    if lost and not gone:
        cause += f"; {inputs.ranks_text(lost)} cannot be observed"
    reason_known = all(n.state not in MAY_BE_LATE for n in nodes)
    earlier = inputs.history.active_of(kind)
    began = inputs.now_s - max(ages_s) if inputs.now_s is not None and ages_s else inputs.now_s
    if earlier is not None and {*earlier.nodes} & {n.node for n in nodes}:
        began = earlier.began
    return Verdict(
        kind=kind,
        level=VerdictLevel.DEAD if gone else level,
        nodes=tuple(n.node for n in nodes),
        culprits=tuple(lost) if gone else (),
        waiting=waiting,
        place=machines_text(names),
        cause=cause,
        remedy=remedy.format(machines_text(names)),
        confidence=0.9 if reason_known else 0.6,
        began=began,
        evidence={
            "link_age_s": {n.name: n.link_age_s for n in nodes},
            "notes": {n.name: n.note for n in nodes if n.note is not None},
            "still_s": inputs.still_facts(waiting),
            "ranks": position_facts(inputs.pulses_of(waiting)),
        },
    )
