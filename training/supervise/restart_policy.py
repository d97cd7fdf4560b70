"""Decide whether another attempt follows the current one, and from which checkpoint.

Used by the supervisor's loop only. This module reads and writes the restart history and reads the
checkpoints. It must not use processes or sockets.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.attempt_plan import AttemptPlan
from ltui.training.lifecycle.classify_end import AttemptEnd
from ltui.training.lifecycle.restart_rules import (
    BEFORE_TRAINING,
    RequestedRestart,
    RestartHistory,
    ScheduledRestart,
    read_restart_history,
    write_restart_history,
)
from ltui.training.lifecycle.shim_files import EngineExit
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_checkpoints import choose_checkpoint
from ltui.training.store.run_directory import RunDir

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
