"""The parts of a diagnosis as lines of cells for a given width. Pure; a report uses the same lines.

Every mark is a sign or a word as well as a tone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from ltui.widgets.columns import Cells, Column, fit_columns, row_line, title_line
from ltui.widgets.view_models import (
    Cell,
    CollectiveCell,
    CollectiveTable,
    DiagnosisViewModel,
    ProcessRow,
    StackViewModel,
    Tone,
    VerdictViewModel,
)

Lines = list[Cells]

LABEL_WIDTH = 10
NUMBER_WIDTH = 8
FRONT_COLUMN = 20
"""Narrower columns of the wavefront would say nothing: then it is told line by line."""
STACK_COLUMN = 44
GAP = 2
DIFFERS = "≠ "
_PROCESS_COLUMNS = (
    Column(key="pid", title="PID", width=8, right=True, importance=2),
    Column(key="doing", title="state", width=18),
    Column(key="cpu", title="CPU", width=6, right=True, importance=3),
    Column(key="memory", title="memory", width=9, right=True, importance=5),
    Column(key="note", title="", width=26, grows=True, importance=4),
)


def plain(lines: Sequence[Cells]) -> str:
    """The lines without their tones, for files and pipes."""
    return "\n".join("".join(c.text for c in cells).rstrip() for cells in lines)


def headline_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    found = _wrapped(view_model.headline.text, width, tone=view_model.headline.tone)
    return [*found, *_wrapped(view_model.about, width, tone=Tone.DIM)]


# -- verdicts --------------------------------------------------------------------------------------


def verdicts_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """What is wrong and what to do, with its evidence; what was wrong earlier; what is missing."""
    found: Lines = []
    for number, verdict in enumerate(view_model.verdicts):
        found += [_EMPTY] if number else []
        # The headline above has said it already.
        told = number == 0 and verdict.sentence in view_model.headline.text
        found += verdict_lines(verdict, width, told=told)
    if not view_model.verdicts:
        found.append((Cell(text="No problem found"),))
    if view_model.earlier:
        found += [_EMPTY, _title("earlier")]
        for text in view_model.earlier:
            found += _wrapped(text, width, indent=2)
    return found


def verdict_lines(verdict: VerdictViewModel, width: int, *, told: bool = False) -> Lines:
    sentence = f"{verdict.title.text}: {verdict.sentence}"
    found = [] if told else _wrapped(sentence, width, tone=verdict.title.tone)
    for label, text in verdict.facts:
        # What to do is what a tired person looks for.
        tone = Tone.ACCENT if label == "to do" else Tone.PLAIN
        found += _labelled(label, text, width, LABEL_WIDTH, tone)
    if verdict.evidence:
        wide = min(16, max(len(label) for label, _ in verdict.evidence) + 1)
        found += [_EMPTY, _title("evidence")]
        for label, text in verdict.evidence:
            found += _labelled(label, text, width, wide, Tone.PLAIN)
    return found


# -- collectives -----------------------------------------------------------------------------------


def collectives_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    if not view_model.collectives:
        return _wrapped(view_model.collectives_note, width, tone=Tone.DIM)
    found: Lines = []
    for number, front in enumerate(view_model.collectives):
        found += [_EMPTY] if number else []
        found += collective_table_lines(front, width)
    return found


def collective_table_lines(front: CollectiveTable, width: int) -> Lines:
    """A grid with a column for ranks that did the same, or a list where that is too narrow."""
    found = _wrapped(front.title, width, tone=Tone.DIM)
    room = (width - NUMBER_WIDTH) // max(1, len(front.columns)) - GAP
    if room >= FRONT_COLUMN or (len(front.columns) == 1 and room > 8):
        found += _grid(front, min(room, 48))
    else:
        found += _list(front, width)
    for note in front.notes:
        found += _wrapped(note, width, tone=Tone.DIM)
    return found


def _grid(front: CollectiveTable, room: int) -> Lines:
    gap = Cell(text=" " * GAP)
    head: list[Cell] = [Cell(text=" " * NUMBER_WIDTH)]
    for column in front.columns:
        head += [gap, Cell(text=_fixed(column.text, room), tone=column.tone)]
    found: Lines = [tuple(head)]
    for row in front.rows:
        tone = Tone.BAD if row.note else Tone.DIM
        sign = "▸" if row.note else " "
        first: list[Cell] = [Cell(text=_fixed(f"{sign}{row.number}", NUMBER_WIDTH), tone=tone)]
        second: list[Cell] = [Cell(text=" " * NUMBER_WIDTH)]
        for cell in row.cells:
            first += [gap, Cell(text=_fixed(_front_text(cell), room), tone=cell.tone)]
            site = _fixed(f"  {cell.site}" if cell.site else "", room)
            second += [gap, Cell(text=site, tone=Tone.ACCENT if cell.differs else Tone.DIM)]
        if row.note:
            found.append((Cell(text=f"{' ' * NUMBER_WIDTH}  {row.note}", tone=Tone.BAD),))
        found.append(tuple(first))
        if any(cell.site for cell in row.cells):
            found.append(tuple(second))
    return found


def _list(front: CollectiveTable, width: int) -> Lines:
    found: Lines = []
    for row in front.rows:
        note = f"  {row.note}" if row.note else ""
        sign = "▸" if row.note else " "
        tone = Tone.BAD if row.note else Tone.DIM
        found += _wrapped(f"{sign}{row.number}{note}", width, indent=4, tone=tone)
        for column, cell in zip(front.columns, row.cells, strict=True):
            site = f"  {cell.site}" if cell.site else ""
            text = f"{column.text}: {_front_text(cell)}{site}"
            found += _wrapped(text, width, indent=4, first=2, tone=cell.tone)
    return found


def _front_text(cell: CollectiveCell) -> str:
    return f"{DIFFERS if cell.differs else '  '}{cell.text}"


# -- stacks ----------------------------------------------------------------------------------------


def stacks_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Stacks side by side as far as there is room, then below each other."""
    if not view_model.stacks:
        return _wrapped(view_model.stacks_note, width, tone=Tone.DIM)
    return _beside(view_model.stacks, width)


def output_and_stack_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """For a panel of both: exceptions say more than where a thread stands."""
    if not view_model.last_output:
        return stacks_lines(view_model, width)
    stacks = [_EMPTY, *stacks_lines(view_model, width)] if view_model.stacks else []
    return [*last_output_lines(view_model, width), *stacks]


def last_output_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """What ranks wrote last: never side by side, lines of a log are long."""
    found: Lines = []
    for stack in view_model.last_output:
        found += [_EMPTY] if found else []
        found += stack_lines(stack, width)
    return found


def _beside(stacks: Sequence[StackViewModel], width: int) -> Lines:
    columns = max(1, min(len(stacks), (width + GAP) // (STACK_COLUMN + GAP)))
    room = (width + GAP) // columns - GAP
    found: Lines = []
    for start in range(0, len(stacks), columns):
        found += [_EMPTY] if start else []
        blocks = [stack_lines(stack, room) for stack in stacks[start : start + columns]]
        for number in range(max(len(block) for block in blocks)):
            cells: list[Cell] = []
            for place, block in enumerate(blocks):
                cells += [Cell(text=" " * GAP)] if place else []
                cells += _padded(block[number] if number < len(block) else (), room)
            found.append(tuple(cells))
    return found


def stack_lines(stack: StackViewModel, width: int) -> Lines:
    found = _wrapped(stack.who.text, width, tone=stack.who.tone)
    for cell in stack.lines:
        found += _wrapped(cell.text, width, indent=4, tone=cell.tone)
    return found


# -- processes -------------------------------------------------------------------------------------


def processes_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    found: Lines = []
    if view_model.processes:
        wide = max(8, min(22, max(cell_len(row.who) for row in view_model.processes)))
        columns = (Column(key="who", title="process", width=wide), *_PROCESS_COLUMNS)
        placed = fit_columns(columns, width)
        found.append(title_line(placed))
        found += [row_line(_process(row), placed) for row in view_model.processes]
        if all(place.column.key != "note" for place in placed):
            found += [c for row in view_model.processes if row.note for c in _note(row, width)]
    for text in view_model.machine:
        found += _wrapped(text, width, tone=Tone.DIM)
    if view_model.missing:
        found += [_EMPTY, _title("missing evidence, and how to get it")]
        for text in view_model.missing:
            found += _wrapped(text, width, indent=2)
    return found


def _note(row: ProcessRow, width: int) -> Lines:
    return _wrapped(f"{row.who}: {row.note}", width, indent=2, tone=Tone.DIM)


def _process(row: ProcessRow) -> dict[str, Cells]:
    return {
        "who": (Cell(text=row.who, tone=row.doing.tone),),
        "pid": (Cell(text=row.pid, tone=Tone.DIM),),
        "doing": (row.doing,),
        "cpu": (Cell(text=row.cpu),),
        "memory": (Cell(text=row.memory, tone=Tone.DIM),),
        "note": (Cell(text=row.note, tone=Tone.DIM),),
    }


# -- text ------------------------------------------------------------------------------------------

_EMPTY: Cells = (Cell(text=""),)


def _title(text: str) -> Cells:
    return (Cell(text=text, tone=Tone.DIM),)


def _labelled(label: str, text: str, width: int, wide: int, tone: Tone) -> Lines:
    """``label`` in a column of its own, the text beside it."""
    shown = f"{label} ".ljust(wide + 1)
    rows = _split(text, max(10, width - len(shown))) or [""]
    found: Lines = [(Cell(text=shown, tone=Tone.DIM), Cell(text=rows[0], tone=tone))]
    found += [(Cell(text=" " * len(shown)), Cell(text=row, tone=tone)) for row in rows[1:]]
    return found


def _wrapped(
    text: str, width: int, *, indent: int = 0, first: int = 0, tone: Tone = Tone.PLAIN
) -> Lines:
    """Wrapped between words; ``indent`` is that of every line but the first."""
    rows = _split(text, max(10, width), indent=indent, first=first)
    return [(Cell(text=row, tone=tone),) for row in rows]


def _split(text: str, width: int, *, indent: int = 0, first: int = 0) -> list[str]:
    if cell_len(text) != len(text):
        # Of letters two cells wide half as many fit; textwrap counts letters.
        width = max(10, width * len(text) // max(1, cell_len(text)))
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def _fixed(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1).rstrip() + "…"


def _padded(cells: Cells, width: int) -> Cells:
    used = sum(cell_len(c.text) for c in cells)
    return cells if used >= width else (*cells, Cell(text=" " * (width - used)))
