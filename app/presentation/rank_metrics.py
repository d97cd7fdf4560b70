"""The metric columns of the rank table: their titles, widths and texts.

A new column is one more entry of ``RANK_METRICS``. Its value is a field of ``RankSnapshot`` or a
``StepField``, which the rank sends with every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import RankSnapshot
from ltui.widgets import formats
from ltui.widgets.columns import Column
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, RankMetric


class RankMetricColumn(Struct, frozen=True):
    """A column of the rank table that shows one metric."""

    column: Column
    text: Callable[[RankSnapshot, Sequence[float]], str]
    """Return the metric of a rank with its unit; ``n/a`` if it is unknown. The arguments are the
    snapshot of the rank and the values of ``StepField`` for its last batch."""
    tone: Tone = Tone.DIM


def cpu_text(rank: RankSnapshot) -> str:
    """Return the CPU utilisation of a rank's processes: ``104 %``."""
    return formats.NA if rank.cpu_percent is None else f"{rank.cpu_percent:.0f} %"


def memory_text(rank: RankSnapshot) -> str:
    """Return the resident memory of a rank's processes: ``2.10 GiB``."""
    return formats.size(rank.rss_bytes)


RANK_METRICS = (
    RankMetricColumn(
        Column(key="rate", title="samples/s", width=11, right=True, importance=5),
        lambda rank, _: formats.rate(rank.samples_per_s, ""),
        Tone.PLAIN,
    ),
    RankMetricColumn(
        Column(key="cpu", title="CPU", width=7, right=True, importance=6, optional=True),
        lambda rank, _: cpu_text(rank),
    ),
    RankMetricColumn(
        Column(key="memory", title="memory", width=10, right=True, importance=6, optional=True),
        lambda rank, _: memory_text(rank),
    ),
)
"""The metric columns, in the order in which they are shown."""


def rank_metrics(
    rank: RankSnapshot, last_step: Sequence[float] | None, *, live: bool
) -> tuple[RankMetric, ...]:
    """Return the metrics of a rank. ``last_step`` is None before its first batch.

    A metric is ``n/a`` once the run has ended, because it describes a running process.
    """
    step = last_step or (math.nan,) * len(StepField)
    return tuple(
        RankMetric(
            column=metric.column,
            cell=Cell(text=metric.text(rank, step) if live else formats.NA, tone=metric.tone),
        )
        for metric in RANK_METRICS
    )
