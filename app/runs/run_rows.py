"""The list of runs as a table: its rows, its columns and its order. Pure.

An order is written as for ``ltui runs --sort``: the name of what the runs are sorted by, a field, a
metric or a setting. After ``-`` the highest value is first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct, field

from ltui.app.presentation.snapshot_text import rank_word
from ltui.app.runs.run_entry import DAMAGED, RunEntry, RunSummary
from ltui.app.runs.run_fields import (
    ALIASES,
    FIELDS,
    SETTING,
    Kind,
    kind_of,
    setting_texts,
    value_of,
    value_text,
)
from ltui.app.state_words import waiting_reason
from ltui.training.problem import ProblemError
from ltui.training.state.metric_name_patterns import LOWER_IS_BETTER
from ltui.training.state.run_snapshot import RankState, RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

DEFAULT_COLUMNS = ("state", "progress", "metric", "program", "tag", "created", "detail")
"""The fields in the columns of the list, unless others were chosen. A row has values of their own
for them; of every other field, setting or metric it has the text."""
MAX_TEXT = 60
"""Maximum characters of such a text."""
_ENDED_AT = re.compile(r"^(finished|stopped) at step \d+[,;:. ]*", re.IGNORECASE)
"""What state and progress of a row say already."""
_OPTION = re.compile(r"-\S*(?:\s+[^-\s]\S*)?|\S+")
"""An option with its value, or another word."""


class RunRow(Struct, frozen=True, kw_only=True):
    """One run as one line."""

    id: str
    sign: Cell
    name: str
    state: Cell
    note: Cell
    star: bool = False
    marked: bool = False
    tags: str = ""
    program: str = ""
    progress: str = ""
    """How far a live run is and how long it still takes; the last step of another one."""
    metric: str = ""
    """The value of ``metric_name``. Both are empty before a metric is logged."""
    metric_name: str = ""
    created: str = ""
    """Time since the run was launched."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of the chosen columns that are not among ``DEFAULT_COLUMNS``."""


def run_row(
    entry: RunEntry,
    now: float,
    columns: Sequence[str] = (),
    *,
    marked: bool = False,
    programs: Mapping[str, str] = MappingProxyType({}),
) -> RunRow:
    """Return the row of a run, also of one that cannot be read.

    ``programs``: shorter names of programs (``distinct_programs``).
    """
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
            name=entry.name,
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
        name=entry.name,
        star=labels.star,
        marked=marked,
        tags=tags,
        program=programs.get(run.short_program, run.short_program),
        state=Cell(text=_state_text(run), tone=tone if tone is not Tone.GOOD else Tone.PLAIN),
        progress=_progress(entry, run),
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


@lru_cache(maxsize=8)
def distinct_programs(programs: frozenset[str]) -> dict[str, str]:
    """Return each program without the options that all commands of the same script share.

    ``train.py --epochs 9 --lr 1`` is ``train.py … --lr 1`` if the others have nine epochs, too.
    """
    options: dict[str, dict[str, list[str]]] = {}
    for program in programs:
        script, *rest = _OPTION.findall(program) or [program]
        options.setdefault(script.strip(), {})[program] = [word.strip() for word in rest]
    shown: dict[str, str] = {}
    for script, commands in options.items():
        shared = set.intersection(*map(set, commands.values())) if len(commands) > 1 else set()
        for program, words in commands.items():
            own = [word for word in words if word not in shared]
            shown[program] = " ".join([script, *(["…"] if shared else []), *own])
    return shown


def is_empty(entry: RunEntry, name: str) -> bool:
    """Return whether a run has nothing to show in the column of a field, metric or setting."""
    run = entry.summary
    if name == "detail":
        return run is not None and not _note_cell(entry, run).text
    if name == "progress":
        return run is None or not _progress(entry, run)
    if name == "metric":
        return run is None or not run.metric
    if name.startswith(SETTING):
        return not setting_texts(entry, name)
    return value_of(entry, name) in (None, "", ()) or not value_text(entry, name, 0.0)


def _progress(entry: RunEntry, run: RunSummary) -> str:
    live = entry.snapshot
    if live is None or run.done is None:
        total = run.max_steps if run.max_steps and run.max_steps > 0 else None
        # Of a run that has done all, the second number would be the first one again.
        total = None if run.step is None or total == run.step else total
        return "" if run.step is None else f"step {formats.step(run.step, total)}"
    remaining = "" if live.eta_s is None else f"  {formats.duration(live.eta_s)} left"
    return f"{formats.percent(run.done):>5}{remaining}"


def _note_cell(entry: RunEntry, run: RunSummary) -> Cell:
    blocked = "" if entry.snapshot is None else _blocked_ranks(entry.snapshot)
    if blocked:
        return Cell(text=blocked, tone=Tone.BAD)
    if entry.labels.note:
        return Cell(text=entry.labels.note)
    if entry.snapshot is not None:
        return Cell(text=waiting_reason(entry.snapshot), tone=Tone.DIM)
    if run.reason:
        return Cell(text=run.reason, tone=Tone.WARN)
    return Cell(text=_ENDED_AT.sub("", run.detail), tone=Tone.DIM)


def _blocked_ranks(run: RunSnapshot) -> str:
    """Return the dead or stalled ranks of a live run."""
    for state in (RankState.DEAD, RankState.STALLED):
        ranks = tuple(r.rank for r in run.ranks if r.state is state)
        if ranks and run.state is not RunState.PAUSED:
            return f"{formats.rank_words(ranks)} {rank_word(state)}"
    return ""


LAST_COLUMNS = frozenset({"program", "tag", "created", "detail"})
"""Columns that stay to the right of those that a person adds."""


class ListLayout(NamedTuple):
    """The columns of the list of runs and its order, as ``ltui runs`` names them."""

    columns: tuple[str, ...]
    order: str

    def with_column(self, name: str) -> ListLayout:
        """Return the layout with one more column, where it is seen without scrolling."""
        return self._replace(columns=with_column(self.columns, name))


DEFAULT_LAYOUT = ListLayout(DEFAULT_COLUMNS, "")


def with_column(columns: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the columns with one more, to the left of those that matter least."""
    last = len(columns)
    if name not in LAST_COLUMNS:
        last = next((n for n, column in enumerate(columns) if column in LAST_COLUMNS), last)
    return (*columns[:last], name, *columns[last:])


def layout_of(columns: object, order: object) -> ListLayout:
    """Return the layout of the settings of these names; the defaults for anything else."""
    names = columns if isinstance(columns, list) else DEFAULT_COLUMNS
    known = (ALIASES.get(name, name) for name in names if isinstance(name, str) and name)
    return ListLayout(
        tuple(dict.fromkeys(known)),
        order if isinstance(order, str) and order.removeprefix("-") else "",
    )


HEADLINE = "metric"
"""The field with the metric that represents each run. Its order is the best value first."""
_DIRECTIONS = {
    Kind.TEXT: ("A to Z", "Z to A"),
    Kind.TIME: ("oldest first", "newest first"),
    Kind.DURATION: ("shortest first", "longest first"),
    Kind.SIZE: ("smallest first", "largest first"),
    Kind.FLAG: ("without it first", "with it first"),
}


def sort_key(text: str) -> tuple[str, bool]:
    """Return the field of ``--sort`` and whether it is reversed: ``-created`` is."""
    name = text.removeprefix("-")
    if not name:
        raise ProblemError.of(
            where=f"--sort {text}",
            what="the name of a field or metric is missing.",
            remedy="Try --sort=-created, --sort=val/loss or --sort=config.lr.",
        )
    return name, text.startswith("-")


def sorted_runs(entries: Iterable[RunEntry], name: str, *, reverse: bool) -> list[RunEntry]:
    """Return the runs by a field, the lowest value first unless ``reverse`` is set.

    Runs without a value come last, and ties keep their places. Of a setting, numbers come before
    texts.
    """
    key_of: Callable[[RunEntry], Any]
    key_of = _metric_key if name == HEADLINE else partial(_value_key, name)
    keyed = [(key_of(entry), entry) for entry in entries]
    with_value = sorted((k for k in keyed if k[0] is not None), key=itemgetter(0), reverse=reverse)
    return [entry for _, entry in with_value] + [entry for key, entry in keyed if key is None]


def _value_key(name: str, entry: RunEntry) -> tuple[float, str] | None:
    value = value_of(entry, name)
    key = ", ".join(value) if isinstance(value, tuple) else value
    if key is None or key == "" or (isinstance(key, float) and math.isnan(key)):
        return None
    return (math.inf, key.lower()) if isinstance(key, str) else (key, "")


def _metric_key(entry: RunEntry) -> tuple[str, float] | None:
    """Return a key by the metric that represents a run, with the best value first."""
    run = entry.summary
    if run is None or run.metric_value is None or not math.isfinite(run.metric_value):
        return None
    return run.metric, run.metric_value if run.lower_is_better else -run.metric_value


def first_order(name: str) -> str:
    """Return the usual order by a field: texts from A, losses from the lowest, others reversed."""
    is_metric = name not in FIELDS and kind_of(name) is Kind.NUMBER
    ascending = kind_of(name) in (Kind.TEXT, Kind.SETTING) or name == HEADLINE
    if is_metric and LOWER_IS_BETTER.search(name):
        ascending = True
    return name if ascending else f"-{name}"


def next_order(order: str, columns: Sequence[str]) -> str:
    """Return the order by the column after that of ``order``, or none after the last one."""
    names = list(dict.fromkeys(("name", *columns)))
    now = order.removeprefix("-")
    place = names.index(now) + 1 if now in names else 0
    if order and place == len(names):
        return ""
    return first_order(names[place])


def reversed_order(order: str) -> str:
    """Return the opposite order; of the list's own order, the oldest run first."""
    if not order:
        return "created"
    return order[1:] if order.startswith("-") else f"-{order}"


def order_text(order: str) -> str:
    """Return an order in words, such as ``created, newest first``."""
    name, reverse = sort_key(order)
    if name == HEADLINE:
        directions = ("best first", "worst first")
    else:
        directions = _DIRECTIONS.get(kind_of(name), ("lowest first", "highest first"))
    return f"{name}, {directions[reverse]}"
