"""Ranks in collectives that can't match: whose fault it is, and what it came of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ltui.training.diagnosis.evidence import RankEvidence
from ltui.training.diagnosis.rules import left_early
from ltui.training.diagnosis.rules.collective_positions import (
    UnfinishedCollective,
    call_site_of,
    collective_on_stack,
    find_divergence,
    minority_ranks,
    pending_collective,
)
from ltui.training.diagnosis.rules.gpu_causes import breaking_cause
from ltui.training.diagnosis.rules.judge_input import STEP_PHASES, PreparedInput, position_facts
from ltui.training.diagnosis.rules.stack_frames import frame_facts, frame_text, has_frame
from ltui.training.diagnosis.rules.stall_causes import StallReason, explain_stall
from ltui.training.diagnosis.rules.verdict_words import (
    collective_text,
    ranks_text,
    sizes_text,
    verb,
    waiting_text,
)
from ltui.training.state.run_snapshot import Verdict
from ltui.training.tensor_queue.record_types import Phase, PulseState

LEFT_VALIDATION = "left validation"
_BEYOND_BACKWARD = frozenset({Phase.OPTIMIZER, Phase.BATCH_END, Phase.FETCH, Phase.TRANSFER})
_EVALUATION = frozenset({Phase.VALIDATION, Phase.TEST, Phase.SANITY})


def mismatch_verdict(m: PreparedInput, found: UnfinishedCollective) -> Verdict:
    """The verdict on ranks that did different things at ``found.seq``."""
    for look in (_sigterm, _uneven, _skipped_backward, _shifted):
        if (verdict := look(m, found)) is not None:
            return verdict
    return _odd(m, found)


def _sigterm(m: PreparedInput, found: UnfinishedCollective) -> Verdict | None:
    for rank in found.at:
        of_rank = m.close[rank]
        if has_frame(of_rank.main_stack, "_sigterm_notifier_fn"):
            reason = explain_stall(of_rank, m.pulses.get(rank))
            return stall_verdict(m, (rank,), reason, _others(found, (rank,)), found)
    return None


def find_uneven_ranks(m: PreparedInput, ranks: set[int]) -> tuple[tuple[int, ...], str] | None:
    """Ranks that left an epoch or a validation before the others, and how; None where all are at
    one stage."""
    pulses = {r: p for r in ranks if (p := m.pulses.get(r)) is not None}
    stages = {r: _stage(p) for r, p in pulses.items()}
    if len(set(stages.values())) < 2:
        return None
    evaluating = [r for r, p in pulses.items() if p.phase in _EVALUATION]
    counts = {r: completed_batches(m, r) for r in pulses}
    if evaluating:
        short = _short_in_training(evaluating, pulses, counts)
        if short is None:
            return _left_validation(m, evaluating, pulses)
        return short, _left_epoch(short, pulses, counts)
    first = min(stages.values())
    short_ranks = tuple(sorted(r for r, s in stages.items() if s != first))
    return short_ranks, _left_epoch(short_ranks, pulses, counts)


def _stage(pulse: PulseState) -> tuple[int, int]:
    if pulse.phase in STEP_PHASES:
        return pulse.epoch, 0
    return pulse.epoch, 1 if pulse.phase in _EVALUATION else 2


def _short_in_training(
    evaluating: list[int], pulses: Mapping[int, PulseState], counts: Mapping[int, int | None]
) -> tuple[int, ...] | None:
    """Ranks that evaluate because their training batches ran out before the others'."""
    training = [r for r, p in pulses.items() if p.phase in STEP_PHASES]
    epoch = min(pulses[r].epoch for r in evaluating)
    still = [
        r
        for r in training
        if pulses[r].epoch == epoch and (counts[r] or 0) >= max(counts[e] or 0 for e in evaluating)
        and pulses[r].phase is not Phase.BATCH_END
    ]  # fmt: skip
    return tuple(sorted(evaluating)) if still else None


def _left_validation(
    m: PreparedInput, evaluating: list[int], pulses: Mapping[int, PulseState]
) -> tuple[tuple[int, ...], str]:
    left = tuple(sorted(r for r in pulses if r not in evaluating))
    at = max(pulses[r].batch for r in evaluating)
    counts = {r: n for r in left if (n := m.history.evaluated.get(r)) is not None}
    after = f" after {counts[left[0]]} batches" if left and left[0] in counts else ""
    return left, (
        f"{LEFT_VALIDATION}{after} while {ranks_text(sorted(evaluating))}"
        f" {verb(evaluating, 'is', 'are')} still at validation batch {at}:"
        " validation batch counts differ (uneven)"
    )


def _left_epoch(
    short: tuple[int, ...], pulses: Mapping[int, PulseState], counts: Mapping[int, int | None]
) -> str:
    others = [r for r in pulses if r not in short]
    first = pulses[short[0]]
    epoch = min((pulses[r].epoch for r in others), default=first.epoch)
    done = counts[short[0]]
    after = f" after {done} batches" if done is not None else ""
    late = max(((counts[r] or 0) for r in others), default=0)
    return (
        f"ended epoch {epoch}{after} while {ranks_text(sorted(others))} still"
        f" {verb(others, 'trains', 'train')} (batch {late + 1}): batch counts differ (uneven)"
    )


def completed_batches(m: PreparedInput, rank: int) -> int | None:
    """Training batches that the rank completed in its last epoch with any."""
    folded = m.fold.ranks.get(rank)
    if folded is None or folded.batch is None:
        return None
    pulse = m.pulses.get(rank)
    if pulse is not None and pulse.phase in STEP_PHASES and folded.epoch != pulse.epoch:
        return pulse.batch
    return folded.batch + 1


def _uneven(m: PreparedInput, found: UnfinishedCollective) -> Verdict | None:
    left = find_uneven_ranks(m, set(found.at) | set(found.absent))
    if left is None:
        return None
    ranks, how = left
    return uneven_verdict(m, ranks, how, found)


def uneven_verdict(
    m: PreparedInput, ranks: tuple[int, ...], how: str, found: UnfinishedCollective | None
) -> Verdict:
    """Ranks that left an epoch or a validation before the others: of their own accord, or because
    they had fewer batches."""
    others = _others(found, ranks) if found else ()
    early = left_early.departure(m, ranks)
    if early is not None and not how.startswith(LEFT_VALIDATION):
        behind = others or tuple(sorted(r for r in m.alive if r not in ranks))
        reason = left_early.reason(early, behind, _label(m, ranks))
        return stall_verdict(m, ranks, reason, others, found)
    reason = StallReason(
        kind="uneven",
        text=how,
        motion="fault",
        place=_label(m, ranks),
        remedy="Give every rank the same number of batches: a DistributedSampler, drop_last=True,"
        " or limit_train_batches / limit_val_batches.",
        confidence=0.9,
        facts={
            "epoch_batches": {
                str(r): dict(f.epoch_batches) for r, f in m.fold.ranks.items() if f.epoch_batches
            }
        },
    )
    return stall_verdict(m, ranks, reason, others, found)


def _skipped_backward(m: PreparedInput, found: UnfinishedCollective) -> Verdict | None:
    """Ranks that went past the backward in which others reduce gradients."""
    phases = {r: p.phase for r in found.at if (p := m.pulses.get(r)) is not None}
    reducing = [r for r, p in phases.items() if p is Phase.BACKWARD and "reduce" in found.at[r].op]
    ahead = tuple(sorted(r for r, p in phases.items() if p in _BEYOND_BACKWARD))
    if not reducing or not ahead or len(reducing) + len(ahead) < len(found.at):
        return None
    reason = StallReason(
        kind="unused_parameters",
        text="issued no gradient all_reduce and continued with the next batch: it skipped the"
        " backward pass or used different parameters than the others",
        motion="fault",
        place=_label(m, ahead),
        remedy="Use strategy='ddp_find_unused_parameters_true', and run every backward pass on"
        " every rank.",
        confidence=0.8,
    )
    return stall_verdict(m, ahead, reason, tuple(sorted(reducing)), found)


def _shifted(m: PreparedInput, found: UnfinishedCollective) -> Verdict | None:
    """An earlier collective that matched by its number but was called from another line."""
    earlier = find_divergence({r: m.close[r] for r in (*found.at, *found.absent)})
    if earlier is None or earlier.group != found.group or earlier.seq >= found.seq:
        return None
    by_site = [f"rank {r} at {frame_text(frame)}" for r, frame in sorted(earlier.sites.items())]
    reason = StallReason(
        kind="mismatch",
        text=f"called {earlier.op} #{earlier.seq} from a different line than the others"
        f" ({'; '.join(by_site[:4])}): all later collectives are mismatched",
        motion="fault",
        place=frame_text(earlier.sites[earlier.odd[0]]),
        frame=earlier.sites[earlier.odd[0]],
        remedy="Move the collective out of code that only some ranks run (rank-zero code).",
        confidence=0.7,
        facts={"diverged": {"seq": earlier.seq, "op": earlier.op}},
    )
    return stall_verdict(m, earlier.odd, reason, _others(found, earlier.odd), found)


def _odd(m: PreparedInput, found: UnfinishedCollective) -> Verdict:
    odd = minority_ranks(found, m.close)
    ops = {e.op for e in found.at.values()}
    recorded = found.seq >= 0
    told = []
    for rank, entry in sorted(found.at.items()):
        site = call_site_of(entry, m.close.get(rank))
        at = f" at {frame_text(site)}" if site else ""
        size = f" of {sizes_text(entry)}" if entry.sizes or (recorded and len(ops) == 1) else ""
        told.append(f"rank {rank} {entry.op}{size}{at}")
    line = call_site_of(found.at[odd[0]], m.close.get(odd[0]))
    what = "mismatch"
    if len(ops) == 1:
        what = "sizes differ: size mismatch" if recorded else "from a different line: mismatch"
    at_number = f" at #{found.seq}" if recorded else ""
    who = "" if len(odd) < len(found.at) else " (it is unknown which of them is wrong)"
    reason = StallReason(
        kind="mismatch",
        text=f"called a different collective than the others: {what}{at_number}"
        f" ({'; '.join(told[:4])}){who}",
        motion="fault",
        place=_label(m, odd, frame_text(line)),
        frame=line,
        remedy="Every rank must call the same collectives in the same order; check that line.",
        confidence=0.85 if recorded and len(odd) < len(found.at) else 0.5,
        facts=frame_facts(line),
    )
    return stall_verdict(m, odd, reason, _others(found, odd), found)


def crossed(m: PreparedInput, found: UnfinishedCollective) -> Verdict:
    """Ranks wait in collectives of different groups, each for the others."""
    few = len(found.absent) < len(found.waiting)
    odd = found.absent if few else tuple(sorted({*found.absent, *found.waiting}))
    alike: dict[str, list[int]] = {}
    line = None
    for rank in sorted({*found.absent, *found.waiting}):
        entry = pending_collective(m.close[rank])
        if entry is None:
            continue
        site = call_site_of(entry, m.close[rank])
        line = site if rank == odd[0] else line
        at = f" at {frame_text(site)}" if site else ""
        text = f"{collective_text(entry)} of group {entry.group}{at}"
        alike.setdefault(text, []).append(rank)
    told = [f"{ranks_text(ranks)} {text}" for text, ranks in alike.items()]
    who = "" if few else " (it is unknown which of them is wrong)"
    reason = StallReason(
        kind="mismatch",
        text=f"{verb(odd, 'waits', 'wait')} in another process group's collective than the others"
        f" ({'; '.join(told[:4])}): groups are used in different orders{who}",
        motion="fault",
        place=_label(m, odd, frame_text(line)),
        frame=line,
        remedy="Every rank must use its process groups in the same order; check those lines.",
        confidence=0.8 if few else 0.5,
        facts=frame_facts(line),
    )
    others = _others(found, odd)
    verdict = stall_verdict(m, odd, reason, others, found)
    return replace(verdict, cause=f"{ranks_text(odd)} {reason.text}")


def _others(found: UnfinishedCollective, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """All that meet at the number: gloo calls done what a rank has only sent."""
    return tuple(sorted(r for r in {*found.at, *found.absent} if r not in ranks))


def _label(m: PreparedInput, ranks: tuple[int, ...], detail: str | None = None) -> str | None:
    pulse = m.pulses.get(ranks[0]) if ranks else None
    label = pulse.phase.label if pulse is not None else None
    return f"{label}, {detail}" if label and detail else detail or label


# -- one way to make a verdict of a reason ---------------------------------------------------------


def stall_verdict(
    m: PreparedInput,
    culprits: tuple[int, ...],
    reason: StallReason,
    waiting: tuple[int, ...],
    found: UnfinishedCollective | None,
    *,
    level: str = "stalled",
    budget_s: float | None = None,
) -> Verdict:
    pulses = {r: p for r in (*culprits, *waiting) if (p := m.pulses.get(r)) is not None}
    place = _waited_for(found, waiting) or _stood_in(m, waiting)
    cause = f"{ranks_text(culprits)} {reason.text}{waiting_text(waiting, place)}"
    gpu = breaking_cause(m.devices, culprits or waiting)
    if gpu is not None:
        cause = f"{cause}; {gpu.text}"
    evidence: dict[str, Any] = {
        "still_s": {str(r): round(m.still[r], 1) for r in pulses if r in m.still},
        "ranks": {str(r): position_facts(p) for r, p in pulses.items()},
        **reason.facts,
    }
    if budget_s is not None:
        evidence["budget_s"] = round(budget_s, 1)
    if found is not None:
        if found.seq >= 0:
            evidence["collective"] = {"group": found.group, "seq": found.seq}
        evidence["at"] = {
            **{str(r): f"{e.op} {sizes_text(e)}" for r, e in sorted(found.at.items())},
            **{str(r): "absent" for r in found.absent},
        }
    began = min((p.changed_wall_s for r, p in pulses.items() if r in culprits), default=None)
    return Verdict(
        kind=reason.kind,
        level=level,
        culprits=culprits,
        waiting=waiting,
        place=reason.place,
        cause=cause,
        remedy=reason.remedy if gpu is None else gpu.remedy,
        confidence=reason.confidence,
        began=began,
        evidence=evidence,
    )


def _waited_for(found: UnfinishedCollective | None, waiting: tuple[int, ...]) -> str | None:
    entries = [found.at[r] for r in waiting if r in found.at] if found else []
    return collective_text(entries[0]) if entries else None


def _stood_in(m: PreparedInput, waiting: tuple[int, ...]) -> str | None:
    names = {name for r in waiting if (e := m.close.get(r)) and (name := _stand(e))}
    return names.pop() if len(names) == 1 else None


def _stand(of_rank: RankEvidence) -> str | None:
    return f'barrier "{of_rank.barrier}"' if of_rank.barrier else collective_on_stack(of_rank)
