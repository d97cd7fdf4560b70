"""The data of one tick of a run screen: built by the poller thread, drawn once, then dropped.

Part of it are the events of the run, which the store has, as marks for its charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ltui.training.config.run_spec import BLOCKING_LEVELS

if TYPE_CHECKING:
    from ltui.app.live.gpu_history import GpuSeries
    from ltui.app.live.run_time import RunTime
    from ltui.training.config.run_spec import RunSpec
    from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot, Verdict
    from ltui.training.store.code_record import CodeRecord
    from ltui.training.store.curve_reader import Curve
    from ltui.training.store.frozen_code import FrozenCode
    from ltui.training.store.history_reader import RunStore, StoredEvent
    from ltui.widgets.view_models import LogLine


NOT_RECORDED = "not recorded"
"""Shown in place of everything that is not known about a past moment."""


class MarkKind(Enum):
    """What a mark stands for."""

    ATTEMPT = "attempt"
    CHANGE = "change"
    STALL = "stall"
    PAUSE = "pause"
    CHECKPOINT = "checkpoint"


class RunMark(Struct, frozen=True):
    """One event of a run, at a step, a time, or both."""

    kind: MarkKind
    text: str
    step: float | None
    at: float | None
    """Unix seconds."""


def stored_marks(store: RunStore) -> list[RunMark]:
    """Return the attempts after the first, changes of the configuration, and stalls."""
    marks = []
    for attempt in store.attempts():
        if attempt.number == 1:
            continue
        step, at = attempt.resumed_step, attempt.started_at
        origin = "from the start" if not step else f"from step {step}"
        marks.append(RunMark(MarkKind.ATTEMPT, f"attempt {attempt.number} {origin}", step or 0, at))
        if attempt.changes:
            changed = f"changed {', '.join(attempt.changes)}"
            marks.append(RunMark(MarkKind.CHANGE, changed, step or 0, at))
    for verdict in store.verdicts():
        if verdict.level in BLOCKING_LEVELS and verdict.began is not None:
            lasted = "" if verdict.ended is None else f" for {verdict.ended - verdict.began:.0f} s"
            text = f"{verdict.level}{lasted}: {verdict.cause}"
            marks.append(RunMark(MarkKind.STALL, text, None, verdict.began))
    return marks


def pause_mark(event: StoredEvent) -> RunMark:
    """Return the mark of an event ``paused``."""
    step = event.data.get("global_step")
    known = float(step) if isinstance(step, int) else None
    return RunMark(MarkKind.PAUSE, event.text.rstrip(".").lower(), known, event.t)


def checkpoint_marks(checkpoints: Sequence[CheckpointInfo]) -> list[RunMark]:
    """Return one mark for each checkpoint that exists."""
    return [
        RunMark(
            MarkKind.CHECKPOINT,
            f"checkpoint of step {info.global_step}{f', {info.reason}' if info.reason else ''}",
            float(info.global_step),
            info.saved_at,
        )
        for info in checkpoints
    ]


class ResolvedVerdict(Struct, frozen=True, kw_only=True):
    """A verdict that ended while the screen was open."""

    verdict: Verdict
    lasted_s: float
    at: float
    """Time of the end in unix seconds."""


class RankException(Struct, frozen=True):
    """The first exception of one rank in the last attempt."""

    rank: int
    type: str
    message: str


class ShownMoment(Struct, frozen=True, kw_only=True):
    """The moment of the past that a frame shows."""

    at: float
    """Unix seconds."""
    newest: float
    """Unix seconds of the present, or of the end of the run."""
    has_ended: bool
    """Whether the run has ended meanwhile."""
    gap: str | None = None
    """A sentence if nothing was recorded at this moment, so that it is not known."""
    about: str = ""
    """What happened at this moment, if it was chosen for that."""
    speed: int = 0
    """How many times as fast as it was the run plays; 0 if it does not."""
    series: int = 0
    """Changes if the log is not that of the frame before with more lines."""


class Frame(Struct, frozen=True, kw_only=True, eq=False):
    """Everything that a run screen shows at one time."""

    snapshot: RunSnapshot
    now: float
    """Time of the frame in unix seconds."""
    supervisor_answers: bool
    snapshot_at: float
    """Unix seconds when the supervisor or the store last gave a snapshot."""
    last_record_at: float | None = None
    """Unix seconds when the newest record of any rank was written, or None if none was read."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The curves that the screen requested."""
    curve_names: tuple[str, ...] = ()
    """Every curve that the screen can request."""
    marks: tuple[RunMark, ...] = ()
    """What happened to the run: attempts, changes, checkpoints, stalls."""
    attempt_ranks: tuple[tuple[int, int], ...] = ()
    """First step and number of ranks of each attempt whose steps count, the earliest first."""
    rates: Mapping[int | None, Curve] = field(default_factory=dict)
    """Samples per second of each rank; the key None is the total of all ranks."""
    gpu_series: Mapping[int, GpuSeries] = field(default_factory=dict)
    """Readings of the last minutes of each GPU, by the GPU's number."""
    resolved_verdicts: tuple[ResolvedVerdict, ...] = ()
    """Verdicts that ended while the screen was open, the latest last."""
    rank_exceptions: tuple[RankException, ...] = ()
    """The first exception of each rank in the last attempt, the earliest first."""
    last_steps: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Values of ``StepField`` for the last batch of each rank."""
    spec: RunSpec | None = None
    """The specification of the run, or None if it cannot be read."""
    code: tuple[CodeRecord, ...] = ()
    """What code each attempt was started with, first to last."""
    frozen: FrozenCode | None = None
    """The copy of the code with which the run trains; None if its code is not frozen."""
    code_changes: tuple[str, ...] = ()
    """The files that now differ from the frozen code."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters of the user's module, as rank 0 sent them when training began."""
    events: tuple[tuple[float, str], ...] = ()
    """Events of the run, oldest first: unix seconds and the stored sentence."""
    curves_version: int = 0
    """Changes when a curve or a rate changes. Charts are redrawn only then."""
    log: tuple[LogLine, ...] = ()
    """The last log lines of all ranks and of the engine, in order of arrival."""
    log_count: int = 0
    """Number of lines that arrived in this attempt so far."""
    time: RunTime | None = None
    """Where the time of the run went; None if it is not known yet."""
    error: str | None = None
    """A sentence about what could not be read, or None."""
    error_since: float | None = None
    """Unix seconds since when ``error`` has been set without interruption."""
    moment: ShownMoment | None = None
    """The moment of the past that is shown; None for the present."""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing was recorded at the moment that is shown."""
        return self.moment is not None and self.moment.gap is not None
