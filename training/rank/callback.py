# ruff: noqa: ARG002  (the arguments are Lightning's)
"""The Lightning callback: hands each hook to telemetry and coordinator, and lets neither hurt
training.

A failure of telemetry switches telemetry off, a failure of coordinator takes this rank out of what
ranks agree on; both are told, training goes on. Only ``RunStopped`` leaves a hook, by design.

The class is mixed with ``Callback`` of whichever package builds the Trainer (``entry.py``).
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
from ltui.training.rank.coordination.stop_signals import StopSignals, replace_lightning_handlers
from ltui.training.rank.environment import RankEnvironment, rank_from_environment
from ltui.training.rank.heartbeat.heartbeat_thread import publish_barriers, start_heartbeat_thread
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
"""For what runs every step: to ask an enumeration for a member takes a call."""
_MESSAGE_LIMIT = 4000
_TRACEBACK_LIMIT = 16000

_APART = (
    "Ranks on several nodes share no memory to agree in: there is no common stop, pause or "
    "checkpoint by ltui. Have a ModelCheckpoint among the callbacks."
)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A hook whose failure switches telemetry off; for the hooks that do not run every batch."""

    @functools.wraps(hook)
    def guard(self: RankHooks, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self.telemetry_failed(error)

    return guard  # type: ignore[return-value]


class RankHooks:
    """All hooks. One object a Trainer; queue and coordinator are shared by the process."""

    state_key = "LtuiRank"
    # Lightning asks ``callable(hook)`` and passes over what isn't: cheaper than an empty call.
    on_train_batch_start = on_before_zero_grad = on_before_backward = None
    on_after_backward = on_before_optimizer_step = None

    def __init__(self, environment: RankEnvironment) -> None:
        self.environment = environment
        self.channel: Channel | None = None
        self.telemetry: Telemetry | None = None
        self.coordinator: RankCoordinator | None = None
        self._fit = 0
        self._stage = ""
        self._patched = False
        self._exact: ExactState | None = None
        self._part = 0
        self._batch_ended = False
        """Without telemetry: whether a training batch has just ended."""
        self._batch_ends_later = False
        self._end_saved = False
        self._ended: BaseException | None = None
        self._signals: StopSignals | None = None
        self._finder: str | None = None
        """The Tuner's finder that has begun."""
        self._trained = False
        """Whether this fit came to the user's own training."""

    def open_before_setup(self) -> None:
        """Show the process as starting, where its rank is known before Lightning says it."""
        rank = rank_from_environment(os.environ)
        if rank is not None:
            self.channel = open_channel(self.environment, rank)
            start_heartbeat_thread(self.environment.run_dir, self.environment.attempt, rank)

    # Failures.

    def telemetry_failed(self, error: BaseException) -> None:
        telemetry, self.telemetry = self.telemetry, None
        if telemetry is None:
            return
        vars(self).pop("on_train_batch_end", None)
        self._batch_ended = telemetry.stepped
        with contextlib.suppress(Exception):  # nothing is left to tell it with
            telemetry.off(error)

    def coordinator_failed(self, error: BaseException) -> None:
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is None and self.channel is not None:
            coordinator = self.channel.coordinator
        with contextlib.suppress(Exception):
            if coordinator is not None:
                coordinator.leave()
            if self._signals is not None:
                self._signals.restore_defaults()
            if self.channel is not None:
                why = f"{type(error).__name__}: {error}"
                text = f"This rank cannot stop with a checkpoint, pause or save: {why}"
                self.channel.event("steering_off", text, error=why)

    # Beginning.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        try:
            self._open(trainer, str(getattr(stage, "value", stage)))
        except Exception as error:  # noqa: BLE001
            self.telemetry_failed(error)

    def _open(self, trainer: Any, stage: str) -> None:
        channel = self.channel = open_channel(self.environment, trainer.global_rank)
        channel.fits += 1
        self._fit, self._stage, self._part, self._ended = channel.fits, stage, 0, None
        self._end_saved = self._trained = False
        channel.pulse.set(phase=Phase.SETUP, outcome=Outcome.RUNNING)
        if self.telemetry is None:
            self.telemetry = Telemetry(channel, self.telemetry_failed)
        if not channel.hello_sent:
            channel.hello(trainer)
            self._check_version(trainer, channel)
            atexit.register(_at_exit, channel)
        try:
            self._take_the_wheel(trainer, channel)
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)
        if not self._patched:
            self._patched = True
            self.telemetry.install_marks(trainer)
            self._watch_saving(trainer)
            self._bear_witness(trainer, channel)
            self._keep_exact(trainer, channel)
            self._watch_ends(trainer)
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

    def _take_the_wheel(self, trainer: Any, channel: Channel) -> None:
        if trainer.num_nodes > 1:
            # Ranks agree in shared memory. A signal ends this one, as it would end any program.
            if not self._patched:
                trainer._signal_connector.register_signal_handlers = _register_nothing
                if trainer.local_rank == 0:
                    channel.event("note", _APART)
            return
        if channel.coordinator is None:
            channel.coordinator = RankCoordinator(channel, trainer.global_rank, trainer.world_size)
        check_loops(trainer)
        self.coordinator = channel.coordinator
        if not self._patched:
            self._signals = StopSignals(channel.coordinator.request_stop)
            replace_lightning_handlers(trainer, self._signals)
            tunes = functools.partial(active_finder, trainer, self)
            channel.coordinator.watch_epoch_ends(trainer, self.coordinator_failed, tunes)

    def _keep_exact(self, trainer: Any, channel: Channel) -> None:
        tell = channel.event if channel.rank == 0 else _tell_nothing
        try:
            self._exact = ExactState(trainer, lambda text: tell("note", text))
        except AttributeError as error:  # a Lightning whose loops are others
            tell("note", f"Resuming will not be exact: {error}")

    def _bear_witness(self, trainer: Any, channel: Channel) -> None:
        environment = self.environment
        with contextlib.suppress(Exception):  # a run without a witness is a run all the same
            witness = start_heartbeat_thread(environment.run_dir, environment.attempt, channel.rank)
            if witness is not None:
                publish_barriers(trainer.strategy, witness.slot)

    def _watch_ends(self, trainer: Any) -> None:
        """Of a batch after all hooks, and of training before the callbacks' last ones, of which
        some put other weights in place (averages)."""
        connector, loop = trainer._logger_connector, trainer.fit_loop
        batch_ended, training_ended = connector.on_batch_end, loop.on_run_end

        def on_batch_end() -> None:
            batch_ended()
            # The batches of an evaluation or of a finder come by here too, and end no step.
            telemetry = self.telemetry
            if self._batch_ended if telemetry is None else telemetry.stepped:
                self._training_boundary(trainer)
            elif (finder := active_finder(trainer, self)) is not None:
                self._finder_batch(trainer, finder)

        def on_run_end() -> None:
            try:
                tunes = active_finder(trainer, self) is not None
                if self.coordinator is not None and not self._end_saved and not tunes:
                    self.coordinator.save_at_end(trainer, self._fit, BoundaryKind.END)
            except Exception as error:  # noqa: BLE001
                self.coordinator_failed(error)
            training_ended()

        connector.on_batch_end, loop.on_run_end = on_batch_end, on_run_end
        self._batch_ends_later = True

    @guarded
    def _finder_batch(self, trainer: Any, finder: str) -> None:
        """A batch of a trial of the Tuner, to which no other hook is called."""
        if self.channel is None:
            return
        batch = trainer.fit_loop.epoch_loop.batch_idx
        self.channel.pulse.set(phase=Phase.SETUP, batch=batch)
        if finder != self._finder:
            self._finder_ended()
            self._finder = finder
            self._tell_phase(f"The {finder} began: it trains on trial.")

    def _finder_ended(self) -> None:
        if self._finder is not None:
            self._tell_phase(f"The {self._finder} ended.")
            self._finder = None

    def _watch_saving(self, trainer: Any) -> None:
        """Show a ModelCheckpoint's saving as the phase that it is, and report the file."""
        save, channel = trainer.save_checkpoint, self.channel
        pulse = channel.pulse if channel else None

        @functools.wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tuner_checkpoint(filepath):
                return save(filepath, *args, **kwargs)
            before = pulse.current_phase if pulse else Phase.UNKNOWN
            if pulse:
                pulse.set(phase=Phase.CHECKPOINT)
            try:
                saved = save(filepath, *args, **kwargs)
            finally:
                if pulse:
                    pulse.set(phase=before)
            if channel is not None and channel.rank == 0:
                with contextlib.suppress(Exception):  # a list in the dashboard, no more
                    send_saved_checkpoint(channel, trainer, filepath)
            return saved

        trainer.save_checkpoint = save_checkpoint

    def _resume(self, trainer: Any, channel: Channel) -> None:
        path = self.environment.resume_from
        if self._stage != "fit" or path is None or channel.resumed or fit_number(path) != self._fit:
            return
        channel.resumed = True
        tell = channel.event if channel.rank == 0 else _tell_nothing
        own_folder = self.environment.checkpoints_dir.resolve()
        trusted = own_folder in path.resolve().parents
        resume_from(trainer, path, tell, trusted=trusted, exact=self._exact)
        keep_overrides(trainer, self.environment.changed, lambda text: tell("note", text))

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
            self.channel.plan(trainer)
            if self.channel.rank == 0:
                with contextlib.suppress(Exception):  # shown in the dashboard, no more
                    send_hyperparameters(self.channel, trainer, pl_module)
            self.telemetry.forget_metrics()
            self.telemetry.restart_clock()
            # On the object, so that Lightning calls it without a detour.
            self.on_train_batch_end = self.telemetry.on_train_batch_end  # type: ignore[method-assign]

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if (telemetry := self.telemetry) is not None:
            self._send_metrics(trainer)
            telemetry.attach(trainer)
            telemetry.restart_clock()

    # Every batch: no decorator, few look-ups.

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Without telemetry; its own hook stands in the place of this one."""
        self._batch_ended = True
        if not self._batch_ends_later:
            self._training_boundary(trainer)

    def _training_boundary(self, trainer: Any) -> None:
        """After all that a batch is made of: the module's own ``on_train_batch_end`` runs after the
        callbacks', and so does what a ModelCheckpoint saves by steps."""
        coordinator, telemetry = self.coordinator, self.telemetry
        if telemetry is not None:
            telemetry.stepped, step = False, telemetry.global_step
        else:
            self._batch_ended, step = False, trainer.global_step
        if coordinator is None:
            return
        self._part = 0
        try:
            if coordinator.boundary(trainer, _TRAINING, self._fit, step) and telemetry:
                telemetry.restart_clock()
            epoch_loop = trainer.fit_loop.epoch_loop
            if step == epoch_loop.max_steps and not epoch_loop.batch_progress.is_last_batch:
                # Lightning will now count the epoch that it cuts off as finished.
                self._end_saved = True
                coordinator.save_at_end(trainer, self._fit, BoundaryKind.TRAINING)
        except RunStopped:
            with contextlib.suppress(Exception):  # of the user's loggers
                trainer._logger_connector.update_train_step_metrics()
            raise
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)

    # Validation, test, prediction.

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._enter(Phase.VALIDATION)
            self._tell_phase("Validation began.")

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
            self._part += 1
            if self.channel is not None:
                self.channel.pulse.set(batch=batch_idx)
            if self.coordinator is not None:
                place = BoundaryKind.VALIDATION if self._stage == "fit" else BoundaryKind.EVALUATION
                step = trainer.global_step
                self.coordinator.boundary(trainer, place, self._fit, step, self._part)
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._send_metrics(trainer)
        self._tell_phase("Validation ended.")
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
        if channel is None or self._ended is not None:
            return
        if self.coordinator is not None:
            self.coordinator.fit_ended(self._fit)
        if self._exact is not None:
            self._exact.detach()
        tuned = self._finder is not None and not self._trained
        self._finder_ended()
        channel.queue.flush_staged()
        # After every stage, because any may be the last; the next one's setup takes it back.
        channel.pulse.set(phase=Phase.TEARDOWN, outcome=Outcome.FINISHED)
        if self._stage == "fit" and channel.rank == 0 and not tuned:
            step = trainer.global_step
            channel.event("finished", f"Finished at step {step}.", global_step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._ended = exception
        with contextlib.suppress(Exception):  # the exception itself is what matters now
            if self.coordinator is not None:
                self.coordinator.leave()
            if self.channel is not None and not isinstance(exception, RunStopped):
                _tell_exception(self.channel, exception)

    # Shared.

    def _enter(self, phase: Phase) -> None:
        if self.telemetry is not None:
            self.telemetry.enter(phase)

    def _tell_phase(self, text: str) -> None:
        if self.channel is not None and self.channel.rank == 0:
            self.channel.event("phase", text)

    def _send_metrics(self, trainer: Any) -> None:
        if self.telemetry is not None:
            self.telemetry.send_metrics(trainer)


def _tell_exception(channel: Channel, exception: BaseException) -> None:
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


def _register_nothing() -> None:
    """In place of Lightning's handlers, of which that of SIGTERM waits for the other ranks."""


def _tell_nothing(kind: str, text: str, **fields: Any) -> None:
    """Ranks other than 0 do not repeat what all ranks do."""


def _at_exit(channel: Channel) -> None:
    if channel.pid == os.getpid() and channel.pulse.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        channel.queue.flush_staged()
        channel.pulse.set(phase=Phase.ENDED)
