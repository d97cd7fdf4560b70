"""The position of every rank in the sequence of collectives, and where they do not match. Pure.

Back ends match collectives by their number. So a run hangs at N, the first collective that is not
complete on some rank, and what each rank did at N shows which rank is at fault. The recorder's
"completed" is not monotonic on gloo, so only entries that are not retired count as unfinished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Collective, CollectivePosition, Frame, RankEvidence
from ltui.training.diagnosis.stack_frames import (
    active_compiler,
    call_site,
    collective_in,
    in_backward,
    user_frame,
)

_SAME_SIZE_OPERATIONS = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose sizes must be equal on all ranks."""

_IDLE_CPU_SHARE = 0.2
"""A rank that uses a smaller fraction of a core in its backward pass waits there."""

UNNUMBERED = -1
"""The sequence number of a collective that is known only from a stack."""

Shape = tuple[str, tuple[tuple[int, ...], ...]]
"""Operation, and sizes if they must be equal on all ranks."""
Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[str, int] | None]
"""Operation, sizes, and file and line of the call."""


class UnfinishedCollective(Struct, frozen=True, kw_only=True):
    """The first unfinished collective of one process group, and what the ranks did there."""

    group: str
    seq: int
    at: Mapping[int, Collective]
    """Entries of the ranks that enqueued number ``seq``, as far as they are known."""
    absent: tuple[int, ...]
    """Ranks that have not enqueued it."""
    elsewhere: tuple[int, ...] = ()
    """Ranks that wait in a collective of another group, indirectly for the absent ranks."""
    crossed: bool = False
    """True if every absent rank waits in a collective of another group itself."""

    @property
    def waiting(self) -> tuple[int, ...]:
        waiting_here = (r for r, entry in self.at.items() if not entry.retired)
        return tuple(sorted({*waiting_here, *self.elsewhere}))

    def others(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return the ranks that take part in the collective, without ``ranks``.

        Ranks whose entry is retired count too, because gloo reports a collective as done although
        the rank has only sent its data.
        """
        return tuple(sorted({*self.at, *self.absent} - {*ranks}))

    @property
    def mismatched(self) -> bool:
        """True if the ranks enqueued collectives that cannot match."""
        return len({_shape(e) for e in self.at.values()}) > 1


def collective_positions(evidence: Mapping[int, RankEvidence]) -> tuple[CollectivePosition, ...]:
    """Return one position for each rank and group, to show to people.

    A rank has positions in the groups that it uses, and in groups of which it is a member and in
    which another rank waits.
    """
    groups_with_waiting = {
        e.group for rank in evidence.values() if (e := pending_collective(rank)) is not None
    }
    positions = []
    for rank, rank_evidence in sorted(evidence.items()):
        last_by_group = {
            **dict.fromkeys(groups_with_waiting & rank_evidence.groups.keys(), 0),
            **rank_evidence.last_enqueued,
        }
        for group, last in sorted(last_by_group.items()):
            entries = [e for e in rank_evidence.collectives if e.group == group and not e.p2p]
            positions.append(
                CollectivePosition(
                    rank=rank,
                    group=group,
                    last_enqueued=last,
                    last_done=max((e.seq for e in entries if e.retired), default=None),
                    waits_in=next((e for e in entries if not e.retired), None),
                    barrier=rank_evidence.barrier,
                )
            )
    return tuple(positions)


def find_unfinished_collective(
    evidence: Mapping[int, RankEvidence], ranks: set[int]
) -> UnfinishedCollective | None:
    """Return the collective at which the run hangs; None if no rank waits or nothing is recorded.

    If ranks wait in several groups, choose the group whose collective cannot match. Otherwise
    choose a group whose absent ranks do not wait in another group themselves, because absent ranks
    that do wait are held up by the same ranks in the end. If all absent ranks wait elsewhere, the
    groups are used in different orders.
    """
    recorded = _index_by_group(evidence, ranks)
    groups = sorted({g for r in ranks if r in evidence for g in evidence[r].last_enqueued})
    candidates = [
        c
        for g in groups
        if (c := _unfinished_of_group(g, evidence, ranks, recorded.get(g, {}))) is not None
        and c.waiting
    ]
    waiting = {r for c in candidates for r in c.waiting}
    for preferred in (
        [c for c in candidates if c.mismatched],
        [c for c in candidates if not {*c.absent} <= waiting],
        [c for c in candidates if not c.absent],
    ):
        if preferred:
            chosen = preferred[0]
            absent = tuple(r for r in chosen.absent if r not in waiting)
            held_up = waiting - {*chosen.at} if absent else set()
            return replace(chosen, absent=absent, elsewhere=tuple(sorted(held_up)))
    # No rank waits in two groups at once. Assume that the group in which most ranks wait is right.
    fullest = max(candidates, key=lambda c: len(c.waiting), default=None)
    return replace(fullest, crossed=True) if fullest is not None else None


def pending_collective(rank_evidence: RankEvidence) -> Collective | None:
    """Return the collective that the rank waits in, of any group, or None."""
    return next((e for e in rank_evidence.collectives if not e.retired and not e.p2p), None)


_Recorded = dict[int, dict[int, Collective]]
"""rank -> number -> entry, of one process group."""


def _index_by_group(evidence: Mapping[int, RankEvidence], ranks: set[int]) -> dict[str, _Recorded]:
    """Return the entries of all process groups, without those of sends and receives."""
    index: dict[str, _Recorded] = {}
    for rank in ranks & evidence.keys():
        for entry in evidence[rank].collectives:
            if not entry.p2p:
                index.setdefault(entry.group, {}).setdefault(rank, {})[entry.seq] = entry
    return index


def _unfinished_of_group(
    group: str, evidence: Mapping[int, RankEvidence], ranks: set[int], recorded: _Recorded
) -> UnfinishedCollective | None:
    first_unfinished: dict[int, int] = {}
    count_only: dict[int, int] = {}
    # Every member knows all members, so equal tuples are merged only once.
    members = {r for known in {e.groups.get(group, ()) for e in evidence.values()} for r in known}
    if len(members) == 1:
        return None  # It waits for its own GPU, not for another rank.
    for rank in ranks & evidence.keys():
        rank_evidence = evidence[rank]
        last = rank_evidence.last_enqueued.get(group)
        if last is None:
            is_member = rank in members or (group == "0" and rank_evidence.joined is False)
            if not is_member:
                continue  # or it is not known whether the rank is a member
            last = 0
        entries = recorded.get(rank, {})
        if last and not entries:
            # The number is from the last heartbeat, which may be half a second old.
            count_only[rank] = last
            continue
        last = max([last, *entries])
        pending = min((s for s, e in entries.items() if not e.retired), default=None)
        first_unfinished[rank] = pending if pending is not None else last + 1
    if not first_unfinished:
        return None
    seq = min(first_unfinished.values())
    at = {r: recorded[r][seq] for r in first_unfinished if seq in recorded.get(r, {})}
    absent = {r for r in first_unfinished if r not in at and first_unfinished[r] <= seq}
    absent |= {r for r, last in count_only.items() if last < seq}
    return UnfinishedCollective(
        group=group,
        seq=seq,
        at=at,
        absent=tuple(sorted(absent)),
    )


def find_mismatch_by_stacks(
    evidence: Mapping[int, RankEvidence], ranks: set[int]
) -> UnfinishedCollective | None:
    """Return the collectives that ranks are in by their stacks, if they differ.

    This is for runs without a flight recorder. The sequence number is unknown. Return None if a
    rank is in no collective, or if all are in the same one, called from the same line.
    """
    at: dict[int, Collective] = {}
    for rank in sorted(ranks):
        stack = evidence[rank].main_stack if rank in evidence else None
        name = collective_on_stack(evidence[rank]) if stack is not None else None
        if stack is None or name is None:
            return None
        explicit = collective_in(stack) is not None
        outside_torch = next((f for f in stack.frames if "/torch/" not in f.file), None)
        site = (user_frame(stack) or outside_torch) if explicit else None
        at[rank] = Collective(group="0", seq=UNNUMBERED, op=name, call_site=site)
    if len({call_signature(entry) for entry in at.values()}) < 2:
        return None
    return UnfinishedCollective(group="0", seq=UNNUMBERED, at=at, absent=())


def _shape(entry: Collective) -> Shape:
    return entry.op, entry.sizes if entry.op in _SAME_SIZE_OPERATIONS else ()


def minority_ranks(
    unfinished: UnfinishedCollective, evidence: Mapping[int, RankEvidence]
) -> tuple[int, ...]:
    """Return the ranks to blame for a collective mismatch.

    These are the ranks that differ from the majority. With a tie, such as between two ranks, they
    are the ranks whose call was never recorded before. Otherwise they are all ranks.
    """
    key: Callable[[Collective], object] = _shape if unfinished.mismatched else call_signature
    counts = Counter(key(e) for e in unfinished.at.values()).most_common()
    (majority, count), *others = counts
    if not others or count > others[0][1]:
        return tuple(sorted(r for r, e in unfinished.at.items() if key(e) != majority))
    earlier_calls = {
        call_signature(e)
        for rank_evidence in evidence.values()
        for e in rank_evidence.collectives
        if e.group == unfinished.group and e.seq < unfinished.seq
    }
    with_new_call = [r for r, e in unfinished.at.items() if call_signature(e) not in earlier_calls]
    if with_new_call and len(with_new_call) < len(unfinished.at):
        return tuple(sorted(with_new_call))
    return tuple(sorted(unfinished.at))


def call_signature(entry: Collective) -> Signature:
    """Return what two calls of one collective must have in common to be the same call."""
    site = entry.call_site
    return entry.op, entry.sizes, (site.file, site.line) if site else None


class Divergence(Struct, frozen=True, kw_only=True):
    """The first sequence number at which ranks called a collective from different lines."""

    group: str
    seq: int
    op: str
    sites: Mapping[int, Frame]
    """rank -> line of the call."""
    minority: tuple[int, ...]
    """Ranks whose line differs from the majority's; all ranks if there is no majority."""


def find_divergence(evidence: Mapping[int, RankEvidence]) -> Divergence | None:
    """Return where call sites first differ; None if they agree or are unknown."""
    recorded: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, rank_evidence in evidence.items():
        for entry in rank_evidence.collectives:
            if entry.call_site is not None and not entry.p2p:
                recorded.setdefault((entry.group, entry.seq), {})[rank] = entry
    for (group, seq), entries in sorted(recorded.items()):
        lines = Counter(_site_line(e) for e in entries.values())
        if len(entries) < 2 or len(lines) < 2:
            continue
        most_common, count = lines.most_common(1)[0]
        minority = [r for r, e in entries.items() if _site_line(e) != most_common]
        if count * 2 == len(entries):
            minority = list(entries)
        return Divergence(
            group=group,
            seq=seq,
            op=next(iter(entries.values())).op,
            sites={r: e.call_site for r, e in entries.items() if e.call_site is not None},
            minority=tuple(sorted(minority)),
        )
    return None


def _site_line(entry: Collective) -> tuple[str, int]:
    assert entry.call_site is not None
    return entry.call_site.file, entry.call_site.line


def collective_on_stack(rank_evidence: RankEvidence) -> str | None:
    """Return the collective that the rank's main thread is in by its stack, or None.

    An idle backward pass without a frame of user code counts as ``all_reduce``, unless it waits for
    a compiler.
    """
    stack = rank_evidence.main_stack
    if (name := collective_in(stack)) is not None:
        return name
    process = rank_evidence.process
    cpu_share = process.cpu_share if process is not None else None
    idle = cpu_share is not None and cpu_share < _IDLE_CPU_SHARE
    if not in_backward(stack) or not idle or user_frame(stack) is not None:
        return None
    return "all_reduce" if active_compiler(rank_evidence) is None else None


def call_site_of(entry: Collective, rank_evidence: RankEvidence | None) -> Frame | None:
    """Return the line of user code that issued the collective, or None.

    Use the current stack of the rank if the recorder has not stored the line.
    """
    if entry.call_site is not None:
        return entry.call_site
    stack = rank_evidence.main_stack if rank_evidence is not None else None
    if stack is None or collective_in(stack) is None:
        return None
    return call_site(stack.frames)
