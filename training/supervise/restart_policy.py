"""Whether another attempt follows the one that runs, and from where: the ledger's keeper.

Used by the supervisor's loop alone. Knows the disk's ledger and checkpoints, no process or socket.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from ltui.training.store.checkpoint_manifest import choose_checkpoint
from ltui.training.store.run_directory import RunDir

_DISK = "the restart could not be written to disk"


class RestartPolicy:
    """The restarts of one attempt. Steps are global; None where no rank has told one."""

    def __init__(self, run_dir: RunDir, spec: RunSpec, attempt: int) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._attempt = attempt
        self._history = read_restart_history(run_dir)

    @property
    def scheduled(self) -> ScheduledRestart | None:
        """The restart that is to come, where the attempt has ended and another follows."""
        waiting = self._history.waiting
        return waiting if waiting is not None and waiting.attempt == self._attempt else None

    @property
    def requested(self) -> RequestedRestart | None:
        """The restart for which what is left of the attempt is being ended."""
        wanted = self._history.wanted
        return wanted if wanted is not None and wanted.attempt == self._attempt else None

    def request(self, reason: str, *, of: int, step: int | None) -> str | None:
        """Write down that a restart is wanted. Why there is none; None where it is on disk."""
        why = self._history.refusal(of, self._failed_at(step))
        if why is not None:
            return why
        wanted = RequestedRestart(attempt=self._attempt, reason=reason, of=of)
        return None if self._write(replace(self._history, wanted=wanted)) else _DISK

    def cancel_request(self) -> None:
        """A person's stop or kill ends it all."""
        if self._history.wanted is not None:
            self._write(replace(self._history, wanted=None))

    def schedule_if_due(
        self, found: AttemptEnd, end: EngineExit | None, step: int | None, *, end_requested: bool
    ) -> AttemptEnd:
        """Have another attempt follow where one is due; the end, with why not where none is."""
        wanted = self.requested
        crashed = found.state in (RunState.FAILED, RunState.CRASHED)
        if wanted is not None and found.state is not RunState.FINISHED:
            of, found = wanted.of, replace(found, detail=wanted.reason)
        elif crashed and self._spec.restarts and not end_requested:
            if end is not None and end.error is not None:
                return found  # It could not even be started.
            of = self._spec.restarts
        else:
            return found
        failed_at = self._failed_at(step)
        why = self._history.refusal(of, failed_at)
        if why is None:
            history = self._history.with_scheduled(
                attempt=self._attempt, of=of, step=failed_at, state=found.state, detail=found.detail
            )
            if self._write(history):
                return found
            why = _DISK
        return replace(found, detail=f"{found.detail}; not restarted: {why}")

    def start_next(self, waiting: ScheduledRestart, changes: tuple[str, ...]) -> AttemptPlan | str:
        """The next attempt, now that its time has come; why there is none, otherwise."""
        choice = choose_checkpoint(self._run_dir.checkpoints_dir)
        taken = choice.taken
        if taken is None and choice.skipped:
            return f"not restarted: no checkpoint is complete ({'; '.join(choice.skip_reasons())})"
        self._write(self._history.with_started())
        return AttemptPlan(
            resume_from=None if taken is None else Path(taken.path),
            resume_step=None if taken is None else taken.global_step,
            skipped=tuple(choice.skip_reasons()),
            changes=changes,
            restarted_because=(
                f"restart {waiting.number} of {waiting.of}, after: {waiting.detail}"
            ),
        )

    def cancel_scheduled(self) -> None:
        """There is no restart after all."""
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
