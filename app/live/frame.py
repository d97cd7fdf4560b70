"""One frozen picture of what the feed knows: posted at each tick, drawn, forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ltui.app.live.gpu_history import GpuSeries
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.widgets.view_models import LogLine

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurveData:
    """One metric over a run. All arrays have the same length; steps ascend; NaN is a gap."""

    steps: FloatArray
    epochs: FloatArray
    times: FloatArray
    """Unix seconds."""
    mean: FloatArray
    low: FloatArray
    """Smallest value of the steps that a point stands for."""
    high: FloatArray
    count: FloatArray
    """How many logged values a point stands for."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedVerdict:
    """A verdict that ended while the screen was open."""

    verdict: Verdict
    lasted_s: float
    at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankException:
    """How a run ended, beyond its snapshot: the first exception of each rank."""

    rank: int
    type: str
    message: str
    traceback: str | None
    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """Everything that a run screen shows, at one moment."""

    snapshot: RunSnapshot
    now: float
    """Unix seconds at which the frame was made."""
    supervisor_answers: bool
    snapshot_at: float
    """When the supervisor or the store last gave a snapshot."""
    last_record_at: float | None = None
    """When a rank's newest record was written; None where none was read."""
    curves: Mapping[str, CurveData] = field(default_factory=dict)
    """Those that the screen asked for."""
    curve_names: tuple[str, ...] = ()
    """Every curve that the screen can ask for."""
    rates: Mapping[int | None, CurveData] = field(default_factory=dict)
    """Samples per second; ``None`` is all ranks together."""
    gpu_series: Mapping[int, GpuSeries] = field(default_factory=dict)
    """The last minutes of each GPU, by its index."""
    resolved_verdicts: tuple[ResolvedVerdict, ...] = ()
    rank_exceptions: tuple[RankException, ...] = ()
    spec: RunSpec | None = None
    """How the run was launched; None if that can't be read."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Of the user's module, as rank 0 sent them when training began."""
    events: tuple[tuple[float, str], ...] = ()
    """What happened in the run, oldest first: unix seconds and a sentence, as it was written."""
    curves_version: int = 0
    """Changes when a curve or a rate did, so that charts are left alone otherwise."""
    log: tuple[LogLine, ...] = ()
    """The last lines of all ranks and of the engine, as they were seen to come."""
    log_count: int = 0
    """Lines that ever came in this attempt."""
    error: str | None = None
    """What the feed could not do, in a sentence."""
    error_since: float | None = None
