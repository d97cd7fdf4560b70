"""The rows of the home screen's list of runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ltui.app.presentation.snapshot_text import rank_word
from ltui.app.runs.run_entry import DAMAGED, RunEntry
from ltui.app.runs.run_fields import value_text
from ltui.app.runs.run_summary import RunSummary
from ltui.training.state.run_snapshot import RankState, RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import Cell, Tone

DEFAULT_COLUMNS = ("preset", "state", "tag", "done", "step", "metric", "created", "detail")
"""The fields in the columns of the list, unless others were chosen. A row has values of their own
for them; of every other field, setting or metric it has the text."""
MAX_TEXT = 60
"""Maximum characters of such a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run as one line."""

    id: str
    sign: Cell
    name: str
    state: Cell
    note: Cell
    star: bool = False
    marked: bool = False
    tags: str = ""
    preset: str = ""
    share: float | None = None
    progress: str = ""
    metric: str = ""
    """The value of ``metric_name``. Both are empty before a metric is logged."""
    metric_name: str = ""
    created: str = ""
    """Time since the run was launched."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of the chosen columns that are not among ``DEFAULT_COLUMNS``."""


def run_row(
    entry: RunEntry, now: float, columns: Sequence[str] = (), *, marked: bool = False
) -> RunRow:
    """Return the row of a run, also of one that cannot be read."""
    labels, run = entry.labels, entry.summary
    texts = {
        name: clean_line(value_text(entry, name, now), MAX_TEXT)
        for name in columns
        if name not in DEFAULT_COLUMNS
    }
    tags = ", ".join(labels.tags)
    if run is None:
        return RunRow(
            id=entry.id,
            sign=Cell(text="?", tone=Tone.WARN),
            name=clean_name(entry.id),
            state=Cell(text=DAMAGED, tone=Tone.WARN),
            note=Cell(text=clean_line(entry.problem or ""), tone=Tone.WARN),
            star=labels.star,
            marked=marked,
            tags=tags,
            texts=texts,
        )
    tone = Tone(run.tone)
    return RunRow(
        id=entry.id,
        sign=Cell(text=run.sign, tone=tone),
        name=run.name,
        star=labels.star,
        marked=marked,
        tags=tags,
        preset=run.short_program,
        state=Cell(text=_state_text(run), tone=tone if tone is not Tone.GOOD else Tone.PLAIN),
        share=run.done,
        progress="" if run.step is None else f"step {formats.step(run.step, run.max_steps)}",
        metric=formats.metric(run.metric_value) if run.metric else "",
        metric_name=run.metric,
        created=formats.ago(None if run.created_at is None else now - run.created_at),
        note=_note_cell(entry, run),
        texts=texts,
    )


def _state_text(run: RunSummary) -> str:
    """Return the state, or a bad loss alone: the column is narrow, and the sign has the state."""
    state, _, loss = run.state.partition(", ")
    return loss or state


def _note_cell(entry: RunEntry, run: RunSummary) -> Cell:
    if entry.snapshot is not None:
        return _live_cell(entry.snapshot)
    if entry.labels.note:
        return Cell(text=entry.labels.note)
    if run.reason:
        return Cell(text=run.reason, tone=Tone.WARN)
    return Cell(text=run.detail, tone=Tone.DIM)


def _live_cell(run: RunSnapshot) -> Cell:
    for state in (RankState.DEAD, RankState.STALLED):
        ranks = tuple(r.rank for r in run.ranks if r.state is state)
        if ranks and run.state is not RunState.PAUSED:
            return Cell(text=f"{formats.rank_words(ranks)} {rank_word(state)}", tone=Tone.BAD)
    remaining = "" if run.eta_s is None else f"{formats.duration(run.eta_s)} left"
    return Cell(text=remaining, tone=Tone.DIM)
