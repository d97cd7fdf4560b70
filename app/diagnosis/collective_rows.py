"""The wavefront of collectives: who is at which number, around the first that not all finished.

Ranks are aligned by sequence number, as the back ends align them; those that did the same share a
column. What one rank did otherwise at a number is marked: the first such number is the root of a
hang that shows itself later. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ltui.app.diagnosis.stack_folding import frame_location
from ltui.training.diagnosis.evidence import Collective, CollectivePosition, Diagnosis, RankEvidence
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import Cell, CollectiveCell, CollectiveRow, CollectiveTable, Tone

GROUPS = 3
BEFORE, AFTER = 2, 1
"""Rows shown before and after the number that not all finished."""
COLUMNS = 6
NOT_THERE = "never reached it"
SILENT = "no report since"
"""Of a rank that could not answer: it may have been further than was last seen."""
SILENT_S = 3.0

_What = tuple[str, tuple[tuple[int, ...], ...], str]
"""Operation, sizes, call site."""


@dataclass(frozen=True, slots=True)
class _Group:
    """What is known of one process group."""

    name: str
    fronts: Mapping[int, CollectivePosition]
    entries: Mapping[int, Mapping[int, Collective]]
    """Rank -> number -> what it did."""
    barriers: Mapping[int, str]
    silent: frozenset[int]
    """Ranks whose own witness has not run for a while: what is known of them is old."""

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.fronts, *self.entries})


def collective_tables(
    diagnosis: Diagnosis, culprits: set[int], *, alarm: bool
) -> tuple[CollectiveTable, ...]:
    """A picture for each process group that has collectives, those that somebody waits in first.

    Without ``alarm`` nothing is wrong with ranks at different numbers: they are on their way.
    """
    groups = _groups(diagnosis)
    groups.sort(key=lambda g: (_unfinished(g) is None, _difference(g) is None, g.name))
    shown = [_front(group, culprits, alarm) for group in groups[:GROUPS]]
    if len(groups) > GROUPS and shown:
        note = f"{len(groups) - GROUPS} more process groups are not shown"
        shown[-1] = replace(shown[-1], notes=(*shown[-1].notes, note))
    return tuple(shown)


def _groups(diagnosis: Diagnosis) -> list[_Group]:
    ranks: Mapping[int, RankEvidence] = diagnosis.evidence.ranks if diagnosis.evidence else {}
    by_name: dict[str, dict[int, dict[int, Collective]]] = {}
    for number, rank in ranks.items():
        for entry in rank.collectives:
            if not entry.p2p:
                by_name.setdefault(entry.group, {}).setdefault(number, {})[entry.seq] = entry
    found: dict[str, dict[int, CollectivePosition]] = {}
    for front in diagnosis.wavefront:
        if front.last_enqueued is not None or front.waits_in is not None:
            found.setdefault(front.group, {})[front.rank] = front
            if front.waits_in is not None:
                own = by_name.setdefault(front.group, {}).setdefault(front.rank, {})
                own.setdefault(front.waits_in.seq, front.waits_in)
    barriers = {n: r.barrier for n, r in ranks.items() if r.barrier}
    silent = frozenset(n for n, r in ranks.items() if (r.beat_age_s or 0.0) >= SILENT_S)
    return [
        _Group(name, found.get(name, {}), by_name.get(name, {}), barriers, silent)
        for name in sorted({*by_name, *found})
    ]


def _unfinished(group: _Group) -> int | None:
    """The first number that some rank enqueued and that some rank has not finished."""
    pending = [
        entry.seq for own in group.entries.values() for entry in own.values() if not entry.retired
    ]
    return min(pending, default=None)


def _difference(group: _Group) -> int | None:
    """The first number at which ranks that were there did not do the same."""
    numbers = sorted({seq for own in group.entries.values() for seq in own})
    return next((seq for seq in numbers if _row(group, seq).mixed), None)


@dataclass(frozen=True, slots=True)
class _Row:
    """What ranks did at one number."""

    with_sites: bool
    """Call sites are compared only where each of them is known."""
    mixed: bool
    usual: _What | None
    """What most did; None where no side is the larger."""

    def differs(self, entry: Collective) -> bool:
        return self.mixed and (self.usual is None or _what(entry, self.with_sites) != self.usual)


def _row(group: _Group, seq: int) -> _Row:
    there = [own[seq] for own in group.entries.values() if seq in own]
    with_sites = all(entry.call_site is not None for entry in there)
    most = Counter(_what(entry, with_sites) for entry in there).most_common()
    even = len(most) > 1 and most[0][1] == most[1][1]
    return _Row(with_sites, len(most) > 1, None if even or not most else most[0][0])


def _what(entry: Collective, with_site: bool) -> _What:
    site = entry.call_site if with_site else None
    return entry.op, entry.sizes, f"{site.file}:{site.line}" if site is not None else ""


def _front(group: _Group, culprits: set[int], alarm: bool) -> CollectiveTable:
    pending, differs = _unfinished(group), _difference(group)
    numbers = _numbers(group, pending, differs)
    known = {seq: _row(group, seq) for seq in numbers if seq is not None}
    columns: dict[tuple[CollectiveCell, ...], list[int]] = {}
    for rank in group.ranks:
        cells = tuple(
            CollectiveCell(text="…") if seq is None else _cell(group, rank, seq, known[seq], alarm)
            for seq in numbers
        )
        columns.setdefault(cells, []).append(rank)
    ordered = sorted(columns.items(), key=lambda item: (not culprits & set(item[1]), item[1][0]))
    notes = []
    if len(ordered) > COLUMNS:
        rest = [rank for _, members in ordered[COLUMNS:] for rank in members]
        notes.append(f"{len(rest)} more ranks differ: {formats.ranks(tuple(sorted(rest)))}")
        ordered = ordered[:COLUMNS]
    notes += _barriers(group)
    return CollectiveTable(
        title=_title(group, pending, differs, alarm),
        columns=tuple(_column(members, culprits) for _, members in ordered),
        rows=tuple(
            CollectiveRow(
                number="…" if seq is None else f"#{seq}",
                cells=tuple(cells[place] for cells, _ in ordered),
                note=_note(seq, pending if alarm else None, differs),
            )
            for place, seq in enumerate(numbers)
        ),
        notes=tuple(notes),
    )


def _numbers(group: _Group, pending: int | None, differs: int | None) -> list[int | None]:
    """The rows; None stands for rows left out."""
    known = {seq for own in group.entries.values() for seq in own}
    known |= {f.last_enqueued for f in group.fronts.values() if f.last_enqueued}
    if not known:
        return []
    centre = pending if pending is not None else max(known)
    shown: list[int | None] = [n for n in range(centre - BEFORE, centre + AFTER + 1) if n in known]
    if differs is None or differs in shown:
        return shown
    # Nothing that differs comes after the first that is not finished.
    gap: list[int | None] = [] if shown and shown[0] == differs + 1 else [None]
    return [differs, *gap, *shown]


def _cell(group: _Group, rank: int, seq: int, row: _Row, alarm: bool) -> CollectiveCell:
    entry = group.entries.get(rank, {}).get(seq)
    if entry is None:
        return _absent(group, rank, seq, alarm)
    differs = row.differs(entry)
    state = "done" if entry.retired else "waiting" if alarm else "started"
    site = frame_location(entry.call_site) if entry.call_site is not None else ""
    waits = Tone.WARN if alarm else Tone.PLAIN
    tone = Tone.BAD if differs else Tone.DIM if entry.retired else waits
    return CollectiveCell(
        text=f"{clean_name(entry.op, 40)}{_sizes(entry)} {state}",
        site=site,
        differs=differs,
        tone=tone,
    )


def _absent(group: _Group, rank: int, seq: int, alarm: bool) -> CollectiveCell:
    front = group.fronts.get(rank)
    last = front.last_enqueued if front is not None else None
    if last is None:
        own = group.entries.get(rank)
        last = max(own) if own else None
    if last is None:
        return CollectiveCell(text=formats.NA, tone=Tone.DIM)
    if seq > last:
        if rank in group.silent:
            return CollectiveCell(text=f"{SILENT} #{last}", tone=Tone.BAD)
        came = f"last: #{last}" if last else "none yet"
        text = f"{NOT_THERE} ({came})" if alarm else "not yet"
        return CollectiveCell(text=text, tone=Tone.BAD if alarm else Tone.DIM)
    return CollectiveCell(text="finished, not recorded", tone=Tone.DIM)


def _sizes(entry: Collective) -> str:
    if not entry.sizes:
        return ""
    shown = ["x".join(str(n) for n in size) or "scalar" for size in entry.sizes[:2]]
    return f" [{', '.join(shown)}{', …' if len(entry.sizes) > 2 else ''}]"


def _column(members: Sequence[int], culprits: set[int]) -> Cell:
    marked = bool(culprits & set(members))
    word = "rank" if len(members) == 1 else "ranks"
    text = f"{'! ' if marked else '  '}{word} {formats.ranks(tuple(members))}"
    return Cell(text=text, tone=Tone.BAD if marked else Tone.PLAIN)


def _note(seq: int | None, pending: int | None, differs: int | None) -> str:
    if seq is None:
        return ""
    words = []
    if seq == differs:
        words.append("first difference: the problem starts here")
    if seq == pending:
        words.append("unfinished on some ranks")
    return ", ".join(words)


def _title(group: _Group, pending: int | None, differs: int | None, alarm: bool) -> str:
    name = f"process group {clean_name(group.name, 40)}"
    if pending is not None and not alarm:
        return f"{name}: ranks are currently executing collective #{pending}"
    if pending is not None:
        return f"{name}: #{pending} is the first collective that some rank did not finish"
    if differs is not None:
        return f"{name}: no rank is waiting, but the ranks differ at #{differs}"
    return f"{name}: no rank is waiting"


def _barriers(group: _Group) -> list[str]:
    """Lightning's names of barriers, which the recorder does not know."""
    by_name: dict[str, list[int]] = {}
    for rank, name in sorted(group.barriers.items()):
        if rank in group.ranks:
            by_name.setdefault(clean_name(name, 80), []).append(rank)
    return [
        f"in Lightning's barrier {name}: {'rank' if len(ranks) == 1 else 'ranks'} "
        f"{formats.ranks(tuple(ranks))}"
        for name, ranks in by_name.items()
    ]
