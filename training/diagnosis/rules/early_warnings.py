"""Warnings: drift, diverging call sites, scarce memory, a NaN loss, a clock that was set. Pure.

Ages are computed on each machine with a clock that never jumps, so a jump harms no judgement. It
spoils the times in logs and histories, certificates, and libraries that compare wall clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.collective_positions import Divergence, find_divergence
from ltui.training.diagnosis.evidence import HostEvidence, RankEvidence
from ltui.training.diagnosis.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.stack_frames import frame_text
from ltui.training.diagnosis.stalls import uneven_batches
from ltui.training.diagnosis.verdict_words import NO_MACHINES, ranks_text
from ltui.training.shared.record_types import STEP_PHASES
from ltui.training.state.good_checkpoints import last_good_checkpoint
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import CheckpointInfo, NodeSnapshot, Verdict
from ltui.training.state.verdicts import VerdictKind

BAD_LOSSES = 3
"""Batches in a row without a finite loss before it is reported (one may be a skipped batch)."""
DRIFT_S = 2.0
"""Seconds that a drift must last, because ranks pass the end of an epoch one after another."""
DRIFT_KEPT_S = 5.0
"""Seconds that a drift stays active while no two ranks are observed at an equal step."""
_UNEVEN_REMEDY = (
    "Give every rank the same number of batches: a DistributedSampler or drop_last=True."
)
_SCARCE_SHARE, _SCARCE_BYTES = 0.05, 256 << 20
"""Memory is scarce if less is free than this fraction of the total and than these bytes."""
_SCARCE_SHM_SHARE, _SCARCE_SHM_BYTES = 0.03, 64 << 20
"""Shared memory is scarce if less is free than this fraction and than these bytes."""
_COMPARED_CALLS = 4
"""Number of calls by which it is decided whether one rank's calls are shifted."""


def loss_warning(
    fold: FoldState,
    machines: Mapping[int, str] = NO_MACHINES,
    checkpoints: Sequence[CheckpointInfo] = (),
) -> Verdict | None:
    """Return a warning if the loss of a rank is NaN or infinite.

    Its remedy names the last of ``checkpoints`` before that.
    """
    bad = {r: f for r, f in sorted(fold.ranks.items()) if f.bad_loss >= BAD_LOSSES}
    if not bad:
        return None
    first = min(bad, key=lambda r: (bad[r].bad_loss_step or 0, r))
    step = bad[first].bad_loss_step
    since = (
        "" if step is None else f" since step {step} (first on {ranks_text((first,), machines)})"
    )
    last_loss = bad[first].recent_loss[-1] if bad[first].recent_loss else None
    value = "NaN" if last_loss is None else str(last_loss).replace("nan", "NaN")
    good = last_good_checkpoint(checkpoints, step)
    remedy = "Start it again with a lower learning rate: there is no checkpoint before the NaN."
    if good is not None:
        remedy = (
            f"Stop, and resume with a lower learning rate from step {good.global_step}, the last "
            "checkpoint before the NaN."
        )
    return Verdict(
        kind=VerdictKind.NAN_LOSS,
        level=VerdictLevel.WARNING,
        culprits=tuple(bad),
        place="loss",
        cause=f"the loss of {ranks_text(list(bad), machines)} is {value}{since}",
        remedy=remedy,
        began=bad[first].bad_loss_wall_s,
        evidence={
            "step": step,
            "first_rank": first,
            "loss": value,
            "batches": {str(r): f.bad_loss for r, f in bad.items()},
        },
    )


def find_drifting_ranks(
    inputs: PreparedInput, earlier: Collection[int] = ()
) -> tuple[int, ...] | None:
    """Return ranks that differ in epoch or batch from the lowest rank at an equal step.

    Return None if no two ranks are at an equal step now, or if those that are do not include all
    that drifted ``earlier``.
    """
    alive, rank_folds = inputs.alive, inputs.fold.ranks
    ranks_by_step: dict[int, list[int]] = {}
    for rank, pulse in alive.items():
        rank_fold = rank_folds.get(rank)
        if pulse.phase not in STEP_PHASES or rank_fold is None or rank_fold.batch is None:
            continue
        step = rank_fold.global_step
        if step is not None and step == pulse.global_step:
            ranks_by_step.setdefault(step, []).append(rank)
    together = [ranks for ranks in ranks_by_step.values() if len(ranks) > 1]
    for ranks in together:
        places = {r: (rank_folds[r].epoch, rank_folds[r].batch) for r in ranks}
        if len(set(places.values())) > 1:
            return tuple(r for r in ranks if places[r] != places[min(ranks)])
    compared = {rank for ranks in together for rank in ranks}
    return () if together and compared.issuperset(earlier) else None


def drift_warning(inputs: PreparedInput, ranks: tuple[int, ...]) -> Verdict:
    """Return the warning about ``ranks``, which drift from the lowest rank."""
    alive, rank_folds = inputs.alive, inputs.fold.ranks
    departures = uneven_batches.find_departures(inputs, tuple(alive))
    departed = tuple(departures)
    departure = None
    if 0 < len(departed) < len(alive) and len({*departures.values()}) == 1:
        departure = departures[departed[0]]
    reason, remedy = "batch counts differ (uneven)", _UNEVEN_REMEDY
    if departure is not None:
        ranks, remedy = departed, uneven_batches.REMEDY
        reason = (
            f"it left epoch {departure.epoch} early,"
            f" after {departure.done} of {departure.planned} batches"
        )
    lowest = min(r for r in alive if r not in ranks)
    drifting, reference = rank_folds[ranks[0]], rank_folds[lowest]
    return Verdict(
        kind=VerdictKind.DRIFT,
        level=VerdictLevel.WARNING,
        culprits=ranks,
        place=f"step {drifting.global_step}",
        cause=(
            f"{inputs.ranks_text(ranks)} drifts: at step {drifting.global_step} it is in epoch"
            f" {drifting.epoch} batch {drifting.batch}, {inputs.ranks_text((lowest,))} in epoch"
            f" {reference.epoch} batch {reference.batch}: {reason}, the run will freeze"
        ),
        remedy=remedy,
        confidence=0.9,
        evidence={
            "ranks": position_facts(alive),
            "epoch_batches": {
                str(r): dict(f.epoch_batches) for r, f in rank_folds.items() if f.epoch_batches
            },
        },
    )


def memory_warning(host: HostEvidence, machine: str | None = None) -> Verdict | None:
    """Return a warning if a further allocation may exceed the memory of the machine.

    ``machine`` is its name, in a run on several.
    """
    limit, used = host.memory_limit_bytes, host.memory_used_bytes
    if limit is not None and used is not None and limit - used < _scarce_bytes(limit):
        free, total, owner = limit - used, limit, "the control group's limit"
    elif host.memory_available_bytes is not None and host.memory_total_bytes is not None:
        free, total, owner = host.memory_available_bytes, host.memory_total_bytes, "the machine"
        if free >= _scarce_bytes(total):
            return None
    else:
        return None
    return Verdict(
        kind=VerdictKind.MEMORY,
        level=VerdictLevel.WARNING,
        cause=(
            f"memory{_on(machine)} is about to run out: {free / 1e6:.0f} MB of {total / 1e9:.1f} GB"
            f" ({owner}) left"
        ),
        remedy="Use fewer DataLoader workers or smaller batches before the kernel kills a rank.",
        confidence=0.8,
        evidence={"available_bytes": free, "total_bytes": total},
    )


def shared_memory_warning(host: HostEvidence, machine: str | None = None) -> Verdict | None:
    """Return a warning if ``/dev/shm`` is almost full."""
    free, total = host.shm_free_bytes, host.shm_total_bytes
    if free is None or not total:
        return None
    if free >= min(_SCARCE_SHM_SHARE * total, _SCARCE_SHM_BYTES):
        return None
    return Verdict(
        kind=VerdictKind.SHARED_MEMORY,
        level=VerdictLevel.WARNING,
        cause=(
            f"shared memory{_on(machine)} is full: {free / 1e6:.0f} MB of {total / 1e6:.0f} MB of"
            " /dev/shm left"
        ),
        remedy="Give the container more (--shm-size), or use fewer DataLoader workers.",
        confidence=0.8,
        evidence={"free_bytes": free, "total_bytes": total},
    )


def _on(machine: str | None) -> str:
    return "" if machine is None else f" on {machine}"


def _scarce_bytes(total: int) -> float:
    return min(_SCARCE_SHARE * total, _SCARCE_BYTES)


def divergence_warning(
    evidence: Mapping[int, RankEvidence], machines: Mapping[int, str] = NO_MACHINES
) -> Verdict | None:
    """Return a warning if one rank has called one collective more than another rank.

    Equal numbers that are called from different lines are common and harmless (``if rank == 0:
    broadcast(x) else: broadcast(y)``). Only calls that are shifted by one number count.
    """
    divergence = find_divergence(evidence)
    if divergence is None:
        return None
    minority = {*divergence.minority}
    calls = {r: _calls_from(evidence[r], divergence) for r in divergence.sites}
    # Ranks with equal calls need to be compared only once.
    culprits = {calls[r]: r for r in reversed(divergence.minority)}
    others = {
        calls[r]: r
        for r in sorted(divergence.sites, reverse=True)
        if r not in minority or len(minority) == len(evidence)
    }
    for culprit in sorted(culprits.values()):
        for other in sorted(others.values()):
            if _is_shifted(calls[culprit], calls[other]):
                return _divergence_verdict(divergence, culprit, other, machines)
    return None


def _divergence_verdict(
    divergence: Divergence, culprit: int, other: int, machines: Mapping[int, str]
) -> Verdict:
    line, other_line = divergence.sites[culprit], divergence.sites[other]
    return Verdict(
        kind=VerdictKind.DIVERGING,
        level=VerdictLevel.WARNING,
        culprits=(culprit,),
        place=frame_text(line),
        cause=(
            f"{ranks_text((culprit,), machines)} called {divergence.op} #{divergence.seq} at"
            f" {frame_text(line)}, {ranks_text((other,), machines)} at {frame_text(other_line)}:"
            " all their later collectives are mismatched"
        ),
        remedy="Move the collective out of code that only some ranks run (rank-zero code).",
        confidence=0.7,
        evidence={"seq": divergence.seq, "group": divergence.group, "op": divergence.op},
    )


_Call = tuple[str, str, int]
"""Operation, and file and line of the call."""


def _calls_from(rank_evidence: RankEvidence, divergence: Divergence) -> tuple[_Call | None, ...]:
    """Return the rank's calls from the divergence on; None for a call that is not recorded."""
    by_number = {
        e.seq: (e.op, e.call_site.file, e.call_site.line)
        for e in rank_evidence.collectives
        if e.group == divergence.group
        and e.call_site is not None
        and not e.p2p
        and 0 <= e.seq - divergence.seq <= _COMPARED_CALLS
    }
    return tuple(by_number.get(divergence.seq + i) for i in range(_COMPARED_CALLS + 1))


def _is_shifted(culprit: Sequence[_Call | None], other: Sequence[_Call | None]) -> bool:
    """Return True if the culprit makes the other rank's calls one number later."""
    numbers = range(_COMPARED_CALLS)
    comparable = [i for i in numbers if other[i] is not None and culprit[i + 1] is not None]
    shifted = [i for i in comparable if other[i] == culprit[i + 1]]
    different = [i for i in comparable if other[i] != culprit[i]]
    return len(shifted) >= 2 and len(shifted) == len(comparable) and len(different) >= 2


_CLOCK_JUMP_S = 2.0
"""Smallest jump in seconds that is reported; estimates of a skew differ by less."""
_JUMP_KEPT_S = 60.0
"""Seconds for which the warning stays active."""
_CLOCK_REMEDY = (
    "Let a time service set it (chronyc tracking, timedatectl). Ages and budgets of this run are"
    " not affected."
)


def clock_skews_s(nodes: Sequence[NodeSnapshot]) -> dict[int, float]:
    """Return node -> seconds by which its clock is ahead of node 0's, as far as it is known."""
    return {n.node: n.clock_skew_s for n in nodes if n.clock_skew_s is not None}


def clock_jump_warnings(inputs: PreparedInput) -> list[Verdict]:
    """Return a warning for each machine whose clock jumped within the last minute."""
    if not inputs.machines:
        return []
    jumps_s = _clock_jumps_s(inputs)
    names = {n.node: n.name for n in inputs.nodes}
    warnings = [_jump_warning(inputs, node, names[node], jump) for node, jump in jumps_s.items()]
    return warnings + [v for v in _recent_jumps(inputs) if v.nodes[0] not in jumps_s]


def _clock_jumps_s(inputs: PreparedInput) -> dict[int, float]:
    """Return node -> seconds by which its clock jumped since the last judgement.

    If node 0's own clock jumped, every other one seems to have jumped by as much the other way.
    """
    history = inputs.history
    own_s = 0.0
    if history.judged_ns is not None and history.judged_s is not None and inputs.now_s is not None:
        elapsed_s = (inputs.now_ns - history.judged_ns) / 1e9
        own_s = inputs.now_s - history.judged_s - elapsed_s
    own_s = own_s if abs(own_s) >= _CLOCK_JUMP_S else 0.0
    jumps_s = {0: own_s} if own_s else {}
    for node, skew_s in clock_skews_s(inputs.nodes).items():
        before_s = history.clock_skews_s.get(node)
        if before_s is None or node == 0:
            continue
        jump_s = skew_s - before_s + own_s
        # The head's jump may be seen one report earlier or later than in its own clock.
        if abs(jump_s) >= _CLOCK_JUMP_S and not _is_heads_jump(inputs, skew_s - before_s, own_s):
            jumps_s[node] = jump_s
    return jumps_s


def _is_heads_jump(inputs: PreparedInput, change_s: float, own_s: float) -> bool:
    """Return True if a change of a skew is node 0's recent jump."""
    recent = [v.evidence.get("jump_s") for v in _recent_jumps(inputs) if v.nodes == (0,)]
    own_jumps_s = [*recent, *([own_s] if own_s else [])]
    return any(
        isinstance(j, (int, float)) and abs(change_s + j) < _CLOCK_JUMP_S for j in own_jumps_s
    ) or (bool(own_s) and abs(change_s) < _CLOCK_JUMP_S)


def _recent_jumps(inputs: PreparedInput) -> list[Verdict]:
    """Return the active warnings that are to stay active."""
    now_s = inputs.now_s
    return [
        v
        for v in inputs.history.active.values()
        if v.kind == VerdictKind.CLOCK_JUMP
        and (now_s is None or v.evidence.get("until_ns", 0) > inputs.now_ns)
    ]


def _jump_warning(inputs: PreparedInput, node: int, name: str, jump_s: float) -> Verdict:
    direction = "forward" if jump_s > 0 else "back"
    return Verdict(
        kind=VerdictKind.CLOCK_JUMP,
        level=VerdictLevel.WARNING,
        nodes=(node,),
        place=f"machine {name}",
        cause=(
            f"the clock of machine {name} jumped {direction} by {abs(jump_s):.0f} s: times in its"
            " logs do not fit to those before"
        ),
        remedy=_CLOCK_REMEDY,
        confidence=0.9,
        # The history tells verdicts of one kind apart by when they began.
        began=None if inputs.now_s is None else inputs.now_s + 1e-6 * node,
        evidence={
            "jump_s": round(jump_s, 1),
            "until_ns": inputs.now_ns + round(_JUMP_KEPT_S * 1e9),
        },
    )
