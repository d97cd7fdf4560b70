"""Restarts without a person: whether there is another, when, and what survives a new supervisor.

A run is restarted after a crash (``restarts`` of its specification) or because the stall policy
asked for it. Both draw on one ledger, kept in ``restarts.json``, which begins anew whenever a
person starts or resumes the run.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from ltui.training.process.identity import boot_id
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir, write_atomically

FIRST_DELAY_S = 4.0
LONGEST_DELAY_S = 300.0
BEFORE_TRAINING = -1
"""Stands for a step where a rank of a preset failed before it could say one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedRestart:
    """A restart that was asked for while the attempt still runs."""

    attempt: int
    reason: str
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRestart:
    """A restart that is to come. ``attempt`` has ended; how, ``state`` and ``detail`` say."""

    attempt: int
    number: int
    of: int
    until_s: float
    """On the machine's steady clock, so that a clock that is set changes nothing."""
    boot: str | None
    state: str
    detail: str

    def remaining_s(self) -> float:
        """Seconds until the restart; none after a reboot, which sets the steady clock back."""
        return max(0.0, self.until_s - time.monotonic()) if self.boot == boot_id() else 0.0

    def end_state(self) -> RunState:
        return RunState(self.state)

    def describe(self) -> str:
        """``restart 2 of 3 in 8 s, after: rank 1 was killed ...``"""
        when = f"in {self.remaining_s():.0f} s"
        return f"restart {self.number} of {self.of} {when}, after: {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartHistory:
    """What was tried since a person last started the run."""

    done: int = 0
    failed_at: tuple[int, ...] = ()
    wanted: RequestedRestart | None = None
    waiting: ScheduledRestart | None = None

    def refusal(self, of: int, step: int | None) -> str | None:
        """Why a failure at ``step`` is not followed by a restart; None where it is."""
        if self.done >= of:
            return f"{self.done} of {of} restarts are used up"
        if step is not None and step in self.failed_at:
            where = "before its first step" if step == BEFORE_TRAINING else f"at step {step}"
            return f"it has failed {where} twice"
        return None

    def with_scheduled(
        self, *, attempt: int, of: int, step: int | None, state: RunState, detail: str
    ) -> RestartHistory:
        """The ledger with a restart to come, later each time."""
        waiting = ScheduledRestart(
            attempt=attempt,
            number=self.done + 1,
            of=of,
            until_s=time.monotonic() + min(LONGEST_DELAY_S, first_delay_s() * 2**self.done),
            boot=boot_id(),
            state=state.value,
            detail=detail,
        )
        failed_at = self.failed_at if step is None else (*self.failed_at, step)
        return replace(self, failed_at=failed_at, wanted=None, waiting=waiting)

    def with_started(self) -> RestartHistory:
        """The restart that was waited for is under way."""
        return replace(self, done=self.done + 1, wanted=None, waiting=None)


def first_delay_s() -> float:
    """``LTUI_RESTART_DELAY_S`` or four seconds."""
    try:
        return max(0.0, float(os.environ.get("LTUI_RESTART_DELAY_S", FIRST_DELAY_S)))
    except ValueError:
        return FIRST_DELAY_S


def read_restart_history(run_dir: RunDir) -> RestartHistory:
    """An empty one where there is none, or none that can be read."""
    try:
        document = json.loads(run_dir.restarts_path.read_text(encoding="utf-8"))
        return RestartHistory(
            done=int(document["done"]),
            failed_at=tuple(int(step) for step in document["failed_at"]),
            wanted=RequestedRestart(**document["wanted"]) if document["wanted"] else None,
            waiting=ScheduledRestart(**document["waiting"]) if document["waiting"] else None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return RestartHistory()


def write_restart_history(run_dir: RunDir, history: RestartHistory) -> None:
    """Raises ``OSError`` where the disk does not take it."""
    document: dict[str, Any] = asdict(history)
    write_atomically(run_dir.restarts_path, json.dumps(document).encode())


def delete_restart_history(run_dir: RunDir) -> None:
    run_dir.restarts_path.unlink(missing_ok=True)
