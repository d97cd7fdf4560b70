"""What a person asked of the run and is still to happen, kept where another supervisor finds it.

``pending.json`` holds the conditions to stop, and the stop that is under way: a supervisor that
takes over goes on with both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.process.identity import boot_id
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.state.stop_conditions import (
    StopCondition,
    add_condition,
    from_document,
    met_reason,
)
from ltui.training.store.run_directory import RunDir, write_atomically


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStops:
    """The standing orders of one run."""

    conditions: tuple[StopCondition, ...] = ()
    attempt: int = 0
    """Of the stop that is under way."""
    escalation: StopEscalation | None = None

    def descriptions(self) -> tuple[str, ...]:
        return tuple(condition.describe() for condition in self.conditions)

    def with_conditions(self, conditions: Sequence[StopCondition]) -> PendingStops:
        return replace(self, conditions=tuple(conditions))

    def stop_step(self) -> int | None:
        """For the ranks: the first step at which they stop."""
        return min((c.step for c in self.conditions if c.step is not None), default=None)

    def stop_epochs(self) -> int | None:
        """For the ranks: completed epochs at which they stop."""
        return min((c.epochs for c in self.conditions if c.epochs is not None), default=None)


def read_pending_stops(run_dir: RunDir) -> PendingStops:
    """None standing where nothing can be read."""
    try:
        document = json.loads(run_dir.requests_path.read_text(encoding="utf-8"))
        same_boot = document.get("boot") == boot_id()
        conditions = [from_document(c) for c in document["conditions"]]
        escalation = document.get("ladder")
        return PendingStops(
            # Seconds of the steady clock mean nothing after a reboot.
            conditions=tuple(c for c in conditions if same_boot or c.until_s is None),
            attempt=int(document.get("attempt", 0)),
            escalation=StopEscalation(**escalation) if escalation and same_boot else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return PendingStops()


def write_pending_stops(run_dir: RunDir, pending: PendingStops) -> None:
    """Raises ``OSError`` where the disk does not take it."""
    escalation = pending.escalation
    document: dict[str, Any] = {
        "boot": boot_id(),
        "conditions": [condition.to_document() for condition in pending.conditions],
        "attempt": pending.attempt,
        "ladder": None
        if escalation is None
        else {
            "began_s": escalation.began_s,
            "timeout_s": escalation.timeout_s,
            "telemetry": escalation.telemetry,
            "kill_at_once": escalation.kill_at_once,
        },
    }
    write_atomically(run_dir.requests_path, json.dumps(document).encode())


def delete_pending_stops(run_dir: RunDir) -> None:
    run_dir.requests_path.unlink(missing_ok=True)


class PendingStopStore:
    """The orders of a run in its supervisor's hands: each change is on disk before it counts."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self.pending = read_pending_stops(run_dir)

    def recovered_escalation(self) -> StopEscalation | None:
        """Of a stop that the supervisor before this one had begun."""
        return self.pending.escalation if self.pending.attempt == self._attempt else None

    def add(self, conditions: Sequence[StopCondition]) -> None:
        standing = self.pending.conditions
        for condition in conditions:
            standing = add_condition(standing, condition)
        self._write(self.pending.with_conditions(standing))

    def clear(self) -> None:
        self._write(self.pending.with_conditions(()))

    def record_escalation(self, escalation: StopEscalation | None) -> None:
        """Remember the stop that is under way, if any."""
        if escalation != self.pending.escalation:
            self._write(replace(self.pending, escalation=escalation, attempt=self._attempt))

    def pop_due(
        self, metrics: Callable[[], Mapping[str, MetricValue]], now_s: float, steady_s: float
    ) -> str | None:
        """What has come true; that condition then no longer stands."""
        if not self.pending.conditions:
            return None
        found = metrics() if any(c.metric for c in self.pending.conditions) else {}
        for condition in self.pending.conditions:
            text = met_reason(condition, found, now_s, steady_s)
            if text is not None:
                rest = [c for c in self.pending.conditions if c is not condition]
                self._write(self.pending.with_conditions(rest))
                return text
        return None

    def discard_unreachable(self, global_step: int, epochs: int) -> None:
        """Those that the ranks could not keep: the disk refused the checkpoint there."""
        rest = [
            c
            for c in self.pending.conditions
            if not (c.step is not None and c.step <= global_step)
            and not (c.epochs is not None and c.epochs <= epochs)
        ]
        if len(rest) != len(self.pending.conditions):
            self._write(self.pending.with_conditions(rest))

    def _write(self, pending: PendingStops) -> None:
        # On a full disk they stand as long as this process does.
        self.pending = pending
        with contextlib.suppress(OSError):
            write_pending_stops(self._run_dir, pending)
