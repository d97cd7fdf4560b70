"""The grid of all ranks of a run on several machines: one cell for each rank. Pure.

A cell shows the state of a rank that has a problem, else how many steps it is behind the others,
else its step time.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import median

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
from ltui.widgets.bars import HEIGHTS
from ltui.widgets.cell_grid import CellGrid, GridGroup, LegendEntry, Mark
from ltui.widgets.tone import Tone

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
