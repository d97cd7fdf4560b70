"""The grid of many ranks or GPUs on several machines: one cell for each, with a legend. Pure.

A cell shows the state of a rank that has a problem, else how many steps it is behind the others,
else its step time. A sign in each cell gives the state, so the grid can be read without colour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from statistics import median

from msgspec import Struct
from rich.cells import cell_len

from ltui.app.live.frame import Frame
from ltui.app.presentation.gpu_view import stale_age_s, tone_by_gpu
from ltui.app.presentation.machines import NO_REPORT, NOT_REPORTING, machine_names, ranks_by_machine
from ltui.app.presentation.run_view import rank_state, rank_verdicts
from ltui.app.presentation.snapshot_text import gpu_label
from ltui.training.state.run_snapshot import (
    LIVE,
    GpuSnapshot,
    NodeSnapshot,
    RankSnapshot,
    RunSnapshot,
)
from ltui.widgets.columns import HEIGHTS, Cells
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

LEGEND_GAP = "   "
MAX_LEGEND_LINES = 2


class Mark(Struct, frozen=True):
    """The sign of a cell. If several ranks share a cell, it shows the mark of highest severity."""

    sign: str
    tone: Tone = Tone.PLAIN
    severity: int = 0


class GridGroup(Struct, frozen=True):
    """The cells of one machine, in order."""

    labels: Sequence[str]
    """The name of each cell. A line begins with the name of its first cell."""
    marks: Sequence[Mark]


class LegendEntry(Struct, frozen=True):
    """The meaning of a sign, such as ``! 1 STALLED``."""

    sign: str
    words: str
    tone: Tone = Tone.PLAIN


class CellGrid(Struct, frozen=True):
    """A grid and the meanings of the signs in it, the most important one first."""

    groups: tuple[GridGroup, ...]
    legend: tuple[LegendEntry, ...] = ()
    unit: str = "rank"
    """What a cell stands for, for the legend: ``1 cell: worst of 4 ranks``."""


def grid_lines(grid: CellGrid, most_lines: int, width: int) -> list[Cells]:
    """Return the legend and the cells, together in at most ``most_lines`` lines.

    There is always a line of cells. Machines are separated by a blank if all cells fit so. If there
    are too many cells, several neighbours of one machine share a cell.
    """
    if not any(group.marks for group in grid.groups) or most_lines < 1:
        return []
    label_width = max(cell_len(label) for group in grid.groups for label in group.labels) + 1
    room = max(1, width - label_width)
    all_groups, merged = [group for group in grid.groups if group.marks], 1
    while True:
        groups = [_merge(group, merged) for group in all_groups]
        legend = legend_lines(grid, merged, width)[: most_lines - 1]
        free = most_lines - len(legend)
        layouts = (_separated(groups, room), _aligned(groups, room), _dense(groups, room))
        lines = next((lines for lines in layouts if lines is not None and len(lines) <= free), None)
        if lines is not None:
            break
        if len(all_groups) > 1 and all(len(group.marks) == 1 for group in groups):
            # There are more machines than cells, so machines share cells too.
            all_groups, merged = [_join(all_groups)], 1
        else:
            merged *= 2
    drawn = legend
    for line in lines:
        label = next(label for label, mark in line if mark is not None)
        cells = [Cell(text=f"{label:>{label_width - 1}} ", tone=Tone.DIM)]
        for tone, run in groupby((mark for _, mark in line), key=_tone):
            text = "".join(" " if mark is None else mark.sign for mark in run)
            cells.append(Cell(text=text, tone=tone))
        drawn.append(tuple(cells))
    return drawn


def legend_lines(grid: CellGrid, merged: int, width: int) -> list[Cells]:
    """Return the legend in at most two lines; the last entries that do not fit are omitted."""
    entries = list(grid.legend)
    if merged > 1:
        words = f"1 cell: worst of {merged} {grid.unit}s"
        entries.insert(0, LegendEntry("", words, Tone.DIM))
    lines: list[list[Cell]] = [[]]
    used = 0
    for entry in entries:
        sign = f"{entry.sign} " if entry.sign else ""
        length = cell_len(sign) + cell_len(entry.words)
        if used and used + len(LEGEND_GAP) + length > width:
            if len(lines) == MAX_LEGEND_LINES:
                break
            lines.append([])
            used = 0
        if used:
            lines[-1].append(Cell(text=LEGEND_GAP))
            used += len(LEGEND_GAP)
        if sign:
            lines[-1].append(Cell(text=sign, tone=entry.tone))
        loud = entry.tone in (Tone.BAD, Tone.WARN)
        lines[-1].append(Cell(text=entry.words, tone=entry.tone if loud else Tone.DIM))
        used += length
    return [tuple(line) for line in lines if line]


_Line = list[tuple[str, Mark | None]]
"""Label and mark of each cell; None is a blank between two machines."""


def _tone(mark: Mark | None) -> Tone:
    return Tone.PLAIN if mark is None else mark.tone


def _merge(group: GridGroup, size: int) -> GridGroup:
    """Return the group with one cell for each ``size`` neighbours."""
    if size == 1:
        return group
    starts = range(0, len(group.marks), size)
    worst = attrgetter("severity")
    return GridGroup(
        [group.labels[start] for start in starts],
        [max(group.marks[start : start + size], key=worst) for start in starts],
    )


def _join(groups: Sequence[GridGroup]) -> GridGroup:
    labels = [label for group in groups for label in group.labels]
    return GridGroup(labels, [mark for group in groups for mark in group.marks])


def _separated(groups: Sequence[GridGroup], room: int) -> list[_Line] | None:
    """Return whole machines in lines, with blanks between them; None if one is too wide."""
    widest = max(len(group.marks) for group in groups)
    if widest > room:
        return None
    per_line = (room + 1) // (widest + 1)
    lines = []
    for start in range(0, len(groups), per_line):
        line: _Line = []
        for group in groups[start : start + per_line]:
            if line:
                line.append(("", None))
            line += zip(group.labels, group.marks, strict=True)
            # Machines with fewer ranks take the same width, so that all machines are aligned.
            line += [("", None)] * (widest - len(group.marks))
        lines.append(line)
    return lines


def _aligned(groups: Sequence[GridGroup], room: int) -> list[_Line] | None:
    """Return whole machines in lines without blanks; None unless all have one size."""
    sizes = {len(group.marks) for group in groups}
    size = max(sizes)
    return None if len(sizes) > 1 or size > room else _dense(groups, room - room % size)


def _dense(groups: Sequence[GridGroup], per_line: int) -> list[_Line]:
    """Return all cells one after the other."""
    cells: _Line = [
        pair for group in groups for pair in zip(group.labels, group.marks, strict=True)
    ]
    return [cells[start : start + per_line] for start in range(0, len(cells), per_line)]


MIN_RANKS = 64
"""Number of ranks, or GPUs, on several machines from which the grid is shown."""
MIN_STEPS_BEHIND = 2
"""Steps that a rank must be behind the first one. Ranks are sampled at slightly different times."""
TALLEST = 4.0
"""Multiple of the median step time that fills a cell."""
REPORT_PERIOD_S = 0.3
"""Seconds between two reports of a machine: in this time its ranks may have taken steps."""

_STATE_MARKS = {
    "DEAD": Mark("x", Tone.BAD, 90),
    "STALLED": Mark("!", Tone.BAD, 80),
    "slow": Mark("s", Tone.WARN, 60),
    "waiting": Mark("…", Tone.WARN, 40),
    "paused": Mark("‖", Tone.WARN, 39),
    "unknown": Mark("?", Tone.DIM, 38),
    "starting": Mark("○", Tone.DIM, 37),
    "ended": Mark("■", Tone.DIM, 1),
}
"""The mark of each state in which the step time means nothing."""
_NO_REPORT = Mark("?", Tone.DIM, 70)
_NO_TIME = Mark("·", Tone.PLAIN, 2)
_NOTABLE_HEIGHT = 2
"""Index of the first block that is bright: it means a step of about twice the median."""
_TIME_MARKS = tuple(
    Mark(block, Tone.DIM if n < _NOTABLE_HEIGHT else Tone.PLAIN, 3 + n)
    for n, block in enumerate(HEIGHTS)
)
_BEHIND_MARKS = tuple(
    Mark("+" if steps > 9 else str(steps), Tone.WARN, 40 + min(10, steps)) for steps in range(11)
)
TIME_LEGEND = LegendEntry("▁▇", f"step time, 1 to {TALLEST:.0f} times the median")
BEHIND_LEGEND = LegendEntry("2-9 +", "steps behind", Tone.WARN)


def has_grid(frame: Frame) -> bool:
    """Return True if a run has so many ranks on several machines that a grid helps."""
    return bool(frame.snapshot.nodes) and len(frame.snapshot.ranks) >= MIN_RANKS


def rank_grid(frame: Frame) -> CellGrid:
    """Return the grid of all ranks by machine and rank, so that cells keep their places."""
    run = frame.snapshot
    live = run.state in LIVE
    verdicts = rank_verdicts(run)
    nodes = {node.node: node for node in run.nodes}
    times = [rank.step_s for rank in run.ranks if rank.step_s and math.isfinite(rank.step_s)]
    usual_s = median(times) if times else None
    first_step = max((r.global_step for r in run.ranks if r.global_step is not None), default=None)
    counts: Counter[str] = Counter()
    shown: set[Mark] = set()
    groups = []
    for number, ranks in sorted(ranks_by_machine(run).items()):
        node = nodes.get(number)
        silent = live and node is not None and node.state in NOT_REPORTING
        allowed = _steps_until_report(node, usual_s)
        marks = []
        for rank in ranks:
            word = rank_state(rank, verdicts).text
            if silent and word != "DEAD":
                word, mark = NO_REPORT, _NO_REPORT
            else:
                mark = _STATE_MARKS.get(word) or _moving_mark(rank, usual_s, first_step, allowed)
            counts[word] += 1
            marks.append(mark)
        shown.update(marks)
        groups.append(GridGroup([f"r{rank.rank}" for rank in ranks], marks))
    return CellGrid(tuple(groups), _legend(counts, shown), "rank")


def _steps_until_report(node: NodeSnapshot | None, usual_s: float | None) -> int:
    """Return the steps that ranks may have taken since the last report of their machine."""
    if node is None or node.link_age_s is None or not usual_s:
        return 0
    return math.ceil((node.link_age_s + REPORT_PERIOD_S) / usual_s)


def _moving_mark(
    rank: RankSnapshot, usual_s: float | None, first_step: int | None, allowed: int
) -> Mark:
    if first_step is not None and rank.global_step is not None:
        behind = first_step - rank.global_step - allowed
        if behind >= MIN_STEPS_BEHIND:
            return _BEHIND_MARKS[min(10, behind)]
    if not rank.step_s or not usual_s:
        return _NO_TIME
    share = (rank.step_s / usual_s - 1) / (TALLEST - 1)
    return _TIME_MARKS[min(len(_TIME_MARKS) - 1, max(0, int(share * len(_TIME_MARKS))))]


def _legend(counts: Counter[str], shown: set[Mark]) -> tuple[LegendEntry, ...]:
    """Return the signs that occur, with their numbers of ranks, and the meaning of the blocks."""
    marks = {**_STATE_MARKS, NO_REPORT: _NO_REPORT}
    words = sorted((w for w in counts if w in marks), key=lambda w: -marks[w].severity)
    entries = [LegendEntry(marks[w].sign, f"{counts[w]} {w}", marks[w].tone) for w in words]
    if shown & set(_BEHIND_MARKS):
        entries.append(BEHIND_LEGEND)
    if shown & set(_TIME_MARKS):
        entries.append(TIME_LEGEND)
    return tuple(entries)


# -- GPUs ------------------------------------------------------------------------------------------

_UTILISATION_MARKS = tuple(
    # A GPU that is used least is of most interest if several share a cell.
    Mark(block, Tone.PLAIN if n < _NOTABLE_HEIGHT else Tone.DIM, len(HEIGHTS) - n)
    for n, block in enumerate(HEIGHTS)
)
_FINDING_MARKS = {Tone.BAD: Mark("!", Tone.BAD, 90), Tone.WARN: Mark("▲", Tone.WARN, 80)}
_NOT_READ = Mark("?", Tone.DIM, 70)
_GPU_WORDS = {
    _FINDING_MARKS[Tone.BAD]: "with an error",
    _FINDING_MARKS[Tone.WARN]: "with a problem",
    _NOT_READ: "without a current reading",
}


def has_gpu_grid(run: RunSnapshot) -> bool:
    """Return True if a run has so many GPUs on several machines that a grid replaces the strips."""
    return bool(run.nodes) and len(run.gpus) >= MIN_RANKS


def gpu_grid(frame: Frame) -> CellGrid:
    """Return the utilisation of all GPUs, with signs for those that have a problem."""
    names, tones = machine_names(frame.snapshot), tone_by_gpu(frame)
    by_node: dict[int, list[GpuSnapshot]] = {}
    for gpu in sorted(frame.snapshot.gpus, key=lambda gpu: gpu.number):
        by_node.setdefault(gpu.node, []).append(gpu)
    groups = []
    counts: Counter[Mark] = Counter()
    for members in by_node.values():
        marks = [_gpu_mark(gpu, tones.get(gpu.number, Tone.PLAIN), frame) for gpu in members]
        counts.update(marks)
        groups.append(GridGroup([gpu_label(gpu, names) for gpu in members], marks))
    legend = [
        LegendEntry(mark.sign, f"{counts[mark]} {words}", mark.tone)
        for mark, words in _GPU_WORDS.items()
        if counts[mark]
    ]
    legend.append(LegendEntry("▁▇", "utilisation, 0 to 100 %"))
    return CellGrid(tuple(groups), tuple(legend), "GPU")


def _gpu_mark(gpu: GpuSnapshot, tone: Tone, frame: Frame) -> Mark:
    if tone in _FINDING_MARKS:
        return _FINDING_MARKS[tone]
    if gpu.utilisation_percent is None or stale_age_s(gpu, frame) is not None:
        return _NOT_READ
    index = int(gpu.utilisation_percent / 100 * len(_UTILISATION_MARKS))
    return _UTILISATION_MARKS[min(len(_UTILISATION_MARKS) - 1, max(0, index))]
