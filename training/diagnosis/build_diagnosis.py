"""Build the document of a diagnosis from verdicts and evidence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ltui.training.diagnosis.collective_positions import collective_positions
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, Frame, StackGroup
from ltui.training.diagnosis.verdict_words import NO_MACHINES, rank_machines, ranks_text, verb
from ltui.training.state.run_snapshot import NodeSnapshot, RankSnapshot, RankState, Verdict

_COMPARED_FRAMES = 40
"""Innermost frames by which stacks are compared and which are kept."""


def build_diagnosis(
    run: str,
    attempt: int,
    taken_at: float,
    verdicts: Sequence[Verdict],
    evidence: Evidence | None,
    ranks: Sequence[RankSnapshot] = (),
    nodes: Sequence[NodeSnapshot] = (),
) -> Diagnosis:
    """Return the diagnosis of a run; ``nodes`` are the machines of a run on several."""
    missing: tuple[str, ...] = ()
    machines = rank_machines(nodes)
    if evidence is not None:
        by_rank = [
            f"{ranks_text((r,), machines)}: {reason}"
            for r, e in sorted(evidence.ranks.items())
            for reason in e.missing
        ]
        missing = (*evidence.missing, *by_rank)
    return Diagnosis(
        run=run,
        attempt=attempt,
        taken_at=taken_at,
        headline=diagnosis_headline(verdicts, ranks, machines),
        verdicts=tuple(verdicts),
        evidence=evidence,
        wavefront=collective_positions(evidence.ranks) if evidence is not None else (),
        stacks=group_stacks(evidence, machines) if evidence is not None else (),
        missing=missing,
    )


def diagnosis_headline(
    verdicts: Sequence[Verdict],
    ranks: Sequence[RankSnapshot],
    machines: Mapping[int, str] = NO_MACHINES,
) -> str:
    """Return the cause of the most severe verdict, or a sentence about the ranks' health."""
    if verdicts:
        first = verdicts[0]
        more = f" (and {len(verdicts) - 1} more)" if len(verdicts) > 1 else ""
        return f"{first.level}: {first.cause}{more}"
    timed = [r for r in ranks if r.step_s is not None]
    silent = [r.rank for r in ranks if r.state in (RankState.RUNNING, RankState.UNKNOWN)]
    if not timed and silent:
        return (
            f"Unknown: {ranks_text(silent, machines)} {verb(silent, 'sends', 'send')} no telemetry,"
            " so only the state of the processes can be checked; none of them is stopped"
        )
    if not timed:
        return "No rank has started to train yet"
    slowest = max(timed, key=lambda r: ((r.data_wait_share or 0.0), r.step_s or 0.0))
    wait = slowest.data_wait_share
    share = f", {100 * wait:.0f} % of it waiting for data" if wait is not None else ""
    if len(ranks) == 1:
        return f"Healthy: rank {slowest.rank} is running, {slowest.step_s:.3g} s per step{share}"
    running = [r.rank for r in ranks]
    return (
        f"Healthy: {ranks_text(running, machines)} {verb(running, 'is', 'are')} running; the"
        f" slowest is {ranks_text((slowest.rank,), machines)}"
        f" ({slowest.step_s:.3g} s per step{share})"
    )


def group_stacks(
    evidence: Evidence, machines: Mapping[int, str] = NO_MACHINES
) -> tuple[StackGroup, ...]:
    """Group the main threads of ranks and workers by equal stacks, the smallest group first.

    A thread that differs from the others is usually the one to look for.
    """
    groups: dict[tuple[Frame, ...], list[tuple[str, int]]] = {}
    for rank, rank_evidence in sorted(evidence.ranks.items()):
        if rank_evidence.main_stack is not None:
            frames = rank_evidence.main_stack.frames[:_COMPARED_FRAMES]
            groups.setdefault(frames, []).append((ranks_text((rank,), machines), rank))
        for worker in rank_evidence.workers:
            main = next((s for s in worker.stacks if s.main), None)
            if main is not None:
                name = f"worker {worker.process.pid} of {ranks_text((rank,), machines)}"
                groups.setdefault(main.frames[:_COMPARED_FRAMES], []).append((name, rank))
    return tuple(
        StackGroup(
            who=tuple(name for name, _ in members),
            ranks=tuple(sorted({rank for _, rank in members})),
            frames=frames,
        )
        for frames, members in sorted(groups.items(), key=lambda item: len(item[1]))
    )
