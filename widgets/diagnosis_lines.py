"""Lay out the parts of a diagnosis as lines of cells for a given width.

The screen and the text report use the same lines. Every mark is a sign or a word as well as a tone.
The report is printed, copied, or attached to the description of a bug. Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from ltui.widgets.columns import Cells, Column, fit_columns, row_line, shortened, title_line
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import (
    Cell,
    CollectiveCell,
    CollectiveTable,
    DiagnosisViewModel,
    ProcessRow,
    StackViewModel,
    VerdictViewModel,
)

Lines = list[Cells]

LABEL_WIDTH = 10
"""Cells for the label of a fact."""
NUMBER_WIDTH = 8
"""Cells for the sequence number of a collective."""
MIN_COLLECTIVE_WIDTH = 20
"""Minimum cells of a column of collectives; in a narrower panel they become a list."""
MIN_STACK_WIDTH = 44
"""Minimum cells of a stack that is placed side by side with another one."""
GAP = 2
"""Cells between two columns."""
DIFFERS = "≠ "
"""Marks a collective that differs from the one of most ranks."""
_PROCESS_COLUMNS = (
    Column(key="pid", title="PID", width=8, right=True, importance=2),
    Column(key="state", title="state", width=18),
    Column(key="cpu", title="CPU", width=6, right=True, importance=3),
    Column(key="memory", title="memory", width=9, right=True, importance=5),
    Column(key="note", title="", width=26, grows=True, importance=4),
)


def plain(lines: Sequence[Cells]) -> str:
    """Return the lines as plain text, for files and pipes."""
    return "\n".join("".join(c.text for c in cells).rstrip() for cells in lines)


def headline_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the headline, the line about the run, and what limits its speed."""
    lines = _wrapped(view_model.headline.text, width, tone=view_model.headline.tone)
    lines += _wrapped(view_model.about, width, tone=Tone.DIM)
    return [*lines, *_wrapped(view_model.limit, width)]


# -- verdicts --------------------------------------------------------------------------------------


def verdicts_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the active verdicts with remedies and evidence, and the verdicts that have ended."""
    lines: Lines = []
    for number, verdict in enumerate(view_model.verdicts):
        lines += [_EMPTY] if number else []
        # The headline above contains the first sentence already.
        in_headline = number == 0 and verdict.sentence in view_model.headline.text
        lines += verdict_lines(verdict, width, with_sentence=not in_headline)
    if not view_model.verdicts:
        lines += _wrapped(view_model.verdicts_note or "No problem found", width)
    if view_model.earlier:
        lines += [_EMPTY, _title("earlier")]
        for text in view_model.earlier:
            lines += _wrapped(text, width, indent=2)
    return lines


def verdict_lines(verdict: VerdictViewModel, width: int, *, with_sentence: bool = True) -> Lines:
    """Return the facts and the evidence of a verdict, by default after its sentence."""
    sentence = f"{verdict.title.text}: {verdict.sentence}"
    lines = _wrapped(sentence, width, tone=verdict.title.tone) if with_sentence else []
    for label, text in verdict.facts:
        # The remedy is what a tired person needs first.
        tone = Tone.ACCENT if label == "to do" else Tone.PLAIN
        lines += _labelled(label, text, width, LABEL_WIDTH, tone)
    if verdict.evidence:
        label_width = min(16, max(len(label) for label, _ in verdict.evidence) + 1)
        lines += [_EMPTY, _title("evidence")]
        for label, text in verdict.evidence:
            lines += _labelled(label, text, width, label_width, Tone.PLAIN)
    return lines


# -- collectives -----------------------------------------------------------------------------------


def collectives_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the collectives of every process group, or the reason if there are none."""
    if not view_model.collectives:
        return _wrapped(view_model.collectives_note, width, tone=Tone.DIM)
    lines: Lines = []
    for number, table in enumerate(view_model.collectives):
        lines += [_EMPTY] if number else []
        lines += collective_table_lines(table, width)
    return lines


def collective_table_lines(table: CollectiveTable, width: int) -> Lines:
    """Return a grid with one column for ranks that agree, or a list if the panel is too narrow."""
    lines = _wrapped(table.title, width, tone=Tone.DIM)
    column_width = (width - NUMBER_WIDTH) // max(1, len(table.columns)) - GAP
    if column_width >= MIN_COLLECTIVE_WIDTH or (len(table.columns) == 1 and column_width > 8):
        lines += _grid(table, min(column_width, 48))
    else:
        lines += _list(table, width)
    for note in table.notes:
        lines += _wrapped(note, width, tone=Tone.DIM)
    return lines


def _grid(table: CollectiveTable, column_width: int) -> Lines:
    gap = Cell(text=" " * GAP)
    head: list[Cell] = [Cell(text=" " * NUMBER_WIDTH)]
    for column in table.columns:
        head += [gap, Cell(text=_pad_or_cut(column.text, column_width), tone=column.tone)]
    lines: Lines = [tuple(head)]
    for row in table.rows:
        tone = Tone.BAD if row.note else Tone.DIM
        sign = "▸" if row.note else " "
        first: list[Cell] = [Cell(text=_pad_or_cut(f"{sign}{row.number}", NUMBER_WIDTH), tone=tone)]
        second: list[Cell] = [Cell(text=" " * NUMBER_WIDTH)]
        for cell in row.cells:
            first += [
                gap,
                Cell(text=_pad_or_cut(_collective_text(cell), column_width), tone=cell.tone),
            ]
            site = _pad_or_cut(f"  {cell.site}" if cell.site else "", column_width)
            second += [gap, Cell(text=site, tone=Tone.ACCENT if cell.differs else Tone.DIM)]
        if row.note:
            lines.append((Cell(text=f"{' ' * NUMBER_WIDTH}  {row.note}", tone=Tone.BAD),))
        lines.append(tuple(first))
        if any(cell.site for cell in row.cells):
            lines.append(tuple(second))
    return lines


def _list(table: CollectiveTable, width: int) -> Lines:
    lines: Lines = []
    for row in table.rows:
        note = f"  {row.note}" if row.note else ""
        sign = "▸" if row.note else " "
        tone = Tone.BAD if row.note else Tone.DIM
        lines += _wrapped(f"{sign}{row.number}{note}", width, indent=4, tone=tone)
        for column, cell in zip(table.columns, row.cells, strict=True):
            site = f"  {cell.site}" if cell.site else ""
            text = f"{column.text}: {_collective_text(cell)}{site}"
            lines += _wrapped(text, width, indent=4, first=2, tone=cell.tone)
    return lines


def _collective_text(cell: CollectiveCell) -> str:
    return f"{DIFFERS if cell.differs else '  '}{cell.text}"


# -- stacks ----------------------------------------------------------------------------------------


def stacks_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the stacks, side by side if the width allows it, else below each other."""
    if not view_model.stacks:
        return _wrapped(view_model.stacks_note, width, tone=Tone.DIM)
    return _side_by_side(view_model.stacks, width)


def output_and_stack_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the last output, the samples, then the stacks: an exception says more than a stack."""
    first = [last_output_lines(view_model, width), samples_lines(view_model, width)]
    lines = [line for part in first if part for line in (*part, _EMPTY)]
    if not lines or view_model.stacks:
        return [*lines, *stacks_lines(view_model, width)]
    return lines[:-1]


def samples_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the seconds of a slow and a normal rank next to each other, by place."""
    samples = view_model.samples
    if samples is None:
        return []
    lines = [*_wrapped(samples.sentence, width), *_wrapped(samples.about, width, tone=Tone.DIM)]
    for title, rows in (("", samples.rows), ("their workers, on average", samples.workers)):
        if rows:
            lines.append(_title(_sample_text(samples.slow, samples.normal, title)))
        for slow, normal, where in rows:
            text = _sample_text(slow, normal, where)
            lines += _wrapped(text, width, indent=len(text) - len(where))
    return lines


def _sample_text(slow: str, normal: str, where: str) -> str:
    return f"{slow:>9}  {normal:>9}  {where}" if normal else f"{slow:>9}  {where}"


def last_output_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the last log lines of ranks, never side by side, because log lines are long."""
    lines: Lines = []
    for stack in view_model.last_output:
        lines += [_EMPTY] if lines else []
        lines += stack_lines(stack, width)
    return lines


def _side_by_side(stacks: Sequence[StackViewModel], width: int) -> Lines:
    columns = max(1, min(len(stacks), (width + GAP) // (MIN_STACK_WIDTH + GAP)))
    column_width = (width + GAP) // columns - GAP
    lines: Lines = []
    for start in range(0, len(stacks), columns):
        lines += [_EMPTY] if start else []
        blocks = [stack_lines(stack, column_width) for stack in stacks[start : start + columns]]
        for number in range(max(len(block) for block in blocks)):
            cells: list[Cell] = []
            for index, block in enumerate(blocks):
                cells += [Cell(text=" " * GAP)] if index else []
                cells += _padded(block[number] if number < len(block) else (), column_width)
            lines.append(tuple(cells))
    return lines


def stack_lines(stack: StackViewModel, width: int) -> Lines:
    """Return the title and the lines of one stack."""
    lines = _wrapped(stack.title.text, width, tone=stack.title.tone)
    for cell in stack.lines:
        lines += _wrapped(cell.text, width, indent=4, tone=cell.tone)
    return lines


# -- processes -------------------------------------------------------------------------------------


def processes_lines(view_model: DiagnosisViewModel, width: int) -> Lines:
    """Return the table of processes, the facts about the machine and the missing evidence."""
    lines: Lines = []
    if view_model.processes:
        label_width = max(8, min(22, max(cell_len(row.owner) for row in view_model.processes)))
        columns = (Column(key="owner", title="process", width=label_width), *_PROCESS_COLUMNS)
        placed = fit_columns(columns, width)
        lines.append(title_line(placed))
        lines += [row_line(_process_cells(row), placed) for row in view_model.processes]
        if all(column.column.key != "note" for column in placed):
            lines += [
                c for row in view_model.processes if row.note for c in _note_lines(row, width)
            ]
    for text in view_model.machine:
        lines += _wrapped(text, width, tone=Tone.DIM)
    if view_model.missing:
        lines += [_EMPTY] if lines else []
        lines.append(_title("missing evidence, and how to get it"))
        for text in view_model.missing:
            lines += _wrapped(text, width, indent=2)
    return lines


def _note_lines(row: ProcessRow, width: int) -> Lines:
    return _wrapped(f"{row.owner}: {row.note}", width, indent=2, tone=Tone.DIM)


def _process_cells(row: ProcessRow) -> dict[str, Cells]:
    return {
        "owner": (Cell(text=row.owner, tone=row.state.tone),),
        "pid": (Cell(text=row.pid, tone=Tone.DIM),),
        "state": (row.state,),
        "cpu": (Cell(text=row.cpu),),
        "memory": (Cell(text=row.memory, tone=Tone.DIM),),
        "note": (Cell(text=row.note, tone=Tone.DIM),),
    }


# -- text ------------------------------------------------------------------------------------------

_EMPTY: Cells = (Cell(text=""),)


def _title(text: str) -> Cells:
    return (Cell(text=text, tone=Tone.DIM),)


def _labelled(label: str, text: str, width: int, label_width: int, tone: Tone) -> Lines:
    """Return ``label`` in its own column and the wrapped text next to it."""
    shown = f"{label} ".ljust(label_width + 1)
    rows = _split(text, max(10, width - len(shown))) or [""]
    lines: Lines = [(Cell(text=shown, tone=Tone.DIM), Cell(text=rows[0], tone=tone))]
    lines += [(Cell(text=" " * len(shown)), Cell(text=row, tone=tone)) for row in rows[1:]]
    return lines


def _wrapped(
    text: str, width: int, *, indent: int = 0, first: int = 0, tone: Tone = Tone.PLAIN
) -> Lines:
    """Wrap text between words. ``first`` indents the first line, ``indent`` the others."""
    rows = _split(text, max(10, width), indent=indent, first=first)
    return [(Cell(text=row, tone=tone),) for row in rows]


def _split(text: str, width: int, *, indent: int = 0, first: int = 0) -> list[str]:
    if cell_len(text) != len(text):
        # textwrap counts letters, but only half as many letters of two cells fit.
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


def _pad_or_cut(text: str, width: int) -> str:
    return set_cell_size(shortened(text, width), width)


def _padded(cells: Cells, width: int) -> Cells:
    used = sum(cell_len(c.text) for c in cells)
    return cells if used >= width else (*cells, Cell(text=" " * (width - used)))


WIDTH = 100
"""Columns of a report that is not printed on a terminal."""


def report(view_model: DiagnosisViewModel, width: int = WIDTH) -> str:
    """Return every part that is not empty, each under its title."""
    named: list[tuple[str, Lines]] = []
    if view_model.verdicts or view_model.earlier or view_model.verdicts_note:
        named.append(("problems and remedies", verdicts_lines(view_model, width)))
    if view_model.collectives:
        named.append(("collectives", collectives_lines(view_model, width)))
    if view_model.last_output:
        named.append(("last log lines", last_output_lines(view_model, width)))
    if view_model.samples:
        named.append(("samples of stacks", samples_lines(view_model, width)))
    if view_model.stacks:
        named.append(("stacks (innermost call first)", stacks_lines(view_model, width)))
    if view_model.processes or view_model.machine or view_model.missing:
        named.append(("processes", processes_lines(view_model, width)))
    text = [plain(headline_lines(view_model, width))]
    for title, lines in named:
        text.append(f"-- {title} {'-' * max(3, width - len(title) - 4)}\n{plain(lines)}")
    return "\n\n".join(text) + "\n"


def file_name(run_id: str) -> str:
    """Return ``ltui-brave-owl-3f2a-diagnosis``, without a suffix."""
    return f"ltui-{run_id}-diagnosis"
