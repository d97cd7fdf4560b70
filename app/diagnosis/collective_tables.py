"""Tables of collective operations: the position of each rank around the first unfinished one. Pure.

Ranks are aligned by sequence number, as the back ends align them. Ranks that did the same share a
column. An operation that differs from that of the other ranks at the same number is marked: the
first such number is the origin of a hang that becomes visible later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.diagnosis.process_rows import frame_location
from ltui.training.diagnosis.evidence import Collective, CollectivePosition, Diagnosis, RankEvidence
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, CollectiveCell, CollectiveRow, CollectiveTable

MAX_GROUPS = 3
"""Maximum number of process groups that are shown."""
BEFORE, AFTER = 2, 1
"""Number of rows before and after the first unfinished number."""
MAX_COLUMNS = 6
"""Maximum number of columns of a table."""
NOT_THERE = "never reached it"
SILENT = "no report since"
"""Text for a rank that could not answer: it may be further than its last report says."""
SILENT_S = 3.0
"""Seconds without a heartbeat from which a rank counts as silent."""


class _Group(Struct, frozen=True):
    """The known collectives of one process group."""

    name: str
    positions: Mapping[int, CollectivePosition]
    entries: Mapping[int, Mapping[int, Collective]]
    """Rank to sequence number to collective."""
    barriers: Mapping[int, str]
    silent: frozenset[int]
    """Ranks with an old heartbeat, so that their data is old."""

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.positions, *self.entries})


def collective_tables(
    diagnosis: Diagnosis, culprits: set[int], *, alarm: bool
) -> tuple[CollectiveTable, ...]:
    """Return a table for each process group with collectives, groups with a waiting rank first.

    Without ``alarm``, ranks at different numbers are no problem: they are only on their way.
    """
    groups = _process_groups(diagnosis)
    groups.sort(key=lambda g: (_first_unfinished(g) is None, _first_difference(g) is None, g.name))
    shown = [_group_table(group, culprits, alarm) for group in groups[:MAX_GROUPS]]
    if len(groups) > MAX_GROUPS and shown:
        note = f"{len(groups) - MAX_GROUPS} more process groups are not shown"
        shown[-1] = replace(shown[-1], notes=(*shown[-1].notes, note))
    return tuple(shown)


def _process_groups(diagnosis: Diagnosis) -> list[_Group]:
    ranks: Mapping[int, RankEvidence] = diagnosis.evidence.ranks if diagnosis.evidence else {}
    by_name: dict[str, dict[int, dict[int, Collective]]] = {}
    for number, rank in ranks.items():
        for entry in rank.collectives:
            if not entry.p2p:
                by_name.setdefault(entry.group, {}).setdefault(number, {})[entry.seq] = entry
    positions: dict[str, dict[int, CollectivePosition]] = {}
    for position in diagnosis.wavefront:
        if position.last_enqueued is not None or position.waits_in is not None:
            positions.setdefault(position.group, {})[position.rank] = position
            if position.waits_in is not None:
                entries = by_name.setdefault(position.group, {}).setdefault(position.rank, {})
                entries.setdefault(position.waits_in.seq, position.waits_in)
    barriers = {n: r.barrier for n, r in ranks.items() if r.barrier}
    silent = frozenset(n for n, r in ranks.items() if (r.beat_age_s or 0.0) >= SILENT_S)
    return [
        _Group(name, positions.get(name, {}), by_name.get(name, {}), barriers, silent)
        for name in sorted({*by_name, *positions})
    ]


def _first_unfinished(group: _Group) -> int | None:
    """Return the first number that some rank enqueued and some rank has not finished."""
    pending = [
        entry.seq
        for entries in group.entries.values()
        for entry in entries.values()
        if not entry.retired
    ]
    return min(pending, default=None)


def _first_difference(group: _Group) -> int | None:
    """Return the first number at which the ranks that reached it did not do the same."""
    numbers = sorted({seq for entries in group.entries.values() for seq in entries})
    return next((seq for seq in numbers if _differing_ranks(group, seq)), None)


def _differing_ranks(group: _Group, seq: int) -> set[int]:
    """Return the ranks whose operation at one number is not that of most ranks.

    Without a majority, all ranks that reached the number differ.
    """
    reached = {rank: entries[seq] for rank, entries in group.entries.items() if seq in entries}
    # Call sites are compared only if each of them is known.
    with_sites = all(entry.call_site is not None for entry in reached.values())
    operations = {
        rank: (
            entry.op,
            entry.sizes,
            (entry.call_site.file, entry.call_site.line)
            if with_sites and entry.call_site
            else None,
        )
        for rank, entry in reached.items()
    }
    counts = Counter(operations.values()).most_common()
    if len(counts) < 2:
        return set()
    is_tie = counts[0][1] == counts[1][1]
    return {rank for rank, operation in operations.items() if is_tie or operation != counts[0][0]}


def _group_table(group: _Group, culprits: set[int], alarm: bool) -> CollectiveTable:
    pending, differs = _first_unfinished(group), _first_difference(group)
    numbers = _row_numbers(group, pending, differs)
    differing = {seq: _differing_ranks(group, seq) for seq in numbers if seq is not None}
    columns: dict[tuple[CollectiveCell, ...], list[int]] = {}
    for rank in group.ranks:
        cells = tuple(
            CollectiveCell(text="…")
            if seq is None
            else _table_cell(group, rank, seq, rank in differing[seq], alarm)
            for seq in numbers
        )
        columns.setdefault(cells, []).append(rank)
    ordered = sorted(columns.items(), key=lambda item: (not culprits & set(item[1]), item[1][0]))
    notes = []
    if len(ordered) > MAX_COLUMNS:
        other_ranks = [rank for _, members in ordered[MAX_COLUMNS:] for rank in members]
        notes.append(
            f"{len(other_ranks)} more ranks differ: {formats.ranks(tuple(sorted(other_ranks)))}"
        )
        ordered = ordered[:MAX_COLUMNS]
    notes += _barrier_notes(group)
    return CollectiveTable(
        title=_table_title(group, pending, differs, alarm),
        columns=tuple(_column_header(members, culprits) for _, members in ordered),
        rows=tuple(
            CollectiveRow(
                number="…" if seq is None else f"#{seq}",
                cells=tuple(cells[place] for cells, _ in ordered),
                note=_row_note(seq, pending if alarm else None, differs),
            )
            for place, seq in enumerate(numbers)
        ),
        notes=tuple(notes),
    )


def _row_numbers(group: _Group, pending: int | None, differs: int | None) -> list[int | None]:
    """Return the sequence numbers of the rows; None marks rows that are left out."""
    recorded_numbers = {seq for entries in group.entries.values() for seq in entries}
    recorded_numbers |= {p.last_enqueued for p in group.positions.values() if p.last_enqueued}
    if not recorded_numbers:
        return []
    centre = pending if pending is not None else max(recorded_numbers)
    shown: list[int | None] = [
        n for n in range(centre - BEFORE, centre + AFTER + 1) if n in recorded_numbers
    ]
    if differs is None or differs in shown:
        return shown
    # The first difference is never after the first unfinished number.
    gap: list[int | None] = [] if shown and shown[0] == differs + 1 else [None]
    return [differs, *gap, *shown]


def _table_cell(group: _Group, rank: int, seq: int, differs: bool, alarm: bool) -> CollectiveCell:
    entry = group.entries.get(rank, {}).get(seq)
    if entry is None:
        return _absent_cell(group, rank, seq, alarm)
    state = "done" if entry.retired else "waiting" if alarm else "started"
    site = frame_location(entry.call_site) if entry.call_site is not None else ""
    waits = Tone.WARN if alarm else Tone.PLAIN
    tone = Tone.BAD if differs else Tone.DIM if entry.retired else waits
    return CollectiveCell(
        text=f"{clean_name(entry.op, 40)}{_sizes_text(entry)} {state}",
        site=site,
        differs=differs,
        tone=tone,
    )


def _absent_cell(group: _Group, rank: int, seq: int, alarm: bool) -> CollectiveCell:
    position = group.positions.get(rank)
    last = position.last_enqueued if position is not None else None
    if last is None:
        entries = group.entries.get(rank)
        last = max(entries) if entries else None
    if last is None:
        return CollectiveCell(text=formats.NA, tone=Tone.DIM)
    if seq > last:
        if rank in group.silent:
            return CollectiveCell(text=f"{SILENT} #{last}", tone=Tone.BAD)
        came = f"last: #{last}" if last else "none yet"
        text = f"{NOT_THERE} ({came})" if alarm else "not yet"
        return CollectiveCell(text=text, tone=Tone.BAD if alarm else Tone.DIM)
    return CollectiveCell(text="finished, not recorded", tone=Tone.DIM)


def _sizes_text(entry: Collective) -> str:
    if not entry.sizes:
        return ""
    shown = ["x".join(str(n) for n in size) or "scalar" for size in entry.sizes[:2]]
    return f" [{', '.join(shown)}{', …' if len(entry.sizes) > 2 else ''}]"


def _column_header(members: Sequence[int], culprits: set[int]) -> Cell:
    marked = bool(culprits & set(members))
    text = f"{'! ' if marked else '  '}{formats.rank_words(members)}"
    return Cell(text=text, tone=Tone.BAD if marked else Tone.PLAIN)


def _row_note(seq: int | None, pending: int | None, differs: int | None) -> str:
    if seq is None:
        return ""
    notes = []
    if seq == differs:
        notes.append("first difference: the problem starts here")
    if seq == pending:
        notes.append("unfinished on some ranks")
    return ", ".join(notes)


def _table_title(group: _Group, pending: int | None, differs: int | None, alarm: bool) -> str:
    name = f"process group {clean_name(group.name, 40)}"
    if pending is not None and not alarm:
        return f"{name}: ranks are currently executing collective #{pending}"
    if pending is not None:
        return f"{name}: #{pending} is the first collective that some rank did not finish"
    if differs is not None:
        return f"{name}: no rank is waiting, but the ranks differ at #{differs}"
    return f"{name}: no rank is waiting"


def _barrier_notes(group: _Group) -> list[str]:
    """Return Lightning's names of the barriers, which the flight recorder does not know."""
    by_name: dict[str, list[int]] = {}
    for rank, name in sorted(group.barriers.items()):
        if rank in group.ranks:
            by_name.setdefault(clean_name(name, 80), []).append(rank)
    return [
        f"in Lightning's barrier {name}: {formats.rank_words(ranks)}"
        for name, ranks in by_name.items()
    ]
