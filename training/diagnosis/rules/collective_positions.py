"""The wavefront: where every rank stands among the collectives, and what does not match. Pure.

Back ends match collectives by their number, so the place where a run hangs is N, the first
collective that is not complete on some rank; what each rank did at N tells who is at fault. The
recorder's "completed" is not monotonic on gloo, so only entries that are not retired are trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ltui.training.diagnosis.evidence import Collective, CollectivePosition, Frame, RankEvidence
from ltui.training.diagnosis.rules.stack_frames import (
    call_site,
    collective_in,
    in_backward,
    user_frame,
)

_SIZED = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose sizes must be equal on all ranks."""

_IDLE_SHARE = 0.2
"""A rank that computes less than this in its backward waits there."""

UNNUMBERED = -1
"""The number of a collective that is known by a stack alone."""

Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[str, int] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedCollective:
    """What the ranks did at the first unfinished collective of one group."""

    group: str
    seq: int
    at: Mapping[int, Collective]
    """Ranks that enqueued number ``seq`` and whose entry is known."""
    absent: tuple[int, ...]
    """Ranks that did not come to it."""
    unknown: tuple[int, ...]
    """Ranks of which nothing is known."""
    elsewhere: tuple[int, ...] = ()
    """Ranks that wait in a collective of another group, which the absent hold up in the end."""
    crossed: bool = False
    """Every absent rank waits in a collective of another group itself."""

    @property
    def waiting(self) -> tuple[int, ...]:
        here = (r for r, entry in self.at.items() if not entry.retired)
        return tuple(sorted({*here, *self.elsewhere}))

    @property
    def differs(self) -> bool:
        """Whether those that came can't match."""
        return len({_shape(e) for e in self.at.values()}) > 1


def collective_positions(close: Mapping[int, RankEvidence]) -> tuple[CollectivePosition, ...]:
    """One a rank and group, for people: of groups that the rank uses, or should have come to."""
    waited = {e.group for of in close.values() if (e := pending_collective(of)) is not None}
    found = []
    for rank, of_rank in sorted(close.items()):
        of_groups = {**dict.fromkeys(waited & of_rank.groups.keys(), 0), **of_rank.last_enqueued}
        for group, last in sorted(of_groups.items()):
            entries = [e for e in of_rank.collectives if e.group == group and not e.p2p]
            pending = next((e for e in entries if not e.retired), None)
            done = max((e.seq for e in entries if e.retired), default=None)
            found.append(
                CollectivePosition(
                    rank=rank,
                    group=group,
                    last_enqueued=last,
                    last_done=done,
                    waits_in=pending,
                    barrier=of_rank.barrier,
                )
            )
    return tuple(found)


def find_unfinished_collective(
    close: Mapping[int, RankEvidence], ranks: set[int]
) -> UnfinishedCollective | None:
    """Where the trouble begins; None where nobody waits or nothing is recorded.

    Of several groups in which somebody waits, the one whose collective can't match, else one whose
    absent ranks are not themselves waiting in another group: those that are wait for the same ranks
    in the end. Where all absent ranks wait elsewhere, the groups are used in different orders.
    """
    groups = sorted({g for r in ranks if r in close for g in close[r].last_enqueued})
    found = [s for g in groups if (s := _split_of(g, close, ranks)) is not None and s.waiting]
    waiting = {r for s in found for r in s.waiting}
    free = [s for s in found if not {*s.absent} <= waiting]
    for first in ([s for s in found if s.differs], free, [s for s in found if not s.absent]):
        if first:
            chosen = first[0]
            absent = tuple(r for r in chosen.absent if r not in waiting)
            held_up = waiting - {*chosen.at} if absent else set()
            return replace(chosen, absent=absent, elsewhere=tuple(sorted(held_up)))
    # No rank waits in two groups at once; where the most wait is taken for right.
    most = max(found, key=lambda s: len(s.waiting), default=None)
    return replace(most, crossed=True) if most is not None else None


def pending_collective(of_rank: RankEvidence) -> Collective | None:
    """The collective that the rank waits in, of whatever group."""
    return next((e for e in of_rank.collectives if not e.retired and not e.p2p), None)


def _split_of(
    group: str, close: Mapping[int, RankEvidence], ranks: set[int]
) -> UnfinishedCollective | None:
    first: dict[int, int] = {}
    known: dict[int, dict[int, Collective]] = {}
    counted: dict[int, int] = {}
    members = {r for other in close.values() for r in other.groups.get(group, ())}
    for rank in ranks & close.keys():
        of_rank = close[rank]
        last = of_rank.last_enqueued.get(group)
        if last is None:
            member = rank in members or (group == "0" and of_rank.joined is False)
            if not member:
                continue  # or nothing is known of it
            last = 0
        entries = {e.seq: e for e in of_rank.collectives if e.group == group and not e.p2p}
        if last and not entries:
            counted[rank] = last  # from its last beat, and it may have gone on for half a second
            continue
        known[rank] = entries
        last = max([last, *entries])
        pending = min((s for s, e in entries.items() if not e.retired), default=None)
        first[rank] = pending if pending is not None else last + 1
    if not first:
        return None
    number = min(first.values())
    at = {r: known[r][number] for r in first if number in known[r]}
    absent = tuple(
        sorted(
            [r for r in first if r not in at and first[r] <= number]
            + [r for r, last in counted.items() if last < number]
        )
    )
    unknown = tuple(sorted(r for r in ranks if r not in at and r not in absent))
    return UnfinishedCollective(group=group, seq=number, at=at, absent=absent, unknown=unknown)


def find_mismatch_by_stacks(
    close: Mapping[int, RankEvidence], ranks: set[int]
) -> UnfinishedCollective | None:
    """What ranks stand in by their stacks, where nothing is recorded; its number is not known. None
    where some stand in no collective, or all in the same one, called from the same line."""
    at: dict[int, Collective] = {}
    for rank in sorted(ranks):
        stack = close[rank].main_stack if rank in close else None
        name = collective_on_stack(close[rank]) if stack is not None else None
        if stack is None or name is None:
            return None
        explicit = collective_in(stack) is not None
        inner = next((f for f in stack.frames if "/torch/" not in f.file), None)
        site = (user_frame(stack) or inner) if explicit else None
        at[rank] = Collective(group="0", seq=UNNUMBERED, op=name, call_site=site)
    if len({call_signature(entry) for entry in at.values()}) < 2:
        return None
    return UnfinishedCollective(group="0", seq=UNNUMBERED, at=at, absent=(), unknown=())


def _shape(entry: Collective) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return entry.op, entry.sizes if entry.op in _SIZED else ()


def minority_ranks(
    found: UnfinishedCollective, close: Mapping[int, RankEvidence]
) -> tuple[int, ...]:
    """Of ranks that did different things at one number: who did what the others did not.

    The minority where there is one; else whoever did what no rank has ever done before at that
    place, which two ranks have to decide between them; else all.
    """
    key: Callable[[Collective], object] = _shape if found.differs else call_signature
    (most, count), *others = Counter(key(e) for e in found.at.values()).most_common()
    if not others or count > others[0][1]:
        return tuple(sorted(r for r, e in found.at.items() if key(e) != most))
    seen = {
        call_signature(e)
        for of_rank in close.values()
        for e in of_rank.collectives
        if e.group == found.group and e.seq < found.seq
    }
    fresh = [r for r, e in found.at.items() if call_signature(e) not in seen]
    if fresh and len(fresh) < len(found.at):
        return tuple(sorted(fresh))
    return tuple(sorted(found.at))


def call_signature(entry: Collective) -> Signature:
    site = entry.call_site
    return entry.op, entry.sizes, (site.file, site.line) if site else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first number at which ranks called the same collective from different lines."""

    group: str
    seq: int
    op: str
    sites: Mapping[int, Frame]
    odd: tuple[int, ...]


def find_divergence(close: Mapping[int, RankEvidence]) -> Divergence | None:
    """None where call sites agree, or where they are not known."""
    sites: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, of_rank in close.items():
        for entry in of_rank.collectives:
            if entry.call_site is not None and not entry.p2p:
                sites.setdefault((entry.group, entry.seq), {})[rank] = entry
    for (group, seq), entries in sorted(sites.items()):
        places = Counter(_site(e) for e in entries.values())
        if len(entries) < 2 or len(places) < 2:
            continue
        most, count = places.most_common(1)[0]
        odd = [r for r, e in entries.items() if _site(e) != most]
        if count * 2 == len(entries):
            odd = list(entries)
        found = {r: e.call_site for r, e in entries.items() if e.call_site is not None}
        op = next(iter(entries.values())).op
        return Divergence(group=group, seq=seq, op=op, sites=found, odd=tuple(sorted(odd)))
    return None


def _site(entry: Collective) -> tuple[str, int]:
    assert entry.call_site is not None
    return entry.call_site.file, entry.call_site.line


def collective_on_stack(of_rank: RankEvidence) -> str | None:
    """The collective that the rank's main thread is in, by its stack: where nothing is recorded."""
    stack = of_rank.main_stack
    if (name := collective_in(stack)) is not None:
        return name
    share = of_rank.process.cpu_share if of_rank.process is not None else None
    idle = share is not None and share < _IDLE_SHARE
    return "all_reduce" if in_backward(stack) and idle and user_frame(stack) is None else None


def call_site_of(entry: Collective, of_rank: RankEvidence | None) -> Frame | None:
    """The user's line that issued the collective; from the live stack where the recorder kept
    none."""
    if entry.call_site is not None:
        return entry.call_site
    stack = of_rank.main_stack if of_rank is not None else None
    if stack is None or collective_in(stack) is None:
        return None
    return call_site(stack.frames)
