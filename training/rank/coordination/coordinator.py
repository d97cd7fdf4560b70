"""Stop, pause and checkpoint in a rank: meets the others (``agree.py``), then does what was asked.

Boundaries are the end of a batch in which the optimizer stepped, before Lightning counts the batch
or the epoch as done, and the end of a validation batch. What a checkpoint holds then:

- after a training batch: all of step N; it resumes at step N without repeating or losing an
  optimizer step, and validation that was due after that batch runs first (``loops.py``);
- within validation: the same. The validation begins again on resume; none of its partial metrics
  reaches a logger, a ModelCheckpoint or EarlyStopping;
- in ``validate``, ``test`` and ``predict`` outside of ``fit`` there is nothing to save: a stop
  just leaves.

The sanity check is too short to have boundaries: what is asked then is done after the first step.

Beside Lightning's checkpoint every rank keeps its random states and its position in the data
(``exact.py``).

A stop whose checkpoint can't be written does not stop: training goes on, the failure is told, and
whoever asked may make room or kill. So a full disk never costs what was trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ltui.training.rank.checkpoint_files import prune_periodic
from ltui.training.rank.coordination import save_checkpoint as checkpoints
from ltui.training.rank.coordination.best_checkpoints import BestCheckpoints
from ltui.training.rank.coordination.step_consensus import (
    EPOCH_END,
    GONE,
    STOP_AT_WORD,
    Action,
    BarrierTable,
    Move,
    passed,
    position,
)
from ltui.training.rank.coordination.step_consensus import frozen as frozen_at
from ltui.training.rank.coordination.stop_exception import RunStopped
from ltui.training.rank.rank_queue import Channel
from ltui.training.rank.resume.exact_state import ExactState
from ltui.training.rank.resume.loop_counters import BoundaryKind, can_act_at, checkpoint_amendment
from ltui.training.tensor_queue.control_block import Command, ControlFile, ControlState, StopPlan
from ltui.training.tensor_queue.record_types import Outcome, Phase

_WAIT_S = 0.001
_NAP_S = 0.02
_PEERS_EVERY_S = 1.0

_ACTIONS = {
    Command.STOP: Action.STOP,
    Command.PAUSE: Action.PAUSE,
    Command.CONTINUE: Action.CONTINUE,
    Command.CHECKPOINT: Action.CHECKPOINT,
}
_REASONS = {
    Action.STOP: "stop",
    Action.CHECKPOINT: "request",
    Action.PERIODIC: "periodic",
    Action.BEST: "best",
}


def _fit_is_over(trainer: Any) -> bool:
    """Whether no epoch follows: then there is nothing left to stop."""
    done = trainer.fit_loop.epoch_progress.current.completed
    steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    epochs_done = trainer.max_epochs not in (None, -1) and done >= trainer.max_epochs
    return bool(steps_done or epochs_done or trainer.should_stop)


class RankCoordinator:
    """One rank's part in what all ranks do together. One a process, as the board and the queue
    are."""

    def __init__(self, channel: Channel, rank: int, world_size: int) -> None:
        environment = channel.environment
        folder = environment.queue_dir
        self._channel = channel
        self._leads = rank == 0
        self._control = ControlFile.open(folder / "control.bin")
        name = f"agree-{environment.restarts}-{world_size}.bin"
        self._board = BarrierTable(folder / name, rank, world_size)
        self._words, self._mine = self._board.words, self._board.own_slot
        self._done = self._words[0]
        self._state = self._control.read()
        self._answered = self._state.decision.decision_id if self._state.decision else 0
        self._folder = environment.checkpoints_dir
        self._every_s = environment.checkpoint_every_s
        self._best = BestCheckpoints(environment)
        self._saved_at = time.monotonic()
        self._saves = 0
        self._asked_for = True
        self._plan_id = 0
        self._gone = False
        self.exact: ExactState | None = None
        """Of the Trainer that runs."""

    def request_stop(self, signum: int) -> None:
        """For a signal handler: one byte is stored."""
        self._control.raise_signal(signum)

    def leave(self) -> None:
        """This rank takes no part any more; the others go on without asking it."""
        self._gone = True
        self._board.say(GONE)

    def fit_ended(self, fit: int) -> None:
        self._board.say(passed(position(fit, (1 << 36) - 1)))

    # The boundary: all that a step without a request costs.

    def boundary(
        self, trainer: Any, place: BoundaryKind, fit: int, global_step: int, part: int = 0
    ) -> bool:
        """Pass a boundary. True where something was done there, which is no part of a step's time.

        Raises ``RunStopped`` where all ranks stop.
        """
        # Written out, because it runs every step and its code has left the processor's caches.
        if self._leads and (
            self._control.word[0] != self._control.last_word
            or self._asked_for
            or (self._every_s and time.monotonic() - self._saved_at >= self._every_s)
        ):
            self._look(self._control.poll())
        here = position(fit, global_step, part)
        words = self._words
        stop_at = words[STOP_AT_WORD]
        if words[0] == self._done and (not stop_at or here < stop_at):
            words[self._mine] = 2 * here + 1  # passed
            return False
        return self._halt(trainer, place, fit, here)

    def _halt(
        self, trainer: Any, place: BoundaryKind, fit: int, here: int, epochs_done: int = 0
    ) -> bool:
        """The boundary where there is something to do, or where a stop is planned."""
        acted = False
        exact = self.exact
        if can_act_at(trainer, place) and (exact is None or exact.can_save(place)):
            while self._words[0] != self._done or self._comes_to_plan(here, epochs_done):
                number, action = self._board.request()
                if not self._meet(here, number):
                    break
                self._act(trainer, fit, number, action, place)
                acted = True
        self._board.say(passed(here))
        return acted

    def _comes_to_plan(self, here: int, epochs_done: int) -> bool:
        """Where a stop is planned here: wait until rank 0, come here too, has made it a request."""
        board = self._board
        if not board.stop_planned(here, epochs_done):
            return False
        board.say(frozen_at(here))
        look_at_peers = time.monotonic() + _PEERS_EVERY_S
        while board.stop_planned(here, epochs_done) or self._words[0] != self._done:
            if self._words[0] != self._done:
                return True
            if self._leads and board.all_acted():
                board.publish(Action.STOP)
                return True
            if board.any_rank_beyond(here):
                return False
            time.sleep(_WAIT_S)
            if time.monotonic() >= look_at_peers:
                look_at_peers = time.monotonic() + _PEERS_EVERY_S
                self._channel.pulse.beat()
                if board.dead_peers():
                    return False
        return False

    def watch_epoch_ends(
        self,
        trainer: Any,
        failed: Callable[[BaseException], None],
        tunes: Callable[[], object] = lambda: None,
    ) -> None:
        """Pass a boundary after the last hook of each epoch: a checkpoint of that moment resumes
        with the next epoch. ``failed`` hears of what goes wrong here. ``tunes`` answers whether the
        epoch is a trial of Lightning's Tuner: those have no boundaries."""
        loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        ended, validate = loop.on_advance_end, validation.run

        def on_advance_end() -> None:
            ended()
            if tunes():
                return
            try:
                self._look_at_metrics(trainer)
                last = _fit_is_over(trainer)
                if not (self._gone or (last and self._best.metric is None)):
                    self._epoch_ended(trainer)
            except Exception as error:  # noqa: BLE001
                failed(error)

        def run() -> Any:
            found = validate()
            if tunes():
                return found
            try:
                self._look_at_metrics(trainer)
            except Exception as error:  # noqa: BLE001
                failed(error)
            return found

        loop.on_advance_end, validation.run = on_advance_end, run

    def _look_at_metrics(self, trainer: Any) -> None:
        """After a validation or an epoch, never in a step: reading a metric waits for the device.

        What is best is saved at the next boundary, which after an epoch's validation is the
        epoch's end.
        """
        if self._leads and not self._gone and self._best.look(trainer.callback_metrics):
            self._asked_for = True

    def _epoch_ended(self, trainer: Any) -> None:
        if self._leads:
            self._look(self._control.poll())
        here = position(self._channel.fits, trainer.global_step, EPOCH_END)
        done = trainer.fit_loop.epoch_progress.current.completed
        if self._words[0] == self._done and not self._board.stop_planned(here, done):
            self._board.say(passed(here))
        else:
            self._halt(trainer, BoundaryKind.END, self._channel.fits, here, done)

    def _look(self, state: ControlState | None) -> None:
        """Rank 0: turn what the supervisor, a signal or the clock asks into the ranks' next
        request. ``state`` is news of the control file."""
        if state is not None:
            self._state, self._asked_for = state, True
            self._take_plan(state.plan)
        if self._words[0] != self._done:
            return  # not acted on yet
        action, control_id = self._asked()
        if action is Action.NONE:
            self._asked_for = False
        elif self._board.all_acted():
            self._board.publish(action, control_id)

    def _take_plan(self, plan: StopPlan | None) -> None:
        """Let all ranks know where to stop; at once is before anybody can be there."""
        if plan is None or plan.plan_id == self._plan_id:
            return
        self._plan_id = plan.plan_id
        step = plan.at_global_step
        at = 0 if step is None else position(self._channel.fits, step)
        self._board.plan_stop(at, plan.after_epochs or 0)

    def _asked(self) -> tuple[Action, int]:
        request = self._state.request
        if request is not None and request.request_id > self._answered:
            action = _ACTIONS.get(request.kind, Action.NONE)
            if action is not Action.NONE:
                return action, request.request_id
        if self._state.signal:
            return Action.STOP, 0
        if self._every_s and self._periodic_is_due():
            return Action.PERIODIC, 0
        if self._best.value is not None:
            return Action.BEST, 0
        return Action.NONE, 0

    def _periodic_is_due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._every_s

    def _meet(self, here: int, number: int) -> bool:
        """Wait here until all ranks have come (True), or until it is clear that they will not
        (False)."""
        board = self._board
        board.say(frozen_at(here))
        look_at_peers = time.monotonic() + _PEERS_EVERY_S
        while True:
            move = board.judge(here, number)
            if move is not Move.WAIT:
                return move is Move.ACT
            time.sleep(_WAIT_S)
            if time.monotonic() >= look_at_peers:
                look_at_peers = time.monotonic() + _PEERS_EVERY_S
                self._channel.pulse.beat()
                if board.dead_peers():
                    return False  # the next collective fails, which ends this rank too

    # What was asked, done by all ranks at the same boundary.

    def _act(
        self, trainer: Any, fit: int, number: int, action: Action, place: BoundaryKind
    ) -> None:
        control_id = self._board.control_id()
        self._board.set_acted(number)
        self._done = number << 4 | action
        if self._leads:
            self._answer(action, control_id, trainer.global_step)
        phase = Phase(self._channel.pulse.current_phase)
        if action is Action.PAUSE:
            self._acknowledge(control_id)
            self._pause(trainer, fit, number, place)
        elif action in _REASONS:
            evaluating = place is BoundaryKind.EVALUATION
            path = None if evaluating else self._save(trainer, fit, _REASONS[action], place)
            self._acknowledge(control_id)
            if action is Action.STOP and (path or evaluating):
                self._stop(trainer, path)
        else:
            self._acknowledge(control_id)
        self._channel.pulse.set(phase=phase)

    def _answer(self, action: Action, control_id: int, global_step: int) -> None:
        if action is Action.STOP:
            self._board.plan_stop(0, 0)  # Carried out, or refused by the disk: not again.
        if control_id:
            self._answered = control_id
            command = next(command for command, meant in _ACTIONS.items() if meant is action)
            self._control.decide(control_id, command, global_step)
        elif action is Action.STOP:
            self._control.clear_signal()
        self._state, self._asked_for = self._control.read(), True

    def _acknowledge(self, control_id: int) -> None:
        if control_id:
            self._channel.pulse.set(decision_done=control_id)

    def _tell(self, kind: str, text: str, **fields: Any) -> None:
        if self._leads:
            self._channel.event(kind, text, **fields)

    def _save(self, trainer: Any, fit: int, reason: str, place: BoundaryKind) -> str | None:
        """Path of the checkpoint, None where it failed for any rank."""
        self._channel.pulse.set(phase=Phase.CHECKPOINT)
        exact = self.exact
        saved = checkpoints.save(
            trainer,
            self._folder,
            reason,
            attempt=self._channel.environment.attempt,
            fit=fit,
            amend=checkpoint_amendment(trainer, place),
            rank_state=None if exact is None else lambda: exact.state(place),
            facts=self._best.take() if reason == "best" else None,
        )
        self._saves += 1
        self._board.set_save_result(self._saves, ok=saved.error is None)
        ok = self._all_saved()
        self._saved_at = time.monotonic()
        step, epoch, path = trainer.global_step, trainer.current_epoch, str(saved.path)
        if not ok:
            error = saved.error or "another rank could not save"
            text = f"No checkpoint was saved at step {step}: {error}."
            if reason == "stop":
                text += " Training goes on."
            # Every rank that knows a reason tells it; without one, rank 0 tells.
            if saved.error or self._leads:
                self._channel.event(
                    "checkpoint_failed", text, path=path, error=error, reason=reason, epoch=epoch
                )
            return None
        self._tell(
            "checkpoint_saved",
            f"SaveResult {saved.path.name} in {saved.seconds:.2f} s.",
            path=path,
            global_step=step,
            epoch=epoch,
            reason=reason,
            seconds=saved.seconds,
            size_bytes=saved.size_bytes,
        )
        if self._leads and reason == "best":
            self._best.prune()
        if self._leads and reason == "periodic":
            prune_periodic(self._folder, self._channel.environment.checkpoint_keep)
        return path

    def _all_saved(self) -> bool:
        look_at_peers = time.monotonic() + _PEERS_EVERY_S
        while (ok := self._board.results(self._saves)) is None:
            time.sleep(_WAIT_S)
            if time.monotonic() >= look_at_peers:
                look_at_peers = time.monotonic() + _PEERS_EVERY_S
                self._channel.pulse.beat()
                if self._board.dead_peers():
                    return False
        return ok

    def save_at_end(self, trainer: Any, fit: int, place: BoundaryKind) -> None:
        """The last checkpoint of a run that has periodic ones."""
        if self._every_s:
            self._save(trainer, fit, "end", place)

    def _stop(self, trainer: Any, path: str | None) -> None:
        step = trainer.global_step
        self._channel.pulse.set(phase=Phase.STOPPING, outcome=Outcome.STOPPED)
        saved = "" if path is None else f", checkpoint {os.path.basename(path)}"
        self._tell("stopped", f"Stopped at step {step}{saved}.", global_step=step, checkpoint=path)
        raise RunStopped(step)

    def _pause(self, trainer: Any, fit: int, number: int, place: BoundaryKind) -> None:
        """Sleep until rank 0 publishes the next request; all ranks are here, so it needs no
        meeting."""
        step = trainer.global_step
        self._tell("paused", f"Paused at step {step}.", global_step=step)
        self._channel.pulse.set(phase=Phase.PAUSED)
        while True:
            if self._leads:
                self._saved_at = (
                    time.monotonic()
                )  # nothing changes, so no clock asks for a checkpoint
                self._look(self._control.poll())
            following, action = self._board.request()
            if following > number:
                break
            time.sleep(_NAP_S)
            self._channel.pulse.beat()
        self._act(trainer, fit, following, action, place)
        if action is Action.CONTINUE:
            self._tell("continued", f"Continued at step {step}.", global_step=step)
        else:
            # A checkpoint on the way does not end the pause.
            self._pause(trainer, fit, following, place)
