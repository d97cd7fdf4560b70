# ruff: noqa: ARG002  (the arguments are Lightning's)
"""The Lightning callback of a rank. It passes each hook on to telemetry and to the coordinator.

Neither may harm training. If telemetry fails, it is switched off. If the coordinator fails, this
rank takes no further part in what the ranks agree on. Both failures are reported and training
continues. By design, only ``RunStopped`` leaves a hook.

``callback_factory.py`` combines the class with ``Callback`` of the package that builds the Trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ltui.training.rank.coordination.coordinator import RankCoordinator
from ltui.training.rank.coordination.stop_exception import RunStopped
from ltui.training.rank.coordination.stop_signals import (
    StopSignals,
    disable_lightning_handlers,
    replace_lightning_handlers,
)
from ltui.training.rank.environment import RankEnvironment, rank_from_environment
from ltui.training.rank.heartbeat.heartbeat_thread import publish_barriers, start_heartbeat_thread
from ltui.training.rank.lightning_internals import logger_connector
from ltui.training.rank.rank_queue import (
    OLDEST_LIGHTNING,
    Channel,
    is_too_old,
    lightning_version,
    open_channel,
)
from ltui.training.rank.resume.exact_state import ExactState
from ltui.training.rank.resume.keep_overrides import keep_overrides
from ltui.training.rank.resume.loop_counters import BoundaryKind, check_loops
from ltui.training.rank.resume.resume_checkpoint import fit_number, resume_from
from ltui.training.rank.script_facts import send_hyperparameters, send_saved_checkpoint
from ltui.training.rank.telemetry import Telemetry
from ltui.training.rank.tuner_fits import active_finder, is_tuner_checkpoint
from ltui.training.rank.worker_exceptions import unwrap_worker_exception
from ltui.training.tensor_queue.record_types import Outcome, Phase

_TRAINING = BoundaryKind.TRAINING
"""Used in every step: reading a member from an enumeration takes a call."""
_MESSAGE_LIMIT = 4000
"""Characters of an exception's message that are sent."""
_TRACEBACK_LIMIT = 16000
"""Characters of an exception's traceback that are sent; its end is kept."""

_NO_COORDINATION = (
    "Ranks on several nodes share no memory, so they can't agree on a step: ltui can't stop, pause "
    "or checkpoint them together. Add a ModelCheckpoint to the callbacks."
)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """Switch telemetry off if the hook fails. Used for hooks that do not run in every batch."""

    @functools.wraps(hook)
    def guard(self: RankHooks, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self.telemetry_failed(error)

    return guard  # type: ignore[return-value]


class RankHooks:
    """All hooks of one Trainer. The process's Trainers share its queue and its coordinator."""

    state_key = "LtuiRank"
    # Lightning tests ``callable(hook)`` and skips a hook that is None: cheaper than an empty call.
    on_train_batch_start = on_before_zero_grad = on_before_backward = None
    on_after_backward = on_before_optimizer_step = None

    def __init__(self, environment: RankEnvironment) -> None:
        self.environment = environment
        self.channel: Channel | None = None
        self.telemetry: Telemetry | None = None
        self.coordinator: RankCoordinator | None = None
        self._fit = 0
        """Number of the running ``fit``, ``validate``, ``test`` or ``predict`` in this process."""
        self._stage = ""
        self._trainer_prepared = False
        """True if the Trainer's methods are wrapped, which is done once."""
        self._exact: ExactState | None = None
        self._validation_batches = 0
        """Validation batches since the last training step."""
        self._batch_ended = False
        """True if a training batch has just ended. Used only when telemetry is off."""
        self._batch_ends_later = False
        """True if ``_wrap_batch_and_training_end`` detects the end of a batch."""
        self._end_saved = False
        self._exception: BaseException | None = None
        self._signals: StopSignals | None = None
        self._finder: str | None = None
        """The Tuner's finder that is running."""
        self._trained = False
        """True if this fit reached the user's own training."""

    def open_before_setup(self) -> None:
        """Show the process as starting, if its rank is known before Lightning sets it."""
        rank = rank_from_environment(os.environ)
        if rank is not None:
            self.channel = open_channel(self.environment, rank)
            start_heartbeat_thread(self.environment.run_dir, self.environment.attempt, rank)

    # Failures.

    def telemetry_failed(self, error: BaseException) -> None:
        """Switch telemetry off and report ``error``."""
        telemetry, self.telemetry = self.telemetry, None
        if telemetry is None:
            return
        vars(self).pop("on_train_batch_end", None)
        self._batch_ended = telemetry.stepped
        with contextlib.suppress(Exception):  # there is no other way to report it
            telemetry.switch_off(error)

    def coordinator_failed(self, error: BaseException) -> None:
        """Take no further part in what the ranks agree on, and report ``error``."""
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is None and self.channel is not None:
            coordinator = self.channel.coordinator
        with contextlib.suppress(Exception):
            if coordinator is not None:
                coordinator.leave()
            if self._signals is not None:
                self._signals.restore_defaults()
            if self.channel is not None:
                reason = f"{type(error).__name__}: {error}"
                text = f"This rank cannot stop with a checkpoint, pause or save: {reason}"
                self.channel.event("steering_off", text, error=reason)

    # Beginning.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        try:
            self._open(trainer, str(getattr(stage, "value", stage)))
        except Exception as error:  # noqa: BLE001
            self.telemetry_failed(error)

    def _open(self, trainer: Any, stage: str) -> None:
        """Open the channel and attach telemetry, coordinator and exact state to the Trainer."""
        channel = self.channel = open_channel(self.environment, trainer.global_rank)
        channel.fit_count += 1
        self._fit, self._stage = channel.fit_count, stage
        self._validation_batches, self._exception = 0, None
        self._end_saved = self._trained = False
        channel.pulse.set(phase=Phase.SETUP, outcome=Outcome.RUNNING)
        if self.telemetry is None:
            self.telemetry = Telemetry(channel, self.telemetry_failed)
        if not channel.hello_sent:
            channel.send_hello(trainer)
            self._check_version(trainer, channel)
            atexit.register(_at_exit, channel)
        try:
            self._attach_coordinator(trainer, channel)
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)
        if not self._trainer_prepared:
            self._trainer_prepared = True
            self.telemetry.install_marks(trainer)
            self._wrap_save_checkpoint(trainer)
            self._start_heartbeat(trainer, channel)
            self._create_exact_state(trainer, channel)
            self._wrap_batch_and_training_end(trainer)
        if self.coordinator is not None:
            self.coordinator.exact = self._exact
        self._resume(trainer, channel)

    def _check_version(self, trainer: Any, channel: Channel) -> None:
        version = lightning_version(trainer)
        if channel.rank == 0 and is_too_old(version):
            text = (
                f"Lightning {version} is older than {OLDEST_LIGHTNING}, the oldest version that"
                " ltui supports: a stop, a pause, a checkpoint or an exact resume may not work."
            )
            channel.event("warning", text, remedy="Upgrade it: pip install -U lightning")

    def _attach_coordinator(self, trainer: Any, channel: Channel) -> None:
        if trainer.num_nodes > 1:
            # Ranks agree in shared memory. Here a signal ends this process as it ends any other.
            if not self._trainer_prepared:
                disable_lightning_handlers(trainer)
                if trainer.local_rank == 0:
                    channel.event("note", _NO_COORDINATION)
            return
        if channel.coordinator is None:
            channel.coordinator = RankCoordinator(channel, trainer.global_rank, trainer.world_size)
        check_loops(trainer)
        self.coordinator = channel.coordinator
        if not self._trainer_prepared:
            self._signals = StopSignals(channel.coordinator.request_stop)
            replace_lightning_handlers(trainer, self._signals)
            finder = functools.partial(active_finder, trainer, self)
            channel.coordinator.watch_epoch_ends(trainer, self.coordinator_failed, finder)

    def _create_exact_state(self, trainer: Any, channel: Channel) -> None:
        send_event = channel.event if channel.rank == 0 else _send_nothing
        try:
            self._exact = ExactState(trainer, lambda text: send_event("note", text))
        except AttributeError as error:  # an unsupported Lightning, with other loops
            send_event("note", f"Resuming will not be exact: {error}")

    def _start_heartbeat(self, trainer: Any, channel: Channel) -> None:
        environment = self.environment
        with contextlib.suppress(Exception):  # training does not need the heartbeat
            heartbeat = start_heartbeat_thread(
                environment.run_dir, environment.attempt, channel.rank
            )
            if heartbeat is not None:
                publish_barriers(trainer.strategy, heartbeat.slot)

    def _wrap_batch_and_training_end(self, trainer: Any) -> None:
        """Detect the end of a batch (after all hooks) and of training.

        The end of training is detected before the ``on_train_end`` hooks of callbacks, because some
        swap in averaged weights there.
        """
        connector, loop = logger_connector(trainer), trainer.fit_loop
        end_batch, end_training = connector.on_batch_end, loop.on_run_end

        def on_batch_end() -> None:
            end_batch()
            # Called for batches of an evaluation or of a finder too, which end no step.
            telemetry = self.telemetry
            if self._batch_ended if telemetry is None else telemetry.stepped:
                self._training_boundary(trainer)
            elif (finder := active_finder(trainer, self)) is not None:
                self._finder_batch(trainer, finder)

        def on_run_end() -> None:
            try:
                tuning = active_finder(trainer, self) is not None
                if self.coordinator is not None and not self._end_saved and not tuning:
                    self.coordinator.save_at_end(trainer, self._fit, BoundaryKind.END)
            except Exception as error:  # noqa: BLE001
                self.coordinator_failed(error)
            end_training()

        connector.on_batch_end, loop.on_run_end = on_batch_end, on_run_end
        self._batch_ends_later = True

    @guarded
    def _finder_batch(self, trainer: Any, finder: str) -> None:
        """Report a batch of a trial of the Tuner, for which Lightning calls no hook of ours."""
        if self.channel is None:
            return
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self.channel.pulse.set(phase=Phase.SETUP, batch=batch)
        if finder != self._finder:
            self._finder_ended()
            self._finder = finder
            self._send_phase_event(f"The {finder} began its trial training.")

    def _finder_ended(self) -> None:
        if self._finder is not None:
            self._send_phase_event(f"The {self._finder} ended.")
            self._finder = None

    def _wrap_save_checkpoint(self, trainer: Any) -> None:
        """Show the checkpoint phase while a ModelCheckpoint saves, and report the file."""
        save, channel = trainer.save_checkpoint, self.channel
        pulse = channel.pulse if channel else None

        @functools.wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tuner_checkpoint(filepath):
                return save(filepath, *args, **kwargs)
            phase_before = pulse.current_phase if pulse else Phase.UNKNOWN
            if pulse:
                pulse.set(phase=Phase.CHECKPOINT)
            try:
                saved = save(filepath, *args, **kwargs)
            finally:
                if pulse:
                    pulse.set(phase=phase_before)
            if channel is not None and channel.rank == 0:
                with contextlib.suppress(Exception):  # only shown in the dashboard
                    send_saved_checkpoint(channel, trainer, filepath)
            return saved

        trainer.save_checkpoint = save_checkpoint

    def _resume(self, trainer: Any, channel: Channel) -> None:
        """Resume from the run's checkpoint if it was saved in this ``fit``."""
        path = self.environment.resume_from
        if self._stage != "fit" or path is None or channel.resumed or fit_number(path) != self._fit:
            return
        channel.resumed = True
        send_event = channel.event if channel.rank == 0 else _send_nothing
        own_folder = self.environment.checkpoints_dir.resolve()
        trusted = own_folder in path.resolve().parents
        resume_from(trainer, path, send_event, trusted=trusted, exact=self._exact)
        overrides = self.environment.overrides
        keep_overrides(trainer, overrides, lambda text: send_event("note", text))

    @guarded
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter(Phase.SANITY)

    @guarded
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._enter(Phase.SETUP)

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._finder_ended()
        self._trained = True
        if self.telemetry is not None and self.channel is not None:
            self.telemetry.attach(trainer)
            self.channel.send_plan(trainer)
            if self.channel.rank == 0:
                with contextlib.suppress(Exception):  # only shown in the dashboard
                    send_hyperparameters(self.channel, trainer, pl_module)
            self.telemetry.forget_metrics()
            self.telemetry.restart_clock()
            # Set on the object, so that Lightning calls it directly.
            self.on_train_batch_end = self.telemetry.on_train_batch_end  # type: ignore[method-assign]

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if (telemetry := self.telemetry) is not None:
            self._send_metrics(trainer)
            telemetry.attach(trainer)
            telemetry.restart_clock()

    # Every batch: no decorator and few reads of attributes.

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Used only when telemetry is off. Otherwise Telemetry's hook replaces this one."""
        self._batch_ended = True
        if not self._batch_ends_later:
            self._training_boundary(trainer)

    def _training_boundary(self, trainer: Any) -> None:
        """Pass the boundary after a training batch.

        Called after everything that belongs to the batch. The module's own ``on_train_batch_end``
        runs after that of the callbacks, and so does a ModelCheckpoint that saves by steps.
        """
        coordinator, telemetry = self.coordinator, self.telemetry
        if telemetry is not None:
            telemetry.stepped, step = False, telemetry.global_step
        else:
            self._batch_ended, step = False, trainer.global_step
        if coordinator is None:
            return
        self._validation_batches = 0
        try:
            if coordinator.pass_boundary(trainer, _TRAINING, self._fit, step) and telemetry:
                telemetry.restart_clock()
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
            self.coordinator_failed(error)

    # Validation, test, prediction.

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._enter(Phase.VALIDATION)
            self._send_phase_event("Validation began.")

    @guarded
    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter(Phase.TEST)

    on_predict_start = on_test_start

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking:
            return
        try:
            self._validation_batches += 1
            if self.channel is not None:
                self.channel.pulse.set(batch=batch_idx)
            if self.coordinator is not None:
                within_fit = self._stage == "fit"
                boundary = BoundaryKind.VALIDATION if within_fit else BoundaryKind.EVALUATION
                self.coordinator.pass_boundary(
                    trainer, boundary, self._fit, trainer.global_step, self._validation_batches
                )
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._send_metrics(trainer)
        self._send_phase_event("Validation ended.")
        if self.telemetry is not None:
            self._enter(Phase.BATCH_END)
            self.telemetry.restart_clock()

    @guarded
    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._send_metrics(trainer)

    # The end.

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._send_metrics(trainer)
        self._enter(Phase.EPOCH_END)

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._send_metrics(trainer)

    @guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        channel = self.channel
        if channel is None or self._exception is not None:
            return
        if self.coordinator is not None:
            self.coordinator.fit_ended(self._fit)
        if self._exact is not None:
            self._exact.detach()
        only_tuned = self._finder is not None and not self._trained
        self._finder_ended()
        channel.queue.flush_staged()
        # Set after every stage, because any may be the last. The next stage's setup resets it.
        channel.pulse.set(phase=Phase.TEARDOWN, outcome=Outcome.FINISHED)
        if self._stage == "fit" and channel.rank == 0 and not only_tuned:
            step = trainer.global_step
            channel.event("finished", f"Finished at step {step}.", global_step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._exception = exception
        with contextlib.suppress(Exception):  # a second error must not hide the first
            if self.coordinator is not None:
                self.coordinator.leave()
            if self.channel is not None and not isinstance(exception, RunStopped):
                _send_exception(self.channel, exception)

    # Used by several hooks.

    def _enter(self, phase: Phase) -> None:
        if self.telemetry is not None:
            self.telemetry.set_phase(phase)

    def _send_phase_event(self, text: str) -> None:
        if self.channel is not None and self.channel.rank == 0:
            self.channel.event("phase", text)

    def _send_metrics(self, trainer: Any) -> None:
        if self.telemetry is not None:
            self.telemetry.send_metrics(trainer)


def _send_exception(channel: Channel, exception: BaseException) -> None:
    lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
    name, message = unwrap_worker_exception(type(exception).__name__, str(exception))
    message = message[:_MESSAGE_LIMIT]
    channel.event(
        "exception",
        f"{name}: {message}",
        type=name,
        message=message,
        traceback="".join(lines)[-_TRACEBACK_LIMIT:],
    )
    channel.pulse.set(phase=Phase.EXCEPTION, outcome=Outcome.RAISED)


def _send_nothing(kind: str, text: str, **fields: Any) -> None:
    """Replace ``Channel.event`` on ranks other than 0, which do not repeat what all ranks do."""


def _at_exit(channel: Channel) -> None:
    if channel.pid == os.getpid() and channel.pulse.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        channel.queue.flush_staged()
        channel.pulse.set(phase=Phase.ENDED)
