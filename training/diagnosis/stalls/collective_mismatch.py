"""Verdicts on ranks in collectives that cannot match: which rank is at fault, and why. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.collective_positions import (
    UnfinishedCollective,
    call_site_of,
    find_divergence,
    find_mismatch_by_stacks,
    minority_ranks,
    pending_collective,
)
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stack_frames import at_frame, frame_text, has_frame
from ltui.training.diagnosis.stalls.stall_case import (
    Activity,
    StallCase,
    StallReason,
    stall_verdict,
)
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.uneven_batches import finished_early_verdict, uneven_verdict
from ltui.training.diagnosis.verdict_words import (
    collective_text,
    machines_text,
    place_text,
    sizes_text,
    verb,
)
from ltui.training.shared.record_types import STEP_PHASES, Phase
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState, RankState, Verdict
from ltui.training.state.verdicts import VerdictKind

_AFTER_BACKWARD = frozenset({Phase.OPTIMIZER, Phase.BATCH_END, Phase.FETCH, Phase.TRANSFER})
_CALLS_NAMED = 4
"""Maximum number of calls that a sentence lists."""
_LONGEST_RESEND_S = 120.0
"""Maximum of Linux's time between two attempts to send a segment (TCP_RTO_MAX)."""
_RESEND_MARGIN_S = 10.0
"""Seconds that ranks, and the reports of them, may take after that."""
_UNKNOWN_CULPRIT = " (it is unknown which of them is wrong)"


def mismatch_verdict(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict:
    """Return the verdict on ranks that did different things at one collective."""
    for rule in (_sigterm, _uneven_batches, _skipped_backward, _earlier_divergence):
        if (verdict := rule(inputs, unfinished)) is not None:
            return verdict
    return _different_calls(inputs, unfinished)


def _sigterm(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict | None:
    """Detect a rank in Lightning's SIGTERM handler, which calls a collective."""
    for rank in unfinished.at:
        if has_frame(inputs.settled[rank].main_stack, "_sigterm_notifier_fn"):
            reason = explain_rank(inputs, rank)
            others = unfinished.others((rank,))
            return stall_verdict(inputs, (rank,), reason, others, unfinished)
    return None


def _uneven_batches(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict | None:
    """Detect ranks that have left an epoch or a validation."""
    return uneven_verdict(inputs, set(unfinished.others(())), unfinished)


def _skipped_backward(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict | None:
    """Detect ranks that are past the backward pass in which others reduce gradients."""
    phases = {r: p.phase for r, p in inputs.pulses_of(unfinished.at).items()}
    reducing = [
        r
        for r, phase in phases.items()
        if phase is Phase.BACKWARD and "reduce" in unfinished.at[r].op
    ]
    ahead = tuple(sorted(r for r, phase in phases.items() if phase in _AFTER_BACKWARD))
    if not reducing or not ahead or len(reducing) + len(ahead) < len(unfinished.at):
        return None
    reason = StallReason(
        kind=VerdictKind.UNUSED_PARAMETERS,
        text="issued no gradient all_reduce and continued with the next batch: it skipped the"
        " backward pass or used different parameters than the others",
        activity=Activity.FAULT,
        place=place_text(inputs.pulses.get(ahead[0])),
        remedy="Use strategy='ddp_find_unused_parameters_true', and run every backward pass on"
        " every rank.",
        confidence=0.8,
    )
    return stall_verdict(inputs, ahead, reason, tuple(sorted(reducing)), unfinished)


def _earlier_divergence(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict | None:
    """Detect an earlier collective that ranks called from different lines."""
    divergence = find_divergence(
        {r: inputs.settled[r] for r in (*unfinished.at, *unfinished.absent)}
    )
    if (
        divergence is None
        or divergence.group != unfinished.group
        or divergence.seq >= unfinished.seq
    ):
        return None
    culprits = divergence.minority
    lines = [
        f"{inputs.ranks_text((r,))} at {frame_text(frame)}"
        for r, frame in sorted(divergence.sites.items())[:_CALLS_NAMED]
    ]
    first_line = divergence.sites[culprits[0]]
    reason = StallReason(
        kind=VerdictKind.MISMATCH,
        text=f"called {divergence.op} #{divergence.seq} from a different line than the others"
        f" ({'; '.join(lines)}): all later collectives are mismatched",
        activity=Activity.FAULT,
        place=frame_text(first_line),
        remedy="Move the collective out of code that only some ranks run (rank-zero code).",
        confidence=0.7,
        facts={"diverged": {"seq": divergence.seq, "op": divergence.op}},
    )
    return stall_verdict(inputs, culprits, reason, unfinished.others(culprits), unfinished)


def _different_calls(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict:
    """Blame the ranks that called another collective, or the same one with other sizes."""
    culprits = minority_ranks(unfinished, inputs.settled)
    same_operation = len({e.op for e in unfinished.at.values()}) == 1
    recorded = unfinished.seq >= 0
    calls = []
    for rank, entry in sorted(unfinished.at.items()):
        line = call_site_of(entry, inputs.settled.get(rank))
        show_sizes = entry.sizes or (recorded and same_operation)
        sizes = f" of {sizes_text(entry)}" if show_sizes else ""
        calls.append(f"{inputs.ranks_text((rank,))} {entry.op}{sizes}{at_frame(line)}")
    difference = "mismatch"
    if same_operation:
        difference = (
            "sizes differ: size mismatch" if recorded else "from a different line: mismatch"
        )
    at_number = f" at #{unfinished.seq}" if recorded else ""
    culprit_known = len(culprits) < len(unfinished.at)
    first_line = call_site_of(unfinished.at[culprits[0]], inputs.settled.get(culprits[0]))
    reason = StallReason(
        kind=VerdictKind.MISMATCH,
        text=f"called a different collective than the others: {difference}{at_number}"
        f" ({'; '.join(calls[:4])}){'' if culprit_known else _UNKNOWN_CULPRIT}",
        activity=Activity.FAULT,
        place=place_text(inputs.pulses.get(culprits[0]), frame_text(first_line)),
        frame=first_line,
        remedy="Every rank must call the same collectives in the same order; check that line.",
        confidence=0.85 if recorded and culprit_known else 0.5,
    )
    return stall_verdict(inputs, culprits, reason, unfinished.others(culprits), unfinished)


def crossed_groups_verdict(inputs: PreparedInput, unfinished: UnfinishedCollective) -> Verdict:
    """Return the verdict on ranks that wait for each other in collectives of different groups."""
    ranks = tuple(sorted({*unfinished.absent, *unfinished.waiting}))
    culprit_known = len(unfinished.absent) < len(unfinished.waiting)
    culprits = unfinished.absent if culprit_known else ranks
    ranks_by_call: dict[str, list[int]] = {}
    first_line = None
    for rank in ranks:
        entry = pending_collective(inputs.settled[rank])
        if entry is None:
            continue
        line = call_site_of(entry, inputs.settled[rank])
        first_line = line if rank == culprits[0] else first_line
        call = f"{collective_text(entry)} of group {entry.group}{at_frame(line)}"
        ranks_by_call.setdefault(call, []).append(rank)
    calls = [f"{inputs.ranks_text(callers)} {call}" for call, callers in ranks_by_call.items()]
    reason = StallReason(
        kind=VerdictKind.MISMATCH,
        text=f"{verb(culprits, 'waits', 'wait')} in another process group's collective than the"
        f" others ({'; '.join(calls[:4])}): groups are used in different"
        f" orders{'' if culprit_known else _UNKNOWN_CULPRIT}",
        activity=Activity.FAULT,
        place=place_text(inputs.pulses.get(culprits[0]), frame_text(first_line)),
        frame=first_line,
        remedy="Every rank must use its process groups in the same order; check those lines.",
        confidence=0.8 if culprit_known else 0.5,
    )
    verdict = stall_verdict(inputs, culprits, reason, unfinished.others(culprits), unfinished)
    return replace(verdict, cause=f"{inputs.ranks_text(culprits)} {reason.text}")


def mismatched_collective(case: StallCase) -> list[Verdict] | None:
    """Blame ranks that enqueued a collective that cannot match the others'."""
    if case.unfinished is None or not case.unfinished.mismatched:
        return None
    if not _proven(case):
        return []
    return [mismatch_verdict(case.inputs, case.unfinished)]


def finished_early(case: StallCase) -> list[Verdict] | None:
    """Blame ranks that finished training while others wait for them in a collective."""
    if case.unfinished is None:
        return None
    early = tuple(r for r in case.inputs.ended if r not in case.unfinished.at)
    if not early:
        return None
    if not _proven(case):
        return []
    return [finished_early_verdict(case.inputs, early, case.waiting, case.unfinished)]


def rank_died(case: StallCase) -> list[Verdict] | None:
    """Report no stall if ranks wait for a dead rank, which has a verdict of its own."""
    dead = RankState.DEAD in case.inputs.states.values()
    return [] if case.unfinished is not None and dead else None


def all_ranks_wait(case: StallCase) -> list[Verdict] | None:
    """Blame the transport if all ranks wait in one collective, or else a mismatch of stacks."""
    if not case.waiting or case.absent:
        return None
    inputs, unfinished = case.inputs, case.unfinished
    ranks = tuple(sorted(unfinished.at)) if unfinished is not None else case.waiting
    age_s = case.shortest_still_s(ranks)
    if unfinished is None and age_s > thresholds.FAULT_SETTLE_S:
        uneven = uneven_verdict(inputs, set(ranks), None)
        if uneven is not None:
            return [uneven]
    if any(r not in ranks for r in inputs.ended):
        return None
    budget_s = thresholds.frozen_budget_s(
        _common_phase(inputs, ranks), inputs.policy, case.slowest_step_s, inputs.history.longest_s
    )
    if len(ranks) < 2 or age_s <= budget_s:
        return []
    if unfinished is None:
        mismatch = find_mismatch_by_stacks(inputs.settled, set(ranks))
        if mismatch is not None:
            return [mismatch_verdict(inputs, mismatch)]
    return [_transport_verdict(case, ranks)]


def _proven(case: StallCase) -> bool:
    """Return True if the ranks have waited long enough for all recorders to be up to date."""
    assert case.unfinished is not None
    still_s = [s for r in case.unfinished.at if (s := case.inputs.still_s.get(r)) is not None]
    return min(still_s, default=0.0) > thresholds.FAULT_SETTLE_S


def _common_phase(inputs: PreparedInput, ranks: tuple[int, ...]) -> Phase:
    """Return the phase of all ranks, the first one within a step, or UNKNOWN if they differ."""
    phases = {p.phase for p in inputs.pulses_of(ranks).values()}
    comparable = len(phases) == 1 or phases <= STEP_PHASES
    return min(phases) if phases and comparable else Phase.UNKNOWN


def _resend_s(cut_s: float) -> float:
    """Return the seconds after the end of a cut within which TCP sends lost data again.

    TCP doubles the time between its attempts, to two minutes at most, so the last attempt during
    the cut and the first one after it are at most as far apart as the cut lasted (RFC 6298).
    """
    return min(cut_s, _LONGEST_RESEND_S) + _RESEND_MARGIN_S


def _resumes_by_itself(node: NodeSnapshot) -> bool:
    """Return True if the link was cut, and TCP may not have sent the lost data again yet."""
    if node.cut_s is None or node.restored_s is None or node.state is not NodeState.CONNECTED:
        return False
    return node.restored_s <= _resend_s(node.cut_s)


def _transport_verdict(case: StallCase, ranks: tuple[int, ...]) -> Verdict:
    inputs, unfinished = case.inputs, case.unfinished
    evidence = {r: inputs.settled[r] for r in ranks}
    entry = unfinished.at[ranks[0]] if unfinished is not None else None
    collective = collective_text(entry) if entry else "the same collective"
    unacknowledged = {str(r): e.unacknowledged_bytes for r, e in evidence.items()}
    unacknowledged = {r: count for r, count in unacknowledged.items() if count}
    total = sum(count or 0 for count in unacknowledged.values())
    bytes_text = f"; unacknowledged bytes: {total}" if unacknowledged else ""
    uses_gpus = any(e.gpu for e in evidence.values())
    at_start = entry is not None and entry.seq <= 2
    # A GPU begins a collective only after the kernels before it, but it is recorded at once.
    kernel_text = ", or a kernel before it does not end on one of their GPUs" if uses_gpus else ""
    reason = StallReason(
        kind=VerdictKind.TRANSPORT,
        text=f"all wait in {collective} and no rank is missing: the network between them does not"
        f" deliver the data{kernel_text}{bytes_text}",
        activity=Activity.FROZEN,
        place=collective,
        remedy="Try NCCL_P2P_DISABLE=1, and check ACS and the IOMMU."
        if uses_gpus and at_start
        else "Check the network between the ranks (link, firewall, MTU).",
        confidence=0.8 if unacknowledged else 0.6,
        facts={
            "unacknowledged_bytes": unacknowledged,
            "retransmits": sum(e.retransmits or 0 for e in evidence.values()),
        },
    )
    verdict = stall_verdict(inputs, ranks, reason, (), unfinished)
    restored = [n for n in inputs.nodes if _resumes_by_itself(n)]
    if restored and unfinished is not None:
        names = [n.name for n in restored]
        cut_s = max(n.cut_s or 0.0 for n in restored)
        verdict = replace(
            verdict,
            level=VerdictLevel.WARNING,
            cause=(
                f"{inputs.ranks_text(ranks)} still wait in {collective}: the link to "
                f"{machines_text(names)} was cut for {cut_s:.0f} s and is back, but after a cut TCP"
                " sends again only after a delay"
            ),
            remedy=f"Wait: the run continues by itself within about {_resend_s(cut_s):.0f} s.",
        )
    return replace(verdict, culprits=(), waiting=ranks)
