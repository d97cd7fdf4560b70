"""Verdicts on ranks in collectives that cannot match: which rank is at fault, and why. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.observations.collective_positions import (
    UnfinishedCollective,
    call_site_of,
    find_divergence,
    minority_ranks,
    pending_collective,
)
from ltui.training.diagnosis.observations.stack_frames import at_frame, frame_text, has_frame
from ltui.training.diagnosis.stalls.stall_causes import explain_rank
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.stalls.uneven_batches import find_uneven_ranks, uneven_verdict
from ltui.training.diagnosis.verdict_words import (
    collective_text,
    place_text,
    sizes_text,
    verb,
)
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdict_kinds import VerdictKind
from ltui.training.tensor_queue.record_types import Phase

_AFTER_BACKWARD = frozenset({Phase.OPTIMIZER, Phase.BATCH_END, Phase.FETCH, Phase.TRANSFER})
_CALLS_NAMED = 4
"""Maximum number of calls that a sentence lists."""
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
    uneven = find_uneven_ranks(inputs, set(unfinished.others(())))
    return uneven_verdict(inputs, uneven, unfinished) if uneven is not None else None


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
