"""Merge the evidence that the agents of several machines collected. Pure.

An agent sends the document of its shortened evidence. Its times are those of its own clocks;
``merge_evidence`` moves them to the clocks of node 0, which the judge uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    Collective,
    Evidence,
    HostEvidence,
    RankEvidence,
    ThreadStack,
)

_COLLECTIVES = 64
"""Collectives of each rank that are sent, the last ones, and all that are not complete."""
_FRAMES, _THREADS = 64, 8
"""Innermost frames of a stack, and threads of a process, that are sent."""


def shorten_for_link(evidence: Evidence) -> Evidence:
    """Return the evidence without what the judge does not need, to send it to node 0.

    The stack of every recorded collective makes most of it; the line of the call remains. What
    several ranks report alike, the members of process groups, is sent once.
    """
    sent: set[tuple[str, tuple[int, ...]]] = set()
    ranks = {}
    for rank, rank_evidence in evidence.ranks.items():
        groups = {}
        for group, members in rank_evidence.groups.items():
            groups[group] = () if (group, members) in sent else members
            sent.add((group, members))
        ranks[rank] = replace(
            rank_evidence,
            groups=groups,
            collectives=_last_collectives(rank_evidence.collectives),
            stacks=_short_stacks(rank_evidence.stacks),
            earlier_stacks=_short_stacks(rank_evidence.earlier_stacks),
            workers=tuple(
                replace(w, stacks=_short_stacks(w.stacks)) for w in rank_evidence.workers
            ),
        )
    return replace(evidence, ranks=ranks)


def _last_collectives(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    older = max(0, len(collectives) - _COLLECTIVES)
    kept = (*(c for c in collectives[:older] if not c.retired), *collectives[older:])
    return tuple(replace(c, frames=()) for c in kept)


def _short_stacks(stacks: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Return the main thread and the first others, with their innermost frames."""
    main_first = sorted(stacks, key=lambda stack: not stack.main)
    return tuple(replace(s, frames=s.frames[:_FRAMES]) for s in main_first[:_THREADS])


def merge_evidence(
    parts: Mapping[int, Evidence],
    clock_offsets_ns: Mapping[int, int] | None = None,
    wall_offsets_s: Mapping[int, float] | None = None,
    names: Mapping[int, str] | None = None,
) -> Evidence:
    """Return the evidence of all machines as one; ``parts`` is node -> what was collected there.

    ``clock_offsets_ns`` and ``wall_offsets_s`` are what to add to a machine's CLOCK_MONOTONIC and
    unix times, ``names`` the names of machines for sentences. Each rank keeps the time of its own
    machine's round. If two parts contain one rank, the newer one counts.
    """
    if not parts:
        raise ValueError("there is no evidence to merge")
    clock_offsets_ns, wall_offsets_s = clock_offsets_ns or {}, wall_offsets_s or {}
    ranks: dict[int, RankEvidence] = {}
    missing: list[str] = []
    taken_ns = {node: p.taken_ns + clock_offsets_ns.get(node, 0) for node, p in parts.items()}
    for node in sorted(parts, key=lambda n: taken_ns[n]):
        for rank, rank_evidence in parts[node].ranks.items():
            ranks[rank] = replace(rank_evidence, node=node, taken_ns=taken_ns[node])
    for node, part in sorted(parts.items()):
        name = (names or {}).get(node)
        missing += [f"{name}: {sentence}" if name else sentence for sentence in part.missing]
    newest = max(parts, key=lambda n: taken_ns[n])
    return Evidence(
        taken_at=parts[newest].taken_at + wall_offsets_s.get(newest, 0.0),
        taken_ns=taken_ns[newest],
        ranks=dict(sorted(ranks.items())),
        host=parts[0].host if 0 in parts else HostEvidence(),
        hosts={node: part.host for node, part in sorted(parts.items())},
        missing=tuple(dict.fromkeys(missing)),
    )
