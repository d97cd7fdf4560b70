"""The rows of the home screen's list of runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ltui.app.live.run_list import RunListEntry
from ltui.app.presentation.headline_metric import headline_metric
from ltui.app.presentation.run_view import state_sign
from ltui.app.presentation.snapshot_text import done_fraction, program_text, rank_word
from ltui.app.state_words import FAILED, bad_loss_sentence, ended_detail
from ltui.training.state.run_snapshot import LIVE, RankState, RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import Cell, Tone


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run as one line."""

    id: str
    sign: Cell
    name: str
    state: Cell
    note: Cell
    preset: str = ""
    share: float | None = None
    progress: str = ""
    metric: str = ""
    """The value of ``metric_name``. Both are empty before a metric is logged."""
    metric_name: str = ""
    created: str = ""
    """Time since the run was launched."""


def run_row(line: RunListEntry, now: float) -> RunRow:
    """Return the row of a run, also of one that cannot be read."""
    run = line.snapshot
    if run is None:
        return RunRow(
            id=line.id,
            sign=Cell(text="?", tone=Tone.WARN),
            name=clean_name(line.id),
            state=Cell(text="unreadable", tone=Tone.WARN),
            note=Cell(text=clean_line(line.problem or ""), tone=Tone.WARN),
        )
    sign, word, tone = state_sign(run)
    shown = headline_metric(run)
    return RunRow(
        id=line.id,
        sign=Cell(text=sign, tone=tone),
        name=clean_name(run.name),
        preset=clean_name(_short_program(run)),
        state=Cell(text=word, tone=tone if tone is not Tone.GOOD else Tone.PLAIN),
        share=done_fraction(run),
        progress=_progress_text(run),
        metric=formats.metric(shown.value) if shown is not None else "",
        metric_name=clean_name(shown.name) if shown is not None else "",
        created=formats.ago(None if run.created_at is None else now - run.created_at),
        note=_note_cell(run),
    )


def _short_program(run: RunSnapshot) -> str:
    """Return the preset, or the script of a command without the interpreter and the folders
    before it."""
    if run.preset or not run.command:
        return program_text(run)
    scripts = [n for n, word in enumerate(run.command) if word.endswith((".py", ".sh"))]
    program, *rest = run.command[scripts[0] if scripts else 0 :]
    return " ".join([program.rpartition("/")[2], *rest])


def _progress_text(run: RunSnapshot) -> str:
    if run.global_step is None:
        return ""
    return f"step {formats.step(run.global_step, run.max_steps)}"


def _note_cell(run: RunSnapshot) -> Cell:
    if run.state in LIVE:
        for state in (RankState.DEAD, RankState.STALLED):
            ranks = tuple(r.rank for r in run.ranks if r.state is state)
            if ranks and run.state is not RunState.PAUSED:
                return Cell(text=f"{formats.rank_words(ranks)} {rank_word(state)}", tone=Tone.BAD)
        remaining = "" if run.eta_s is None else f"{formats.duration(run.eta_s)} left"
        return Cell(text=remaining, tone=Tone.DIM)
    if run.state in FAILED:
        return Cell(text=ended_detail(run), tone=Tone.WARN)
    if loss := bad_loss_sentence(run):
        return Cell(text=loss, tone=Tone.WARN)
    return Cell(text=clean_line(run.detail or ""), tone=Tone.DIM)
