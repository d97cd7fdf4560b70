"""Pass the boundaries of one Trainer to the coordinator: ends of batches, of epochs, of training.

The module's own ``on_train_batch_end`` runs after that of the callbacks, and so does a
ModelCheckpoint that saves by steps. Therefore the end of a batch is detected in Lightning's logger
connector, which follows all hooks. The end of training is detected before the ``on_train_end``
hooks of callbacks, because some swap in averaged weights there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ltui.training.rank.channel import Channel
from ltui.training.rank.coordination.coordinator import RankCoordinator, end_coordination
from ltui.training.rank.coordination.stop_signals import (
    RunStopped,
    StopSignals,
    disable_lightning_handlers,
    replace_lightning_handlers,
)
from ltui.training.rank.lightning_internals import check_validation_signature, logger_connector
from ltui.training.rank.live_profile import LiveProfile, live_profile
from ltui.training.rank.node_folders import NodeFolders
from ltui.training.rank.resume.loop_state import BoundaryKind
from ltui.training.rank.step_rerun import RERUN

if TYPE_CHECKING:
    from ltui.training.rank.resume.exact_state import ExactState
    from ltui.training.rank.telemetry import Telemetry

_TRAINING = BoundaryKind.TRAINING
"""Used in every step: reading a member from an enumeration takes a call."""
_NO_COORDINATION = (
    "ltui does not connect the nodes of this run, so it can't stop, pause or checkpoint all ranks "
    "together. Add a ModelCheckpoint to the callbacks, or start the run as one of several nodes "
    "(ltui exec --num-nodes)."
)

_Function = Callable[..., Any]


class TrainerBoundaries:
    """Passes the boundaries of one Trainer.

    ``failed`` is called with an error of the coordinator. After ``leave`` nothing is passed.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self.coordinator: RankCoordinator | None = None
        self.telemetry: Telemetry | None = None
        """The telemetry that counts the steps; None if it is switched off."""
        self.batch_ended = False
        """True if a training batch has just ended. Used only when telemetry is off."""
        self._failed = failed
        self._fit = 0
        """Number of the running ``fit``, ``validate``, ``test`` or ``predict`` in this process."""
        self._within_fit = False
        self._validation_batches = 0
        """Validation batches since the last training step."""
        self._batch_end_is_detected = False
        self._end_saved = False
        self._signals: StopSignals | None = None
        self._profile: LiveProfile | None = None

    def begin(
        self, trainer: Any, channel: Channel, stage: str, nodes: NodeFolders | None = None
    ) -> None:
        """Join the coordination of the ranks for the ``fit`` (or other ``stage``) that begins.

        ``nodes`` says where the nodes keep checkpoints, if there are several.
        """
        self._fit, self._within_fit = channel.fit_count, stage == "fit"
        self._validation_batches, self._end_saved = 0, False
        self._profile = live_profile(channel)
        if not _can_agree(trainer, channel):
            return
        if channel.coordinator is None:
            channel.coordinator = RankCoordinator(channel, trainer.global_rank, trainer.world_size)
        check_validation_signature(trainer.fit_loop)
        self.coordinator = channel.coordinator
        self.coordinator.nodes = nodes

    def use_exact_state(self, exact: ExactState | None) -> None:
        """Have checkpoints contain ``exact``."""
        if self.coordinator is not None:
            self.coordinator.exact = exact

    def leave(self, channel: Channel, error: BaseException) -> None:
        """Take no further part in what the ranks agree on, and report ``error``.

        An error of the program is raised again, because it must end the program's loop.
        """
        coordinator, self.coordinator = self.coordinator or channel.coordinator, None
        if coordinator is not None and coordinator.error_of_program is error:
            coordinator.leave()
            raise error
        what = "stop with a checkpoint, pause or save"
        end_coordination(channel, coordinator, self._signals, what, error)

    # Where the boundaries are. Called once for each Trainer.

    def handle_signals(self, trainer: Any, channel: Channel) -> None:
        """Have signals request a stop of all ranks.

        Without a coordinator, a signal ends this process as it ends any other.
        """
        if not _can_agree(trainer, channel):
            disable_lightning_handlers(trainer)
            if trainer.local_rank == 0:
                channel.event("note", _NO_COORDINATION)
        elif self.coordinator is not None:
            self._signals = StopSignals(self.coordinator.request_stop)
            replace_lightning_handlers(trainer, self._signals)

    def detect_epoch_ends(self, trainer: Any, active_finder: Callable[[], object]) -> None:
        """Pass a boundary after the last hook of each epoch.

        A checkpoint of that boundary resumes with the next epoch. ``active_finder`` returns a true
        value while a trial of Lightning's Tuner runs; its epochs have no boundaries.
        """
        loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop

        def then(method: _Function, action: Callable[[RankCoordinator], None]) -> _Function:
            """Return ``method`` followed by ``action``."""

            def call() -> Any:
                result = method()
                if self.coordinator is not None and not active_finder():
                    try:
                        action(self.coordinator)
                    except Exception as error:  # noqa: BLE001
                        self._failed(error)
                return result

            return call

        loop.on_advance_end = then(loop.on_advance_end, lambda c: c.pass_epoch_end(trainer))
        validation.run = then(validation.run, lambda c: c.update_best(trainer))

    def detect_batch_and_training_end(
        self, trainer: Any, active_finder: Callable[[], str | None], finder_batch: _Function
    ) -> None:
        """Pass a boundary after each batch, and save at the end of training.

        ``finder_batch`` is called after a batch of a trial of Lightning's Tuner.
        """
        connector, loop = logger_connector(trainer), trainer.fit_loop
        end_batch, end_training = connector.on_batch_end, loop.on_run_end

        def on_batch_end() -> None:
            end_batch()
            # Called for batches of an evaluation or of a finder too, which end no step.
            telemetry = self.telemetry
            if self.batch_ended if telemetry is None else telemetry.stepped:
                self._pass_batch(trainer)
            elif (finder := active_finder()) is not None:
                finder_batch(trainer, finder)

        def on_run_end() -> None:
            try:
                if self.coordinator is not None and not self._end_saved and not active_finder():
                    self.coordinator.save_at_end(trainer, self._fit, BoundaryKind.END)
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            end_training()

        connector.on_batch_end, loop.on_run_end = on_batch_end, on_run_end
        self._batch_end_is_detected = True

    # The boundaries.

    def end_batch_without_telemetry(self, trainer: Any) -> None:
        """Pass a batch's boundary if nothing else detects the end of the batch."""
        self.batch_ended = True
        if not self._batch_end_is_detected:
            self._pass_batch(trainer)

    def _pass_batch(self, trainer: Any) -> None:
        """Pass the boundary after a training batch, after everything that belongs to the batch."""
        coordinator, telemetry = self.coordinator, self.telemetry
        if telemetry is not None:
            telemetry.stepped, step = False, telemetry.global_step
        else:
            self.batch_ended, step = False, trainer.global_step
        if RERUN is not None:
            RERUN.step_ended(step, more_batches=trainer.accumulate_grad_batches > 1)
        profile = self._profile
        if profile is not None and profile.word[0] == profile.seen:
            profile = None
        if profile is not None and profile.step_ended(step) and telemetry:
            telemetry.restart_clock()
        if coordinator is None:
            return
        self._validation_batches = 0
        try:
            if coordinator.pass_boundary(trainer, _TRAINING, self._fit, step):
                if telemetry:
                    telemetry.restart_clock()
                if profile is not None:
                    profile.exclude_boundary()
            epoch_loop = trainer.fit_loop.epoch_loop
            if step == epoch_loop.max_steps and not epoch_loop.batch_progress.is_last_batch:
                # Next, Lightning counts the epoch as finished although it is cut off.
                self._end_saved = True
                coordinator.save_at_end(trainer, self._fit, _TRAINING)
        except RunStopped:
            with contextlib.suppress(Exception):  # an error of the user's loggers
                logger_connector(trainer).update_train_step_metrics()
            raise
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def pass_evaluation_batch(self, trainer: Any) -> None:
        """Pass the boundary after a batch of a validation, a test or a prediction."""
        self._validation_batches += 1
        if self.coordinator is None:
            return
        boundary = BoundaryKind.VALIDATION if self._within_fit else BoundaryKind.EVALUATION
        part = self._validation_batches
        self.coordinator.pass_boundary(trainer, boundary, self._fit, trainer.global_step, part)

    def end(self, *, raised: bool) -> None:
        """Store that this rank has no more boundaries in this ``fit``.

        ``raised`` says that an exception ended it: then this rank takes part no more.
        """
        if self.coordinator is not None and raised:
            self.coordinator.leave()
        elif self.coordinator is not None:
            self.coordinator.fit_ended(self._fit)


def _can_agree(trainer: Any, channel: Channel) -> bool:
    """Return True if the ranks share a barrier table, or ltui mirrors it between their nodes."""
    return trainer.num_nodes == 1 or channel.environment.nodes > 1
