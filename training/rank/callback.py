# ruff: noqa: ARG001, ARG002  (the arguments are Lightning's)
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
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ltui.training.rank.channel import Channel, open_channel, report_exception
from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.rank.coordination.trainer_boundaries import TrainerBoundaries
from ltui.training.rank.heartbeat_thread import publish_barriers, start_heartbeat_thread
from ltui.training.rank.live_profile import exclude_from_profile
from ltui.training.rank.node_folders import NodeFolders, node_folders, resume_source
from ltui.training.rank.resume.exact_state import ExactState, create_exact_state
from ltui.training.rank.resume.resume_fit import ReceivedCheckpoint, keep_overrides, resume_from
from ltui.training.rank.step_rerun import RERUN
from ltui.training.rank.telemetry import Telemetry
from ltui.training.rank.training_facts import (
    TunerFits,
    active_finder,
    report_old_lightning,
    report_saved_checkpoints,
    send_hello,
    send_hyperparameters,
    send_plan,
)
from ltui.training.shared.rank_environment import RankEnvironment, rank_from_environment
from ltui.training.shared.record_types import Outcome, Phase

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


def _phase_hook(phase: Phase) -> Callable[..., None]:
    """Return a hook that enters ``phase``."""

    @guarded
    def hook(self: RankHooks, trainer: Any, pl_module: Any) -> None:
        self._enter(phase)

    return hook


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
        self._boundaries = TrainerBoundaries(lambda error: self.coordinator_failed(error))
        self._exact: ExactState | None = None
        self._nodes: NodeFolders | None = None
        self._tuner = TunerFits(self._send_phase_event)
        self._stage = ""
        self._validation_began_ns = 0
        self._trainer_prepared = False
        """True if the Trainer's methods are wrapped, which is done once."""
        self._exception: BaseException | None = None
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
        if telemetry is None or self.channel is None:
            return
        vars(self).pop("on_train_batch_end", None)
        self._boundaries.telemetry, self._boundaries.batch_ended = None, telemetry.stepped
        self.channel.telemetry_off(error)

    def coordinator_failed(self, error: BaseException) -> None:
        """Take no further part in what the ranks agree on, and report ``error``."""
        if self.channel is not None:
            self._boundaries.leave(self.channel, error)

    # Beginning.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # First, because all ranks take part in it, and what follows may fail on one of them.
        self._nodes = node_folders(trainer, self.environment)
        try:
            self._begin_fit(trainer, str(getattr(stage, "value", stage)))
        except Exception as error:  # noqa: BLE001
            self.telemetry_failed(error)
        if (channel := self.channel) is None:
            return
        try:
            self._resume(trainer, channel)
        except Exception as error:  # noqa: BLE001  (another Lightning)
            reason = f"{type(error).__name__}: {error}"
            text = f"The resume from {self.environment.resume_from} could not be prepared: {reason}"
            channel.event("warning", text, remedy="Pass ckpt_path to trainer.fit in the script.")

    def _begin_fit(self, trainer: Any, stage: str) -> None:
        """Open the channel and attach telemetry and coordinator to the Trainer."""
        channel = self.channel = open_channel(self.environment, trainer.global_rank)
        channel.fit_count += 1
        self._stage, self._exception, self._trained = stage, None, False
        channel.pulse.set(phase=Phase.SETUP, outcome=Outcome.RUNNING)
        if self.telemetry is None:
            self.telemetry = self._boundaries.telemetry = Telemetry(channel, self.telemetry_failed)
        if not channel.hello_sent:
            send_hello(channel, trainer)
            if self._nodes is not None and self._nodes.detached:
                channel.event_from_rank_0("note", self._nodes.describe_detached())
            report_old_lightning(trainer, channel)
            atexit.register(channel.ended)
        finder = functools.partial(active_finder, trainer, self)
        try:
            self._boundaries.begin(trainer, channel, stage, self._nodes)
            if not self._trainer_prepared:
                self._boundaries.handle_signals(trainer, channel)
                self._boundaries.detect_epoch_ends(trainer, finder)
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)
        if not self._trainer_prepared:
            self._trainer_prepared = True
            report_saved_checkpoints(trainer, channel)
            if RERUN is not None:
                # Imported here, because few runs execute steps again.
                from ltui.training.rank.silenced_writes import silence_trainer

                silence_trainer(trainer)
            self._start_heartbeat(trainer, channel)
            self._exact = create_exact_state(trainer, channel)
            if self._exact is not None:
                self._exact.after_restore = functools.partial(self._ignore_restored, trainer)
            self._boundaries.use_exact_state(self._exact)
            self.telemetry.install_marks(trainer, finder)
            self._boundaries.detect_batch_and_training_end(trainer, finder, self._finder_batch)
        self._boundaries.use_exact_state(self._exact)

    def _start_heartbeat(self, trainer: Any, channel: Channel) -> None:
        environment = self.environment
        with contextlib.suppress(Exception):  # training does not need the heartbeat
            heartbeat = start_heartbeat_thread(
                environment.run_dir, environment.attempt, channel.rank
            )
            if heartbeat is not None:
                publish_barriers(trainer.strategy, heartbeat.slot)

    def _resume(self, trainer: Any, channel: Channel) -> None:
        """Resume from the run's checkpoint if it was saved in this ``fit``."""
        nodes, environment = self._nodes, self.environment
        source = resume_source(environment, several_nodes=False) if nodes is None else nodes.resume
        if source is None or source.fit != channel.fit_count:
            return
        if channel.resumed or self._stage != "fit":
            return
        channel.resumed = True
        send_event = channel.event_from_rank_0
        resume_from(
            trainer,
            source.path,
            send_event,
            trusted=source.trusted,
            exact=self._exact,
            received=None if nodes is None else ReceivedCheckpoint(nodes, source),
        )
        keep_overrides(trainer, environment.overrides, functools.partial(send_event, "note"))

    @guarded
    def _finder_batch(self, trainer: Any, finder: str) -> None:
        """Report a batch of a trial of the Tuner, for which Lightning calls no hook of ours."""
        if self.channel is not None:
            batch = trainer.fit_loop.epoch_loop.batch_idx
            self.channel.pulse.set(phase=Phase.SETUP, batch=batch)
            self._tuner.batch_ended(finder)

    on_sanity_check_start, on_sanity_check_end = _phase_hook(Phase.SANITY), _phase_hook(Phase.SETUP)

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._tuner.end()
        self._trained = True
        if self.telemetry is not None and self.channel is not None:
            self.telemetry.attach(trainer)
            send_plan(self.channel, trainer)
            if self.channel.rank == 0:
                with contextlib.suppress(Exception):  # only shown in the dashboard
                    send_hyperparameters(
                        self.channel, getattr(trainer, "datamodule", None), pl_module
                    )
            self.telemetry.restart_clock()
            # Set on the object, so that Lightning calls it directly.
            self.on_train_batch_end = self.telemetry.on_train_batch_end  # type: ignore[method-assign]

    @guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if (telemetry := self.telemetry) is not None:
            telemetry.attach(trainer)
            telemetry.restart_clock()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Used only when telemetry is off. Otherwise Telemetry's hook replaces this one."""
        self._boundaries.end_batch_without_telemetry(trainer)

    # Validation, test, prediction.

    @guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._enter(Phase.VALIDATION)
            self._validation_began_ns = time.monotonic_ns()
            self._send_phase_event("Validation began.")

    on_test_start = on_predict_start = _phase_hook(Phase.TEST)

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
            if self.channel is not None:
                self.channel.pulse.set(batch=batch_idx)
            self._boundaries.pass_evaluation_batch(trainer)
        except Exception as error:  # noqa: BLE001
            self.coordinator_failed(error)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    @guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        exclude_from_profile(self._validation_began_ns, time.monotonic_ns())
        self._send_phase_event("Validation ended.")
        if self.telemetry is not None:
            self._enter(Phase.BATCH_END)
            self.telemetry.restart_clock()

    # The end.

    @guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._enter(Phase.EPOCH_END)

    @guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        channel = self.channel
        if channel is None or self._exception is not None:
            return
        self._boundaries.end(raised=False)
        if self._exact is not None:
            self._exact.detach()
        only_tuned = self._tuner.finder is not None and not self._trained
        self._tuner.end()
        if self.telemetry is not None:
            self.telemetry.metrics.flush()
        channel.queue.flush_staged()
        # Set after every stage, because any may be the last. The next stage's setup resets it.
        channel.pulse.set(phase=Phase.TEARDOWN, outcome=Outcome.FINISHED)
        if self._stage == "fit" and not only_tuned:
            step = trainer.global_step
            channel.event_from_rank_0("finished", f"Finished at step {step}.", global_step=step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._exception = exception
        report_exception(self._send_exception, exception)

    def _send_exception(self, exception: BaseException) -> None:
        self._boundaries.end(raised=True)
        if self.telemetry is not None:
            self.telemetry.metrics.flush()
        if self.channel is not None and not isinstance(exception, RunStopped):
            self.channel.send_exception(exception)

    # Used by several hooks.

    def _enter(self, phase: Phase) -> None:
        if self.telemetry is not None and self.channel is not None:
            self.channel.pulse.set(phase=phase)

    def _send_phase_event(self, text: str) -> None:
        if self.channel is not None:
            self.channel.event_from_rank_0("phase", text)

    def _ignore_restored(self, trainer: Any) -> None:
        if self.telemetry is not None:
            self.telemetry.metrics.ignore_present(trainer)
