"""Warnings before a freeze: drift, diverging call sites, scarce memory, a bad loss. Pure."""

from __future__ import annotations

from ltui.training.diagnosis.evidence import HostEvidence, RankEvidence
from ltui.training.diagnosis.rules import left_early
from ltui.training.diagnosis.rules.collective_positions import find_divergence
from ltui.training.diagnosis.rules.judge_input import STEP_PHASES, PreparedInput, position_facts
from ltui.training.diagnosis.rules.stack_frames import frame_text
from ltui.training.diagnosis.rules.verdict_words import ranks_text
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import Verdict

BAD_LOSSES = 3
"""Batches in a row without a finite loss before it is reported (one may be a skipped batch)."""
DRIFT_S = 2.0
"""Ranks pass an epoch's end one after another; a drift lasts."""
DRIFT_KEPT_S = 5.0
"""A drift stands for so long while no two ranks are seen at an equal step."""
_EVEN = "Give every rank the same number of batches: a DistributedSampler or drop_last=True."
_SCARCE_SHARE = 0.05
_SCARCE_BYTES = 256 << 20


def bad_loss(fold: FoldState) -> Verdict | None:
    bad = {r: f for r, f in sorted(fold.ranks.items()) if f.bad_loss >= BAD_LOSSES}
    if not bad:
        return None
    first = min(bad, key=lambda r: (bad[r].bad_loss_step or 0, r))
    step = bad[first].bad_loss_step
    since = "" if step is None else f" since step {step} (first on rank {first})"
    last = bad[first].recent_loss[-1] if bad[first].recent_loss else None
    what = "infinite" if last in (float("inf"), float("-inf")) else "NaN"
    return Verdict(
        kind="nan_loss",
        level="warning",
        culprits=tuple(bad),
        place="loss",
        cause=f"the loss of {ranks_text(list(bad))} is {what}{since}",
        remedy="Stop, and resume from a checkpoint before that step with a lower learning rate.",
        began=bad[first].bad_loss_wall_s,
        evidence={
            "step": step,
            "first_rank": first,
            "batches": {str(r): f.bad_loss for r, f in bad.items()},
        },
    )


def drifting(m: PreparedInput) -> tuple[int, ...] | None:
    """Ranks that are in another epoch, or at another batch, than the lead at an equal step; None
    where no two ranks are at an equal step now."""
    told = {
        r: (p.epoch, f.batch)
        for r, p in m.alive.items()
        if p.phase in STEP_PHASES and (f := m.fold.ranks.get(r)) is not None and f.batch is not None
    }
    steps: dict[int, list[int]] = {}
    for rank in told:
        folded = m.fold.ranks[rank]
        if folded.global_step is not None and folded.global_step == m.alive[rank].global_step:
            steps.setdefault(folded.global_step, []).append(rank)
    together = [ranks for ranks in steps.values() if len(ranks) > 1]
    for ranks in together:
        places = {(m.fold.ranks[r].epoch, m.fold.ranks[r].batch) for r in ranks}
        if len(places) > 1:
            first = m.fold.ranks[min(ranks)]
            lead = (first.epoch, first.batch)
            return tuple(r for r in ranks if (m.fold.ranks[r].epoch, m.fold.ranks[r].batch) != lead)
    return () if together else None


def drift(m: PreparedInput, ranks: tuple[int, ...]) -> Verdict:
    """The warning about ``ranks``, which are elsewhere than the lead at an equal step."""
    departed = tuple(r for r in m.alive if left_early.departure(m, (r,)) is not None)
    left = left_early.departure(m, departed) if 0 < len(departed) < len(m.alive) else None
    why, remedy = "batch counts differ (uneven)", _EVEN
    if left is not None:
        ranks, remedy = departed, left_early.REMEDY
        why = f"it left epoch {left.epoch} early, after {left.done} of {left.planned} batches"
    lead = min(r for r in m.alive if r not in ranks)
    a, b = m.fold.ranks[ranks[0]], m.fold.ranks[lead]
    return Verdict(
        kind="drift",
        level="warning",
        culprits=ranks,
        place=f"step {a.global_step}",
        cause=(
            f"{ranks_text(ranks)} drifts: at step {a.global_step} it is in epoch {a.epoch} batch"
            f" {a.batch}, rank {lead} in epoch {b.epoch} batch {b.batch}: {why}, the run will"
            " freeze"
        ),
        remedy=remedy,
        confidence=0.9,
        evidence={
            "ranks": {str(r): position_facts(p) for r, p in m.alive.items()},
            "epoch_batches": {
                str(r): dict(f.epoch_batches) for r, f in m.fold.ranks.items() if f.epoch_batches
            },
        },
    )


def memory(host: HostEvidence) -> Verdict | None:
    """Where the next allocation may be the last."""
    limit, used = host.memory_limit_bytes, host.memory_used_bytes
    if limit is not None and used is not None and limit - used < _scarce(limit):
        left, whole, of = limit - used, limit, "the control group's limit"
    elif host.memory_available_bytes is not None and host.memory_total_bytes is not None:
        left, whole, of = host.memory_available_bytes, host.memory_total_bytes, "the machine"
        if left >= _scarce(whole):
            return None
    else:
        return None
    return Verdict(
        kind="memory",
        level="warning",
        cause=(
            f"memory is about to run out: {left / 1e6:.0f} MB of {whole / 1e9:.1f} GB ({of}) left"
        ),
        remedy="Use fewer DataLoader workers or smaller batches before the kernel kills a rank.",
        confidence=0.8,
        evidence={"available_bytes": left, "total_bytes": whole},
    )


def shared_memory(host: HostEvidence) -> Verdict | None:
    free, total = host.shm_free_bytes, host.shm_total_bytes
    if free is None or not total or free >= min(0.03 * total, 64 << 20):
        return None
    return Verdict(
        kind="shared_memory",
        level="warning",
        cause=(
            f"shared memory is full: {free / 1e6:.0f} MB of {total / 1e6:.0f} MB of /dev/shm left"
        ),
        remedy="Give the container more (--shm-size), or use fewer DataLoader workers.",
        confidence=0.8,
        evidence={"free_bytes": free, "total_bytes": total},
    )


def _scarce(total: int) -> float:
    return min(_SCARCE_SHARE * total, _SCARCE_BYTES)


def diverging(close: dict[int, RankEvidence]) -> Verdict | None:
    """One rank's calls run a place behind another's: it has called one more than the others.

    Equal numbers called from unequal lines are common and harmless (``if rank == 0: broadcast(x)
    else: broadcast(y)``), so it is the shift that counts.
    """
    found = find_divergence(close)
    if found is None:
        return None
    for odd in found.odd:
        for other in close:
            if other in found.odd and len(found.odd) < len(close):
                continue
            if other != odd and _shifted(close, found.group, found.seq, odd, other):
                here, there = found.sites[odd], found.sites[other]
                return Verdict(
                    kind="diverging",
                    level="warning",
                    culprits=(odd,),
                    place=frame_text(here),
                    cause=(
                        f"rank {odd} called {found.op} #{found.seq} at {frame_text(here)},"
                        f" rank {other} at {frame_text(there)}: all their later collectives are"
                        " mismatched"
                    ),
                    remedy="Move the collective out of code that only some ranks run"
                    " (rank-zero code).",
                    confidence=0.7,
                    evidence={"seq": found.seq, "group": found.group, "op": found.op},
                )
    return None


def _shifted(close: dict[int, RankEvidence], group: str, seq: int, odd: int, other: int) -> bool:
    sites = {
        rank: {
            e.seq: (e.op, e.call_site.file, e.call_site.line)
            for e in close[rank].collectives
            if e.group == group and e.call_site is not None and not e.p2p
        }
        for rank in (odd, other)
    }
    following = [s for s in range(seq, seq + 4) if s in sites[other] and s + 1 in sites[odd]]
    moved = [s for s in following if sites[other][s] == sites[odd][s + 1]]
    differ = [s for s in following if sites[other].get(s) != sites[odd].get(s)]
    return len(moved) >= 2 and len(moved) == len(following) and len(differ) >= 2
