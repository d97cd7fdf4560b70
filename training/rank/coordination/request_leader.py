"""Turn requests of the supervisor, of signals and of the clock into requests to all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltui.training.rank.coordination.save_checkpoint import INFINITE, NAN
from ltui.training.rank.coordination.step_consensus import Action, BarrierTable, boundary_position
from ltui.training.shared.checkpoint_files import read_manifest, remove_checkpoint
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.tensor_queue.control_block import Command, ControlFile


class BestCheckpoints:
    """Decides after every validation and epoch if the metric is among the best so far."""

    def __init__(self, environment: RankEnvironment) -> None:
        self.metric = environment.best_metric
        self._mode, self._keep = environment.best_mode, environment.best_keep
        self._folder = environment.checkpoints_dir
        self._attempt, self._earlier_steps = environment.attempt, environment.earlier_steps
        self._last_value: float | None = None
        self.pending_value: float | None = None
        """The value for which a checkpoint is due; None if none is due."""

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint is due. A value equal to the last one is ignored."""
        if self.metric is None or self.metric not in metrics:
            return False
        value = float(metrics[self.metric])
        if not math.isfinite(value) or value == self._last_value:
            return False
        self._last_value = value
        sign = -1.0 if self._mode == "max" else 1.0
        at_least_as_good = sum(sign * saved <= sign * value for saved, _ in self._saved())
        self.pending_value = value if at_least_as_good < self._keep else None
        return self.pending_value is not None

    def take_manifest_fields(self) -> dict[str, Any]:
        """Return the manifest fields of the checkpoint that is due. Then none is due."""
        value, self.pending_value = self.pending_value, None
        return {"best": {"metric": self.metric, "value": value, "mode": self._mode}}

    def prune(self) -> None:
        """Remove the best checkpoints that are no longer among the best, or are not finite."""
        kept = sorted(self._saved(), reverse=self._mode == "max")[: self._keep]
        for manifest in {path for _, path in self._saved(finite=False)} - {p for _, p in kept}:
            remove_checkpoint(manifest.with_suffix(""))

    def _saved(self, *, finite: bool = True) -> list[tuple[float, Path]]:
        """Return value and manifest path of each checkpoint that was saved for the metric.

        Those of steps that the run has left by a resume from an earlier one are not among them:
        they are neither better than others nor removed. Without ``finite``, also of those whose
        weights or value are NaN or infinite.
        """
        saved = []
        for path in self._folder.glob("step-*-best*.ckpt.json"):
            manifest = read_manifest(path)
            try:
                best = manifest["best"]
                value, is_ours = float(best["value"]), best["metric"] == self.metric
            except (ValueError, KeyError, TypeError):
                continue
            if not self._counts(manifest):
                continue
            bad = manifest.get("weights") in (NAN, INFINITE) or not math.isfinite(value)
            if is_ours and not (finite and bad):
                saved.append((value, path))
        return saved

    def _counts(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether the step of a checkpoint is still part of the run."""
        attempt, step = manifest.get("attempt"), manifest.get("global_step")
        if self._earlier_steps is None or attempt == self._attempt:
            return True
        if not (isinstance(attempt, int) and isinstance(step, int)):
            return True
        return step <= self._earlier_steps.get(attempt, -1)


_ACTIONS = {
    Command.STOP: Action.STOP,
    Command.PAUSE: Action.PAUSE,
    Command.CONTINUE: Action.CONTINUE,
    Command.CHECKPOINT: Action.CHECKPOINT,
}
_COMMANDS = {action: command for command, action in _ACTIONS.items()}


class RequestLeader:
    """Decides what all ranks do next. Only rank 0 has one."""

    def __init__(
        self,
        control: ControlFile,
        table: BarrierTable,
        environment: RankEnvironment,
        best: BestCheckpoints,
    ) -> None:
        self.control = control
        self.has_request = True
        """True if there may be something to publish."""
        self.checkpoint_every_s = environment.checkpoint_every_s
        self.saved_at = time.monotonic()
        """Time of the last checkpoint, from which the next periodic one is counted."""
        self._table = table
        self._best = best
        self._state = control.read()
        self._answered = self._state.decision.decision_id if self._state.decision else 0
        """Id of the last request in the control file that the ranks have decided."""
        self._plan_id = 0

    def publish_next(self, fit: int, *, is_served: bool) -> None:
        """Publish the next request if there is one.

        ``is_served`` says if this rank has acted on the last one.
        """
        if (state := self.control.poll()) is not None:
            self._state, self.has_request = state, True
            self._publish_stop_plan(fit)
        if not is_served:
            return
        action, control_id = self._next_request()
        if action is Action.NONE:
            self.has_request = False
        elif self._table.can_publish():
            self._table.publish(action, control_id)

    def _publish_stop_plan(self, fit: int) -> None:
        """Publish where to stop. This happens at once, before any rank can be there."""
        plan = self._state.plan
        if plan is None or plan.plan_id == self._plan_id:
            return
        self._plan_id = plan.plan_id
        step = plan.at_global_step
        self._table.plan_stop(
            0 if step is None else boundary_position(fit, step), plan.after_epochs or 0
        )

    def _next_request(self) -> tuple[Action, int]:
        """Return the most urgent action and the id of its request in the control file, or 0."""
        request = self._state.request
        if request and request.request_id > self._answered and request.kind in _ACTIONS:
            return _ACTIONS[request.kind], request.request_id
        if self._state.signal:
            return Action.STOP, 0
        if self.checkpoint_every_s and time.monotonic() - self.saved_at >= self.checkpoint_every_s:
            return Action.PERIODIC, 0
        if self._best.pending_value is not None:
            return Action.BEST, 0
        return Action.NONE, 0

    def answer(self, action: Action, control_id: int, global_step: int) -> None:
        """Write to the control file that the ranks act on its request."""
        if action is Action.STOP:
            # The plan is carried out, or the disk refused the checkpoint. Do not repeat it.
            self._table.plan_stop(0, 0)
        if control_id:
            self._answered = control_id
            self.control.decide(control_id, _COMMANDS[action], global_step)
        elif action is Action.STOP:
            self.control.clear_signal()
