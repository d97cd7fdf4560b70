"""Rules for automatic restarts, and the restart history that a new supervisor reads.

A run is restarted after a crash (``restarts`` of its specification) or on request of the stall
policy. Both kinds count in one history, which is stored in ``restarts.json`` and reset when a
person starts or resumes the run.
"""

from __future__ import annotations

import os
import time

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import from_json, to_json
from ltui.training.process.identity import boot_id
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir, read_json, write_json

FIRST_DELAY_S = 4.0
"""Seconds to wait before the first restart. The delay doubles with every restart."""
LONGEST_DELAY_S = 300.0
"""Maximum number of seconds to wait before a restart."""
BEFORE_TRAINING = -1
"""Step of a failure that happened before any rank reported a step."""


class RequestedRestart(Struct, frozen=True, kw_only=True):
    """A restart that was requested while the attempt is still running."""

    attempt: int
    reason: str
    of: int


class ScheduledRestart(Struct, frozen=True, kw_only=True):
    """A scheduled restart. ``state`` and ``detail`` describe how ``attempt`` ended."""

    attempt: int
    number: int
    of: int
    until_s: float
    """Monotonic time of the restart, so that changes of the wall clock have no effect."""
    boot: str | None
    state: str
    detail: str

    def remaining_s(self) -> float:
        """Return the seconds until the restart: 0 after a reboot, which resets monotonic time."""
        return max(0.0, self.until_s - time.monotonic()) if self.boot == boot_id() else 0.0

    def end_state(self) -> RunState:
        return RunState(self.state)

    def describe(self, obstacle: str | None = None) -> str:
        """Return a description such as ``restart 2 of 3 in 8 s, after: rank 1 was killed``.

        ``obstacle`` says why the restart has to wait for longer.
        """
        when = f"in {self.remaining_s():.0f} s" if obstacle is None else f"waits: {obstacle}"
        return f"restart {self.number} of {self.of} {when}, after: {self.detail}"


class RestartHistory(Struct, frozen=True, kw_only=True):
    """The restarts since a person last started or resumed the run."""

    done: int = 0
    failed_at: tuple[int, ...] = ()
    wanted: RequestedRestart | None = None
    waiting: ScheduledRestart | None = None

    def refusal(self, of: int, step: int | None) -> str | None:
        """Return why a failure at ``step`` must not be followed by a restart, or None."""
        if self.done >= of:
            return f"{self.done} of {of} restarts are used up"
        if step is not None and step in self.failed_at:
            where = "before its first step" if step == BEFORE_TRAINING else f"at step {step}"
            return f"it has failed {where} twice"
        return None

    def with_scheduled(
        self, *, attempt: int, of: int, step: int | None, state: RunState, detail: str
    ) -> RestartHistory:
        """Return the history with a scheduled restart. The delay doubles with every restart."""
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
        """Return the history after the scheduled restart has started."""
        return replace(self, done=self.done + 1, wanted=None, waiting=None)


def first_delay_s() -> float:
    """Return ``LTUI_RESTART_DELAY_S``, or ``FIRST_DELAY_S`` if it is not set or not a number."""
    try:
        return max(0.0, float(os.environ.get("LTUI_RESTART_DELAY_S", FIRST_DELAY_S)))
    except ValueError:
        return FIRST_DELAY_S


def read_restart_history(run_dir: RunDir) -> RestartHistory:
    """Return the stored restart history, or an empty one if it is missing or unreadable."""
    try:
        return from_json(RestartHistory, read_json(run_dir.restarts_path) or {})
    except ValueError:
        return RestartHistory()


def write_restart_history(run_dir: RunDir, history: RestartHistory) -> None:
    """Store the restart history. Raises ``OSError`` if it cannot be written."""
    write_json(run_dir.restarts_path, to_json(history))
