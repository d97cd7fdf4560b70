"""Store the pending stop requests of a run, so that the next supervisor carries them out.

``orders.json`` holds the stop conditions, and the stop that is in progress. A supervisor that
recovers the run continues with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import WRONG_CONTENT, to_json
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.process.identity import boot_id
from ltui.training.state.stop_conditions import (
    StopCondition,
    add_condition,
    from_document,
    metric_reason,
    time_reason,
)
from ltui.training.store.run_directory import RunDir, read_json, write_json

if TYPE_CHECKING:
    from ltui.training.state.record_fold import FoldState
    from ltui.training.tensor_queue.queue_reader import Poll


class PendingStops(Struct, frozen=True, kw_only=True):
    """The stop conditions of one run, and the stop that is in progress."""

    conditions: tuple[StopCondition, ...] = ()
    attempt: int = 0
    """The attempt that ``escalation`` belongs to."""
    escalation: StopEscalation | None = None

    def descriptions(self) -> tuple[str, ...]:
        return tuple(condition.describe() for condition in self.conditions)

    def stop_step(self) -> int | None:
        """Return the first step at which the ranks have to stop, or None."""
        return min((c.step for c in self.conditions if c.step is not None), default=None)

    def stop_epochs(self) -> int | None:
        """Return the number of completed epochs after which the ranks have to stop, or None."""
        return min((c.epochs for c in self.conditions if c.epochs is not None), default=None)


def read_pending_stops(run_dir: RunDir) -> PendingStops:
    """Return the stored stop requests, or none if the file is missing or unreadable."""
    try:
        document = read_json(run_dir.requests_path) or {}
        same_boot = document.get("boot") == boot_id()
        conditions = [from_document(c) for c in document["conditions"]]
        escalation = document.get("ladder")
        return PendingStops(
            # Monotonic time is not comparable across a reboot.
            conditions=tuple(c for c in conditions if same_boot or c.until_s is None),
            attempt=int(document.get("attempt", 0)),
            escalation=StopEscalation(**escalation) if escalation and same_boot else None,
        )
    except WRONG_CONTENT:
        return PendingStops()


def write_pending_stops(run_dir: RunDir, pending: PendingStops) -> None:
    """Store the stop requests. Raises ``OSError`` if they cannot be written."""
    escalation = pending.escalation
    document = {
        "boot": boot_id(),
        "conditions": [condition.to_document() for condition in pending.conditions],
        "attempt": pending.attempt,
        "ladder": None if escalation is None else to_json(escalation),
    }
    write_json(run_dir.requests_path, document)


class PendingStopStore:
    """The pending stops of the run that this process supervises. Changes are written to disk."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self.pending = read_pending_stops(run_dir)
        self._met: dict[StopCondition, str] = {}
        """Conditions on metrics that a value has met -> the reason."""

    def recovered_escalation(self) -> StopEscalation | None:
        """Return the stop that a previous supervisor of this attempt began, or None."""
        return self.pending.escalation if self.pending.attempt == self._attempt else None

    def continue_from(self, step: int | None) -> None:
        """Let the values after ``step`` count, at which a restart continues; None: all values."""
        passed = [c for c in self.pending.conditions if (c.after_step or 0) > (step or 0)]
        if passed:
            self._write_conditions(
                replace(c, after_step=step) if c in passed else c for c in self.pending.conditions
            )

    def add(self, conditions: Sequence[StopCondition]) -> None:
        merged = self.pending.conditions
        for condition in conditions:
            merged = add_condition(merged, condition)
        self._write_conditions(merged)

    def clear(self) -> None:
        self._write_conditions(())

    def record_escalation(self, escalation: StopEscalation | None) -> None:
        """Store the stop that is in progress, or None."""
        if escalation != self.pending.escalation:
            self._write(replace(self.pending, escalation=escalation, attempt=self._attempt))

    def check_metrics(self, fold: FoldState, polls: Mapping[int, Poll]) -> None:
        """Check the conditions on metrics against every value in the polls that were folded last.

        A value that meets a condition counts even if a later value of the same poll does not.
        """
        # Imported here because it loads numpy, and a run starts without it.
        from ltui.training.state.snapshot_from_fold import logged_values

        for condition in self.pending.conditions:
            if condition.kind == "metric" and condition not in self._met:
                values = logged_values(fold, polls, condition.metric or "")
                if (reason := metric_reason(condition, values)) is not None:
                    self._met[condition] = reason

    def pop_due(self, now_s: float, steady_s: float) -> str | None:
        """Remove the first condition that is met. Return why it is met, or None.

        ``now_s`` is wall clock time, ``steady_s`` monotonic time.
        """
        for condition in self.pending.conditions:
            if condition.kind == "metric":
                reason = self._met.pop(condition, None)
            else:
                reason = time_reason(condition, now_s, steady_s)
            if reason is not None:
                self._write_conditions(c for c in self.pending.conditions if c is not condition)
                return reason
        return None

    def discard_unreachable(self, global_step: int, epochs: int) -> None:
        """Remove conditions at or before this position.

        The ranks passed it without stopping, because the checkpoint could not be written there.
        """
        reachable = [
            c
            for c in self.pending.conditions
            if not (c.step is not None and c.step <= global_step)
            and not (c.epochs is not None and c.epochs <= epochs)
        ]
        if len(reachable) != len(self.pending.conditions):
            self._write_conditions(reachable)

    def _write_conditions(self, conditions: Iterable[StopCondition]) -> None:
        self._write(replace(self.pending, conditions=tuple(conditions)))

    def _write(self, pending: PendingStops) -> None:
        # If the disk is full, the change lasts only as long as this process.
        self.pending = pending
        with contextlib.suppress(OSError):
            write_pending_stops(self._run_dir, pending)
