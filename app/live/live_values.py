"""The values that ranks sent after the supervisor took its last snapshot. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import (
    LIVE,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
)
from ltui.training.state.snapshot_from_fold import metrics as folded_metrics
from ltui.training.state.snapshot_from_fold import progress as folded_progress
from ltui.training.state.throughput import current_window, without_current_rates
from ltui.training.state.throughput import throughput as folded_throughput
from ltui.training.tensor_queue.record_types import Phase, PulseState


@dataclass(frozen=True, slots=True)
class LiveValues:
    """The state of the ranks' queues at one time."""

    fold: FoldState
    """The reduction of all records that were read in this attempt."""
    pulses: Mapping[int, PulseState | None]
    """Rank to its pulse; None if the pulse could not be read."""
    now: float
    """Unix seconds."""
    now_ns: int
    """CLOCK_MONOTONIC in nanoseconds."""
    supervisor_answers: bool
    """If the supervisor does not answer, its figures are replaced by those of the records."""

    def applied_to(self, base: RunSnapshot) -> RunSnapshot:
        """Return ``base`` with the values that the ranks sent since it was taken."""
        if base.state not in LIVE or not self.pulses:
            return base
        progress = folded_progress(self.fold, self.pulses, self.now_ns)
        changes: dict[str, Any] = {"ranks": self._ranks(base)}
        if base.state is not RunState.STARTING:
            # Before training ranks count from 0, even if the attempt starts from a checkpoint.
            changes |= {
                "epoch": _first_known(progress.epoch, base.epoch),
                "global_step": _first_known(progress.global_step, base.global_step),
                "max_steps": _first_known(progress.max_steps, base.max_steps),
                "max_epochs": _first_known(progress.max_epochs, base.max_epochs),
            }
        if base.started_at is not None:
            changes["elapsed_s"] = max(0.0, self.now - base.started_at)
        changes["throughput"] = self._throughput(base)
        if not self.supervisor_answers:
            changes["eta_s"] = progress.eta_s
            changes["metrics"] = {**base.metrics, **folded_metrics(self.fold)}
        return replace(base, **changes)

    def _throughput(self, base: RunSnapshot) -> Throughput:
        """Return the throughput of the chart's newest point.

        The figure of the supervisor is up to a second older.
        """
        if base.state in (RunState.PAUSED, RunState.QUEUED):
            return without_current_rates(base.throughput)
        if self.supervisor_answers and base.throughput.samples_per_s is None:
            return base.throughput
        measured = folded_throughput(self.fold, self.now_ns)
        if self.supervisor_answers and measured.samples_per_s is None:
            return base.throughput
        # Both measure the best at other moments, and one run has one best throughput.
        best = base.throughput.best_samples_per_s
        if best is None or not self.supervisor_answers:
            best = max(filter(None, (best, measured.best_samples_per_s)), default=None)
        return replace(measured, best_samples_per_s=best)

    def _ranks(self, base: RunSnapshot) -> tuple[RankSnapshot, ...]:
        by_rank = {r.rank: r for r in base.ranks}
        for rank, pulse in self.pulses.items():
            row = by_rank.get(rank) or RankSnapshot(rank=rank, state=RankState.STARTING)
            by_rank[rank] = self._rank(row, pulse)
        return tuple(by_rank[rank] for rank in sorted(by_rank))

    def _rank(self, row: RankSnapshot, pulse: PulseState | None) -> RankSnapshot:
        folded = self.fold.ranks.get(row.rank)
        if folded is not None and folded.recent_step_s:
            row = replace(row, recent_step_s=folded.recent_step_s)
        if folded is not None and (row.samples_per_s is not None or not self.supervisor_answers):
            present = current_window(folded, self.now_ns)
            row = replace(row, samples_per_s=present.samples_per_s if present else None)
        if pulse is None or pulse.phase is Phase.UNKNOWN or row.state is RankState.DEAD:
            return row
        return replace(
            row,
            pid=pulse.pid,
            node=pulse.node,
            phase=pulse.phase.label,
            epoch=pulse.known_epoch,
            batch=pulse.batch,
            global_step=pulse.global_step,
            age_s=max(0.0, (self.now_ns - pulse.changed_ns) / 1e9),
        )


def _first_known(first: int | None, second: int | None) -> int | None:
    return second if first is None else first
