"""Stop, pause and checkpoint in a rank, at a boundary on which all ranks agree.

``step_consensus.py`` makes the ranks agree; this module then does what was requested. Boundaries
are the end of a batch in which the optimizer stepped, before Lightning counts the batch or the
epoch as finished, the end of a validation batch, and the end of an epoch after its last hook. A
checkpoint contains the following:

- After a training batch: all of step N. A resume continues at step N without repeating or losing an
  optimizer step. A validation that was due after that batch runs first (``loop_state.py``).
- Within validation: the same. The validation starts again on resume. None of its partial metrics
  reaches a logger, a ModelCheckpoint or EarlyStopping.
- In ``validate``, ``test`` and ``predict`` outside of ``fit`` there is nothing to save: a stop only
  ends the process.

The sanity check is too short to have boundaries. A request during it is served after the first
step.

In addition to Lightning's checkpoint every rank saves its random states and its position in the
data (``exact_state.py``).

If the checkpoint of a stop can't be written, the run does not stop. Training continues, the failure
is reported, and the user can free disk space or end the run by force. So a full disk never loses
training progress.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ltui.training.rank.channel import Channel
from ltui.training.rank.coordination.request_leader import BestCheckpoints, RequestLeader
from ltui.training.rank.coordination.save_checkpoint import save_checkpoint
from ltui.training.rank.coordination.step_consensus import (
    DEPARTED,
    EPOCH_END,
    LAST_STEP,
    STOP_AT_WORD,
    Action,
    BarrierTable,
    Move,
    boundary_position,
    passed_state,
    table_name,
    waiting_state,
)
from ltui.training.rank.coordination.stop_signals import RunStopped, StopSignals
from ltui.training.rank.node_folders import NodeFolders
from ltui.training.rank.resume.exact_state import ExactState
from ltui.training.rank.resume.loop_state import (
    BoundaryKind,
    can_act_at,
    checkpoint_amendment,
    is_fit_finished,
)
from ltui.training.shared.checkpoint_files import prune_periodic
from ltui.training.shared.record_types import Outcome, Phase
from ltui.training.tensor_queue.control_block import ControlFile

if TYPE_CHECKING:
    from ltui.training.rank.program.program_checkpoint import ProgramCheckpoint

_BARRIER_POLL_S = 0.001
"""Seconds between reads of the other ranks' states while this rank waits for them."""
_PAUSE_POLL_S = 0.02
"""Seconds between checks for the next request during a pause."""
_PEER_CHECK_S = 1.0
"""Seconds between checks that the processes of the other ranks are alive."""

_SAVE_REASONS = {
    Action.STOP: "stop",
    Action.CHECKPOINT: "request",
    Action.PERIODIC: "periodic",
    Action.BEST: "best",
}
"""The actions that save a checkpoint, and the reason in its file name."""


class RankCoordinator:
    """One rank's part in what all ranks do together.

    A process has one coordinator, as it has one queue. On rank 0 it has a leader, which makes the
    requests to all ranks.
    """

    def __init__(
        self, channel: Channel, rank: int, world_size: int, patience_s: float = math.inf
    ) -> None:
        """``patience_s``: after so many seconds a wait for the other ranks raises
        ``TimeoutError``."""
        self._patience_s = patience_s
        environment = channel.environment
        folder = environment.queue_dir
        self._channel = channel
        self._control = ControlFile.open(folder / "control.bin")
        name = table_name(environment.restarts, world_size, environment.worker_group)
        self._table = BarrierTable(folder / name, rank, world_size)
        self._words, self._own_slot = self._table.words, self._table.own_slot
        self._done = self._words[0]
        """The request word on which this rank acted last."""
        self._best = BestCheckpoints(environment)
        self._leader: RequestLeader | None = None
        if rank == 0:
            self._leader = RequestLeader(self._control, self._table, environment, self._best)
        self._results = 0
        """How many results of a save this rank has stored."""
        self._departed = False
        self.exact: ExactState | None = None
        """The exact state of the running Trainer."""
        self.nodes: NodeFolders | None = None
        """Where the nodes keep checkpoints, if the run has several."""
        self.program: ProgramCheckpoint | None = None
        """How a program without a Trainer saves, if it can."""
        self.error_of_program: Exception | None = None
        """What a signal handler of the program raised while this rank waited for others."""

    def request_stop(self, signum: int) -> None:
        """Request a stop of all ranks. A signal handler may call it: it stores one byte."""
        self._control.raise_signal(signum)

    def leave(self) -> None:
        """Take part no more. The other ranks proceed without this one."""
        self._departed = True
        self._table.set_state(DEPARTED)

    def fit_ended(self, fit: int) -> None:
        """Store that this rank has passed every boundary of ``fit``."""
        self._table.set_state(passed_state(boundary_position(fit, LAST_STEP)))

    # The boundary: all that a step without a request costs.

    def pass_boundary(
        self, trainer: Any, boundary: BoundaryKind, fit: int, global_step: int, part: int = 0
    ) -> bool:
        """Pass a boundary. Return True if something was done that is no part of a step's time.

        Raises ``RunStopped`` if all ranks stop.
        """
        # Written inline, because it runs every step and its code has left the CPU's caches.
        leader, words = self._leader, self._words
        if leader is not None and (
            leader.control.word[0] != leader.control.last_word
            or leader.has_request
            or (
                leader.checkpoint_every_s
                and time.monotonic() - leader.saved_at >= leader.checkpoint_every_s
            )
        ):
            self._publish_next_request()
        position = boundary_position(fit, global_step, part)
        stop_at = words[STOP_AT_WORD]
        if words[0] == self._done and (not stop_at or position < stop_at):
            words[self._own_slot] = 2 * position + 1  # passed_state(position)
            return False
        return self._serve_requests(trainer, boundary, fit, position)

    def pass_epoch_end(self, trainer: Any) -> None:
        """Pass the boundary after the last hook of an epoch.

        After the last epoch there is nothing left to stop, but the best checkpoint may be due.
        """
        self.update_best(trainer)
        if self._departed or (is_fit_finished(trainer) and self._best.metric is None):
            return
        self._publish_next_request()
        fit = self._channel.fit_count
        position = boundary_position(fit, trainer.global_step, EPOCH_END)
        epochs_done = trainer.fit_loop.epoch_progress.current.completed
        planned = self._table.is_stop_planned(position, epochs_done)
        if self._words[0] == self._done and not planned:
            self._table.set_state(passed_state(position))
        else:
            self._serve_requests(trainer, BoundaryKind.END, fit, position, epochs_done)

    def update_best(self, trainer: Any) -> None:
        """Request a checkpoint if the monitored metric has improved.

        Called after a validation or an epoch, never in a step, because reading a metric waits for
        the device. The next boundary saves; after an epoch's validation that is the epoch's end.
        """
        leader = self._leader
        if leader and not self._departed and self._best.update(trainer.callback_metrics):
            leader.has_request = True

    def _publish_next_request(self) -> None:
        if self._leader is not None:
            is_served = self._words[0] == self._done
            self._leader.publish_next(self._channel.fit_count, is_served=is_served)

    def _serve_requests(
        self, trainer: Any, boundary: BoundaryKind, fit: int, position: int, epochs_done: int = 0
    ) -> bool:
        """Pass a boundary at which there is a request or a planned stop."""
        acted = False
        exact = self.exact
        if can_act_at(trainer, boundary) and (exact is None or exact.can_save(boundary)):
            while self._words[0] != self._done or self._await_planned_stop(position, epochs_done):
                number, action = self._table.request()
                if not self._await_all_ranks(position, number):
                    break
                self._act(trainer, fit, number, action, boundary)
                acted = True
        self._table.set_state(passed_state(position))
        return acted

    # Waiting for the other ranks.

    def _wait_for(self, poll: Callable[[], bool | None], patience_s: float | None = None) -> bool:
        """Call ``poll`` until it returns True or False, and return that.

        Return False if the process of another rank has ended: the next collective fails, which
        ends this rank too. Raise ``TimeoutError`` after ``patience_s``, by default the patience of
        this rank.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        give_up_at = time.monotonic() + patience_s
        check_peers_at = time.monotonic() + _PEER_CHECK_S
        while (answer := poll()) is None:
            self._sleep(_BARRIER_POLL_S)
            if time.monotonic() >= check_peers_at:
                if time.monotonic() >= give_up_at:
                    raise TimeoutError(f"not all ranks were here within {patience_s:.0f} s")
                check_peers_at = time.monotonic() + _PEER_CHECK_S
                self._channel.pulse.beat()
                if self._table.dead_peers():
                    return False
        return answer

    def _sleep(self, seconds: float) -> None:
        """Sleep. What a signal handler raises meanwhile is an error of the program, not of ltui.

        torch raises so in a rank of which a DataLoader worker was killed.
        """
        try:
            time.sleep(seconds)
        except Exception as error:
            self.error_of_program = error
            raise

    def _await_planned_stop(self, position: int, epochs_done: int) -> bool:
        """If a stop is planned at this boundary, wait for rank 0 to publish the request.

        Return True if there is a request.
        """
        table = self._table

        def poll() -> bool | None:
            if self._words[0] != self._done:
                return True
            if not table.is_stop_planned(position, epochs_done):
                return False
            if self._leader is not None and table.can_publish():
                table.publish(Action.STOP)
                return True
            return False if table.any_rank_beyond(position) else None

        if not table.is_stop_planned(position, epochs_done):
            return False
        table.set_state(waiting_state(position))
        return self._wait_for(poll)

    def _await_all_ranks(self, position: int, number: int) -> bool:
        """Wait until all ranks are here. Return False once it is clear that they will not come."""
        answers = {Move.ACT: True, Move.PROCEED: False, Move.WAIT: None}
        self._table.set_seen(number)
        self._table.set_state(waiting_state(position))
        return self._wait_for(lambda: answers[self._table.next_move(position, number)])

    # The requested action, done by all ranks at the same boundary.

    def _act(
        self, trainer: Any, fit: int, number: int, action: Action, boundary: BoundaryKind
    ) -> None:
        pulse, control_id = self._channel.pulse, self._table.control_id()
        self._table.set_acted(number)
        self._done = number << 4 | action
        if self._leader is not None:
            self._leader.answer(action, control_id, trainer.global_step)
        phase = Phase(pulse.phase)
        evaluating, path = boundary is BoundaryKind.EVALUATION, None
        if action in _SAVE_REASONS and not evaluating:
            path = self._save(trainer, fit, _SAVE_REASONS[action], boundary)
        if control_id:
            pulse.set(decision_done=control_id)
        if action is Action.PAUSE:
            self._pause(trainer, fit, number, boundary)
        elif action is Action.STOP and (path or evaluating):
            self._stop(trainer, path)
        pulse.set(phase=phase)

    def _save(self, trainer: Any, fit: int, reason: str, boundary: BoundaryKind) -> str | None:
        """Save a checkpoint. Return its path, or None if saving failed on any rank."""
        self._channel.pulse.set(phase=Phase.CHECKPOINT)
        environment, exact = self._channel.environment, self.exact
        manifest_fields = {"attempt": environment.attempt, "fit": fit}
        if reason == "best":
            manifest_fields |= self._best.take_manifest_fields()
        folder = environment.checkpoints_dir if self.nodes is None else self.nodes.folder
        if self.program is not None:
            saved = self.program.save(
                folder, reason, trainer.global_step, self._agree, manifest_fields
            )
        else:
            saved = save_checkpoint(
                trainer,
                folder,
                reason,
                manifest_fields=manifest_fields,
                amend=checkpoint_amendment(trainer, boundary),
                rank_state=None if exact is None else lambda: exact.state(boundary),
                nodes=self.nodes,
            )
        ok = self._agree(saved.error is None)
        if self._leader is not None:
            self._leader.saved_at = time.monotonic()
        step, epoch, path = trainer.global_step, trainer.current_epoch, str(saved.path)
        if not ok:
            error = saved.error or "another rank could not save"
            text = f"No checkpoint was saved at step {step}: {error}."
            if reason == "stop":
                text += " Training continues."
            # Every rank with an error of its own reports it. Otherwise rank 0 reports.
            if saved.error or self._leader:
                self._channel.event(
                    "checkpoint_failed", text, path=path, error=error, reason=reason, epoch=epoch
                )
            return None
        self._channel.event_from_rank_0(
            "checkpoint_saved",
            f"Saved {saved.path.name} in {saved.seconds:.2f} s.",
            path=path,
            global_step=step,
            epoch=epoch,
            reason=reason,
            seconds=saved.seconds,
            size_bytes=saved.size_bytes,
        )
        if self._leader and reason == "best":
            self._best.prune()
        if self._leader and reason == "periodic":
            prune_periodic(environment.checkpoints_dir, environment.checkpoint_keep)
        return path

    def _agree(self, ok: bool) -> bool:
        """Store how a part of a save ended here, wait, and return True if it is ok on all ranks."""
        self._results += 1
        number = self._results
        self._table.set_save_result(number, ok=ok)
        # Writing a large checkpoint takes longer than the patience of a rank.
        return self._wait_for(lambda: self._table.save_results(number), math.inf)

    def save_at_end(self, trainer: Any, fit: int, boundary: BoundaryKind) -> None:
        """Save the last checkpoint of a run that has periodic checkpoints."""
        if self._channel.environment.checkpoint_every_s:
            self._save(trainer, fit, "end", boundary)

    def _stop(self, trainer: Any, path: str | None) -> None:
        step = trainer.global_step
        self._channel.pulse.set(phase=Phase.STOPPING, outcome=Outcome.STOPPED)
        saved = "" if path is None else f", checkpoint {os.path.basename(path)}"
        text = f"Stopped at step {step}{saved}."
        self._channel.event_from_rank_0("stopped", text, global_step=step, checkpoint=path)
        raise RunStopped(step)

    def _pause(self, trainer: Any, fit: int, number: int, boundary: BoundaryKind) -> None:
        """Sleep and serve what rank 0 publishes, until a request ends the pause.

        All ranks are here, so no request needs further agreement.
        """
        step = trainer.global_step
        self._channel.event_from_rank_0("paused", f"Paused at step {step}.", global_step=step)
        action = Action.PAUSE
        while action is not Action.CONTINUE:
            # A checkpoint during a pause does not end the pause.
            number, action = self._next_request_in_pause(number)
            self._act(trainer, fit, number, action, boundary)
        self._channel.event_from_rank_0("continued", f"Continued at step {step}.", global_step=step)

    def _next_request_in_pause(self, number: int) -> tuple[int, Action]:
        """Sleep until rank 0 publishes a request after ``number``, and return it."""
        self._channel.pulse.set(phase=Phase.PAUSED)
        while True:
            if self._leader is not None:
                # Nothing changes during a pause, so no periodic checkpoint is due.
                self._leader.saved_at = time.monotonic()
            self._publish_next_request()
            next_number, action = self._table.request()
            if next_number > number:
                return next_number, action
            self._sleep(_PAUSE_POLL_S)
            # The GPU may still work on the steps before the pause.
            self._channel.queue.flush_staged()
            self._channel.pulse.beat()


def end_coordination(
    channel: Channel,
    coordinator: RankCoordinator | None,
    signals: StopSignals | None,
    what: str,
    error: BaseException,
) -> None:
    """Let this rank take no further part in ``what`` all ranks do, and report ``error``."""
    with contextlib.suppress(Exception):
        if coordinator is not None:
            coordinator.leave()
        if signals is not None:
            signals.restore_defaults()
        reason = f"{type(error).__name__}: {error}"
        channel.event("steering_off", f"This rank cannot {what}: {reason}.", error=reason)
