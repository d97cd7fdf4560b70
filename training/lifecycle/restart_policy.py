"""Automatic restarts: whether another attempt follows the current one, and from which checkpoint.

A run is restarted after a crash (``restarts`` of its specification) or on request of the stall
policy. Both kinds count in one history, which is stored in ``restarts.json``, read by a new
supervisor, and reset when a person starts or resumes the run. No processes and no sockets.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import from_json, to_json
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.process.identity import boot_id
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_checkpoints import choose_checkpoint
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
    state: RunState
    detail: str

    def remaining_s(self) -> float:
        """Return the seconds until the restart: 0 after a reboot, which resets monotonic time."""
        return max(0.0, self.until_s - time.monotonic()) if self.boot == boot_id() else 0.0

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
            state=state,
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


_NOT_WRITTEN = "the restart could not be written to disk"


class RestartPolicy:
    """The restarts of one attempt. Steps are global steps; None if no rank has reported one."""

    def __init__(self, run_dir: RunDir, spec: RunSpec, attempt: int) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._attempt = attempt
        self._history = read_restart_history(run_dir)

    @property
    def scheduled(self) -> ScheduledRestart | None:
        """The scheduled restart, if the attempt has ended and another one follows."""
        waiting = self._history.waiting
        return waiting if waiting is not None and waiting.attempt == self._attempt else None

    @property
    def requested(self) -> RequestedRestart | None:
        """The requested restart, for which the current attempt is being ended."""
        wanted = self._history.wanted
        return wanted if wanted is not None and wanted.attempt == self._attempt else None

    def request(self, reason: str, *, of: int, step: int | None) -> str | None:
        """Store the request for a restart. Return why there is no restart, or None.

        ``of`` is the maximum number of restarts since a person last started the run.
        """
        why = self._history.refusal(of, self._failed_at(step))
        if why is not None:
            return why
        request = RequestedRestart(attempt=self._attempt, reason=reason, of=of)
        return None if self._write(replace(self._history, wanted=request)) else _NOT_WRITTEN

    def cancel_request(self) -> None:
        """Cancel the requested restart, because a person stopped or killed the run."""
        if self._history.wanted is not None:
            self._write(replace(self._history, wanted=None))

    def schedule_if_due(
        self,
        end: AttemptEnd,
        engine_exit: EngineExit | None,
        step: int | None,
        *,
        end_requested: bool,
    ) -> AttemptEnd:
        """Schedule another attempt if one is due.

        Return the end of this attempt. If a restart is refused, its detail contains the reason.
        """
        request = self.requested
        crashed = end.state in (RunState.FAILED, RunState.CRASHED)
        if request is not None and end.state is not RunState.FINISHED:
            of, end = request.of, replace(end, detail=request.reason)
        elif crashed and self._spec.restarts and not end_requested:
            if engine_exit is not None and engine_exit.error is not None:
                return end  # The engine could not be started at all.
            of = self._spec.restarts
        else:
            return end
        failed_at = self._failed_at(step)
        why = self._history.refusal(of, failed_at)
        if why is None:
            history = self._history.with_scheduled(
                attempt=self._attempt, of=of, step=failed_at, state=end.state, detail=end.detail
            )
            if self._write(history):
                return end
            why = _NOT_WRITTEN
        return replace(end, detail=f"{end.detail}; not restarted: {why}")

    def start_next(
        self,
        waiting: ScheduledRestart,
        changes: tuple[str, ...],
        gone: tuple[int, ...] = (),
        since: int | None = None,
    ) -> AttemptPlan | str:
        """Return the plan of the next attempt, or the reason why there is none.

        ``since`` is the step since which the loss is NaN: the run goes back before it. ``gone`` are
        nodes that do not exist any more. They are left out if that is allowed.
        """
        choice = choose_checkpoint(self._run_dir.checkpoints_dir, since)
        taken = choice.taken
        if taken is None and choice.skipped:
            return f"not restarted: {choice.why_none()}"
        self._write(self._history.with_started())
        return AttemptPlan(
            resume_from=None if taken is None else Path(taken.path),
            resume_step=None if taken is None else taken.global_step,
            skipped=choice.skipped,
            changes=changes,
            left_out=self._left_out(gone),
            restarted_because=(
                f"restart {waiting.number} of {waiting.of}, after: {waiting.detail}"
            ),
        )

    def _left_out(self, gone: tuple[int, ...]) -> tuple[int, ...] | None:
        nodes = self._spec.nodes
        if nodes is None or not nodes.fewer_allowed:
            return None
        return tuple(sorted({*nodes.left_out, *gone}))

    def cancel_scheduled(self) -> None:
        """Remove the scheduled restart."""
        self._write(replace(self._history, waiting=None))

    def _failed_at(self, step: int | None) -> int | None:
        return BEFORE_TRAINING if step is None and self._spec.command is None else step

    def _write(self, history: RestartHistory) -> bool:
        try:
            write_restart_history(self._run_dir, history)
        except OSError:
            return False
        self._history = history
        return True
