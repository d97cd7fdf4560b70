"""One run in a list of runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ltui.app.runs.run_summary import NO_METRICS, MetricValues, RunSummary
from ltui.training.state.run_labels import NO_LABELS, RunLabels
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_name

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
