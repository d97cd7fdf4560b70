"""The metric columns of the rank table: their titles, widths and texts.

A new column is one more entry of ``RANK_METRICS``. Its value must be a field of ``RankSnapshot``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ltui.training.state.run_snapshot import RankSnapshot
from ltui.widgets import formats
from ltui.widgets.columns import Column
from ltui.widgets.view_models import Cell, RankMetric, Tone


@dataclass(frozen=True, slots=True)
class RankMetricColumn:
    """A column of the rank table that shows one metric."""

    column: Column
    text: Callable[[RankSnapshot], str]
    """Return the metric of a rank with its unit; ``n/a`` if it is unknown."""
    tone: Tone = Tone.DIM
    only_live: bool = True
    """Show ``n/a`` once the run has ended, because the metric describes a running process."""


def cpu_text(rank: RankSnapshot) -> str:
    """Return the CPU utilisation of a rank's processes: ``104 %``."""
    return formats.NA if rank.cpu_percent is None else f"{rank.cpu_percent:.0f} %"


def memory_text(rank: RankSnapshot) -> str:
    """Return the resident memory of a rank's processes: ``2.10 GiB``."""
    return formats.size(rank.rss_bytes)


RANK_METRICS = (
    RankMetricColumn(
        Column(key="rate", title="samples/s", width=11, right=True, importance=5),
        lambda rank: formats.quantity(rank.samples_per_s, ""),
        Tone.PLAIN,
    ),
    RankMetricColumn(
        Column(key="cpu", title="CPU", width=7, right=True, importance=6, optional=True), cpu_text
    ),
    RankMetricColumn(
        Column(key="memory", title="memory", width=10, right=True, importance=6, optional=True),
        memory_text,
    ),
)
"""The metric columns, in the order in which they are shown."""


def rank_metrics(rank: RankSnapshot, *, live: bool) -> tuple[RankMetric, ...]:
    """Return the metrics of a rank; ``live`` is False if the run has ended."""
    return tuple(
        RankMetric(
            column=metric.column,
            cell=Cell(
                text=metric.text(rank) if live or not metric.only_live else formats.NA,
                tone=metric.tone,
            ),
        )
        for metric in RANK_METRICS
    )
