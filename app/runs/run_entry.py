"""One run in a list of runs: what lists show, filters compare and ``--json`` prints. Pure.

A summary is small enough to hold thousands of them. JSON is the stored snapshot in the words and
counts of the screens: epochs are counted from 1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from ltui.app.presentation.metric_names import headline_metric
from ltui.app.presentation.snapshot_text import done_fraction, position, program_text, shown_epoch
from ltui.app.state_words import detail_words, reason_text, state_sign, state_word
from ltui.training.json_codec import to_json
from ltui.training.state.good_checkpoints import is_resumable
from ltui.training.state.run_labels import NO_LABELS, RunLabels
from ltui.training.state.run_snapshot import MetricValue, RunSnapshot, head_json
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line, clean_name

_VALUES = struct.Struct("<3d")


class RunSummary(Struct, array_like=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One run. Unix times and durations are in seconds, and texts are sanitised."""

    id: str
    name: str
    program: str
    """The preset or the command."""
    short_program: str
    """The preset, or the script of a command without interpreter and folders."""
    state: str
    """The word for the state, as every list shows it."""
    sign: str
    tone: str
    """Value of the ``Tone`` of the state."""
    created_at: float | None
    started_at: float | None
    ended_at: float | None
    elapsed_s: float | None
    step: int | None
    max_steps: int | None
    epoch: int | None
    attempt: int
    ranks: int | None
    exit_code: int | None
    done: float | None
    """Completed fraction, 0 to 1."""
    position: str
    """Epoch and step as text."""
    reason: str
    """Why a run needs help, or how it ended; and that its history is incomplete."""
    detail: str
    samples_per_s: float | None
    metric: str
    """Name of the metric that represents the run; empty if none was logged."""
    metric_value: float | None
    lower_is_better: bool
    resumable: bool


def summarise(run: RunSnapshot) -> RunSummary:
    """Return the summary of a snapshot."""
    shown = headline_metric(run)
    sign, _, tone = state_sign(run)
    incomplete = "history incomplete" if run.history_note else ""
    return RunSummary(
        id=run.id,
        name=clean_name(run.name),
        program=clean_name(program_text(run), 300),
        short_program=clean_name(_short_program(run)),
        state=state_word(run),
        sign=sign,
        tone=tone.value,
        created_at=run.created_at if run.created_at is not None else run.started_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
        elapsed_s=run.elapsed_s,
        step=run.global_step,
        max_steps=run.max_steps,
        epoch=shown_epoch(run),
        attempt=run.attempt,
        ranks=run.world_size,
        exit_code=run.exit_code,
        done=done_fraction(run),
        position=position(run),
        reason="; ".join(part for part in (reason_text(run), incomplete) if part),
        detail=clean_line(detail_words(run) or "", 300),
        samples_per_s=run.throughput.samples_per_s,
        metric=clean_name(shown.name) if shown is not None else "",
        metric_value=shown.value if shown is not None else None,
        lower_is_better=shown is not None and shown.lower_is_better,
        resumable=is_resumable(run),
    )


def _short_program(run: RunSnapshot) -> str:
    """Return the preset, or the script of a command without the interpreter and the folders
    before it."""
    if run.preset or not run.command:
        return program_text(run)
    scripts = [n for n, word in enumerate(run.command) if word.endswith((".py", ".sh"))]
    program, *rest = run.command[scripts[0] if scripts else 0 :]
    return " ".join([program.rpartition("/")[2], *rest])


class MetricValues:
    """The last, lowest and highest value of each metric of a run, packed.

    Most runs log the same names, which are stored once.
    """

    __slots__ = ("names", "packed", "places")

    def __init__(self, names: tuple[str, ...], packed: bytes) -> None:
        """``packed``: three doubles for each name; NaN for a missing value. Raises ``ValueError``
        if the lengths do not fit."""
        if len(packed) != len(names) * _VALUES.size:
            raise ValueError(f"{len(packed)} bytes for {len(names)} metrics")
        self.names, self.packed = names, packed
        self.places = _places(names)

    @classmethod
    def of(cls, metrics: Mapping[str, MetricValue]) -> MetricValues:
        """Return the values of the metrics of a snapshot."""
        names = tuple(sorted(metrics))
        values = (metrics[name] for name in names)
        packed = b"".join(
            _VALUES.pack(value.last, _or_nan(value.best_min), _or_nan(value.best_max))
            for value in values
        )
        return cls(names, packed)

    def value(self, name: str) -> float | None:
        """Return the last value of ``name``, or the extreme of ``name.min`` and ``name.max``.

        None if the metric was not logged. The last value may be NaN.
        """
        place, column = self.places.get(name), 0
        if place is None and name.endswith((".min", ".max")):
            place, column = self.places.get(name[:-4]), 1 if name.endswith(".min") else 2
        if place is None:
            return None
        value: float = _VALUES.unpack_from(self.packed, place * _VALUES.size)[column]
        return None if column and math.isnan(value) else value


@lru_cache(maxsize=512)
def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


NO_METRICS = MetricValues((), b"")


MAX_NAME = 80
"""Maximum characters of a name."""
DAMAGED = "damaged"
"""State of a run whose files cannot be read."""


class RunEntry(Struct, frozen=True, kw_only=True):
    """A run and what is known of it."""

    run_dir: RunDir
    summary: RunSummary | None = None
    labels: RunLabels = NO_LABELS
    metrics: MetricValues = NO_METRICS
    snapshot: RunSnapshot | None = None
    """The snapshot of a run that has not ended; None of all others."""
    problem: str | None = None
    """The reason why there is no summary."""
    size_bytes: float | None = None
    """Disk use; None unless it was measured."""
    goodput: float | None = None
    """Fraction of its time in training steps that count; None unless it was read."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings by name; empty unless they were read."""

    @property
    def id(self) -> str:
        return self.run_dir.id

    @property
    def live(self) -> bool:
        return self.snapshot is not None

    @property
    def name(self) -> str:
        named = self.id if self.summary is None else self.summary.name
        return clean_name(self.labels.name or named, MAX_NAME)

    @property
    def state(self) -> str:
        return DAMAGED if self.summary is None else self.summary.state


def head_document(run: RunSnapshot) -> dict[str, Any]:
    """Return the run's part of ``ltui runs --json``."""
    return {**head_json(run), **_words(run)}


def run_document(run: RunSnapshot) -> dict[str, Any]:
    """Return everything that a snapshot holds."""
    document = {**to_json(run), **_words(run)}
    for part in (*document["ranks"], *document["checkpoints"], *document["script_checkpoints"]):
        if part.get("epoch") is not None:
            part["epoch"] += 1
    return document


def _words(run: RunSnapshot) -> dict[str, Any]:
    """Return the epoch as the screens count it, and the words for the state."""
    return {
        "epoch": shown_epoch(run),
        "state_word": state_word(run),
        "detail": detail_words(run),
    }
