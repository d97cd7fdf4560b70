"""Stall rules: no rank is missing from the collective in which ranks wait. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis import thresholds
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.machines import machines_text, resend_s, resumes_by_itself
from ltui.training.diagnosis.observations.collective_positions import find_mismatch_by_stacks
from ltui.training.diagnosis.stalls.collective_mismatch import mismatch_verdict
from ltui.training.diagnosis.stalls.stall_case import StallCase
from ltui.training.diagnosis.stalls.stall_verdict import Activity, StallReason, stall_verdict
from ltui.training.diagnosis.stalls.uneven_batches import (
    find_uneven_ranks,
    finished_early_verdict,
    uneven_verdict,
)
from ltui.training.diagnosis.verdict_words import collective_text
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdict_kinds import VerdictKind
from ltui.training.tensor_queue.record_types import STEP_PHASES, Phase


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
        uneven = find_uneven_ranks(inputs, set(ranks))
        if uneven is not None:
            return [uneven_verdict(inputs, uneven, None)]
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
    restored = [n for n in inputs.nodes if resumes_by_itself(n)]
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
            remedy=f"Wait: the run continues by itself within about {resend_s(cut_s):.0f} s.",
        )
    return replace(verdict, culprits=(), waiting=ranks)
