"""The rank of a program without a Trainer: it begins with the first step of an optimizer.

It sends the steps (``step_telemetry.py``), and acts on requests with the other ranks at the end of
a step. It saves checkpoints if the program has said how (``program_checkpoint.py``).

The ranks may only wait for each other if all of them take the same steps. DDP, FSDP and DeepSpeed
combine the gradients of all ranks before each step, so under these they do, except where a rank
runs out of data before the others. Therefore a rank that waits gives up after ``PATIENCE_S``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import TracebackType

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ltui.training.rank import torch_internals
from ltui.training.rank.channel import Channel, report_exception
from ltui.training.rank.coordination.coordinator import RankCoordinator, end_coordination
from ltui.training.rank.coordination.stop_signals import StopSignals, protect_workers
from ltui.training.rank.heartbeat_thread import start_heartbeat_thread
from ltui.training.rank.live_profile import live_profile
from ltui.training.rank.metric_records import MetricSender
from ltui.training.rank.program.logged_values import logged_values, send_through
from ltui.training.rank.program.process_role import (
    ProgramKind,
    find_module_of,
    is_place_known,
    open_own_channel,
    read_place,
    read_program_kind,
    report_missing_values,
    trained_parameter,
)
from ltui.training.rank.program.program_checkpoint import PathFunction, ProgramCheckpoint
from ltui.training.rank.program.program_hooks import (
    call_after_steps,
    call_at_exit,
    ignore_step,
    mark_process,
    uncompiled,
)
from ltui.training.rank.program.step_telemetry import StepTelemetry
from ltui.training.rank.program.tracked_loop import stack
from ltui.training.rank.resume.loop_state import BoundaryKind
from ltui.training.rank.source_changes import watch_sources
from ltui.training.rank.step_rerun import RERUN
from ltui.training.rank.training_facts import send_hyperparameters
from ltui.training.shared.rank_environment import RankEnvironment, integer_variable
from ltui.training.shared.record_types import Outcome, Phase, RecordKind

PATIENCE_S = 60.0
"""Seconds that a rank waits for the others at the end of a step, before it goes on alone."""
_FIT = 1
"""The number of the only training of a program. Lightning's Trainer counts each ``fit``."""
_EVALUATION, _PROGRAM = BoundaryKind.EVALUATION, BoundaryKind.PROGRAM

_current: ProgramRank | None = None
_checkpoint: ProgramCheckpoint | None = None
"""How the program saves and loads, if it has said so."""


def start(optimizer: torch.optim.Optimizer) -> None:
    """Make this process a rank, unless a Trainer or another process is that rank already."""
    global _current
    channel = open_own_channel()
    if channel is None or channel.hello_sent:  # Lightning's Trainer trains
        logged_values.end()
        if channel is None:
            mark_process("training")
    else:
        _current = ProgramRank(channel, optimizer)


def register(save: PathFunction, load: PathFunction, all_ranks: bool | None = None) -> bool:
    """Have checkpoints saved by ``save``. Return True if the program resumes, by ``load``.

    Raises what ``load`` raises.
    """
    global _checkpoint
    if not is_place_known():
        print("ltui: call on_checkpoint after init_process_group: no checkpoints.", file=sys.stderr)
        return False
    try:
        channel = open_own_channel()
    except OSError as error:
        print(f"ltui: no checkpoints and no telemetry: {error}", file=sys.stderr)
        return False
    if channel is None:
        return False
    if channel.hello_sent:
        text = "on_checkpoint was called after the first step, so ltui saves no checkpoints."
        channel.event("warning", text, remedy="Call it before the loop.")
        return False
    rank, world_size = read_place()
    if all_ranks is None:
        # Under these, each rank has only a part of the model.
        all_ranks = read_program_kind().wrapper in ("FSDP", "DeepSpeed")
    _checkpoint = ProgramCheckpoint(save, load, rank, world_size, all_ranks)
    # Now, because the workers of loaders are started before the first step.
    protect_workers()
    path = channel.environment.resume_from
    if path is None:
        return False
    _checkpoint.resume(path)
    return True


def is_registered() -> bool:
    """Return True if the program has said how it saves and loads."""
    return _checkpoint is not None


def stop_watching() -> None:
    """End the watch, because a Trainer begins and its callback watches from now on."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.detach()


def report_progress(*, epoch: int, left_steps: int | None, max_epochs: int | None) -> None:
    """Send where the training is, as the program's own Trainer knows it."""
    if _current is not None:
        _current.report_progress(epoch, left_steps, max_epochs)


class ProgramRank:
    """Hooks of torch that watch this process's training, and what they report to."""

    def __init__(self, channel: Channel, optimizer: torch.optim.Optimizer) -> None:
        """Begin after the first step of ``optimizer``."""
        channel.fit_count = _FIT
        self._channel, self._kind = channel, read_program_kind()
        self._coordinator: RankCoordinator | None = None
        self._signals: StopSignals | None = None
        self._profile = live_profile(channel)
        self._step_is_over = not stack.ends_steps
        """False if the body of a tracked loop still belongs to the last step."""
        self._has_loose_bodies = True
        """True if a body since the last step had none, or may have had none."""
        self.current_epoch = None
        """The epoch of a checkpoint: such a program is resumed by its steps."""
        self._plan: tuple[int | None, int | None] | None = None
        resumed = None if _checkpoint is None else _checkpoint.resumed
        before = channel.steps_before if resumed is None else resumed.global_step
        self.global_step = before + 1
        channel.pulse.set(phase=Phase.COMPUTE, epoch=-1, global_step=self.global_step)
        parameter = trained_parameter(optimizer)
        device = parameter.device
        _, world_size = read_place()
        reason = _why_no_agreement(self._kind, channel.environment, world_size)
        saves = _checkpoint is not None and reason is None and channel.environment.nodes == 1
        channel.send_hello(
            device,
            integer_variable(os.environ, "LOCAL_RANK", channel.rank),
            world_size,
            program=self._kind.describe(),
            saves=saves,
            strategy=self._kind.wrapper,
        )
        if channel.rank == 0:
            with contextlib.suppress(Exception):  # only shown in the dashboard
                send_hyperparameters(channel)
        self._telemetry = StepTelemetry(
            channel,
            optimizer,
            device,
            find_module_of(parameter),
            self._step_ended,
            self._send_waiting,
            self._telemetry_failed,
        )
        self._telemetry.global_step = self.global_step
        start_heartbeat_thread(
            channel.environment.run_dir, channel.environment.attempt, channel.rank
        )
        if resumed is None and before:
            text = f"A new training began in another process; its steps count on from {before}."
            channel.event_from_rank_0("note", text)
        self._begin_coordination(world_size, reason, _checkpoint if saves else None)
        self._report_resume(saves=saves)
        self._attach()
        self._metrics = MetricSender(channel)
        watch_sources(channel.warn_from_rank_0)
        logged_values.begin(send_through(channel, self._metrics), lambda: self.global_step)
        if RERUN is not None and self._step_is_over:
            RERUN.step_ended(self.global_step, body_ended=False)

    def _report_resume(self, *, saves: bool) -> None:
        """Send where the program has resumed, and what of that is not exact."""
        channel, send = self._channel, self._channel.event_from_rank_0
        environment = channel.environment
        if _checkpoint is not None and not saves and environment.nodes > 1:
            send("note", "ltui saves checkpoints of such a program on one machine only.")
        resumed = None if _checkpoint is None else _checkpoint.resumed
        if environment.resume_from is not None and resumed is None:
            text = f"The program does not load {environment.resume_from.name}: it starts anew."
            channel.warn_from_rank_0(text, "Call ltui_rank.on_checkpoint before the loop.")
        if _checkpoint is None or resumed is None:
            return
        step, name = resumed.global_step, resumed.path.name
        text = f"Resumed at step {step} from {name}."
        send("resumed", text, path=str(resumed.path), global_step=step, step=step, epoch=None)
        if _checkpoint.inexact:
            send("note", f"Not exact from here: {'; '.join(dict.fromkeys(_checkpoint.inexact))}.")

    def report_progress(self, epoch: int, left_steps: int | None, max_epochs: int | None) -> None:
        """Send the epoch of the next step, and the numbers of steps and epochs if they change."""
        if epoch != self._channel.pulse.epoch:
            self._channel.pulse.set(epoch=epoch)
            self._telemetry.set_epoch(epoch)
        # The Trainer may count from another step than ltui.
        max_steps = None if left_steps is None else self.global_step + left_steps
        if (max_steps, max_epochs) != self._plan:
            self._plan = max_steps, max_epochs
            self._channel.send_record(
                RecordKind.PLAN, max_steps=max_steps, max_epochs=max_epochs, epoch=epoch
            )

    def _attach(self) -> None:
        telemetry = self._telemetry
        self._pre_hook = register_optimizer_step_pre_hook(uncompiled(telemetry.before_step))
        call_after_steps(uncompiled(telemetry.after_step))
        torch_internals.wrap_loader_fetch(lambda fetch: uncompiled(telemetry.timed_fetch(fetch)))
        self._save = torch.save
        torch.save = uncompiled(telemetry.marked_save(torch.save))
        self._backward = torch.autograd.backward
        torch.autograd.backward = uncompiled(telemetry.marked_backward(torch.autograd.backward))
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        call_at_exit(self._on_exit)
        os.register_at_fork(after_in_child=self._telemetry.switch_off)

    def detach(self) -> None:
        """Leave torch as it was, and record no values that the program logs."""
        logged_values.end()
        self._telemetry.switch_off()
        self._pre_hook.remove()
        call_after_steps(ignore_step)
        torch_internals.unwrap_loader_fetch()
        torch.save = self._save
        torch.autograd.backward = self._backward
        sys.excepthook = self._excepthook

    # The values that the program logs.

    def _send_waiting(self) -> None:
        """Send what other threads logged, and what was on a GPU."""
        logged_values.send_waiting()
        self._channel.queue.flush_staged()
        report_missing_values(self._channel)

    # What all ranks do together.

    def _begin_coordination(
        self, world_size: int, reason: str | None, checkpoint: ProgramCheckpoint | None
    ) -> None:
        channel = self._channel
        if reason is not None:
            channel.event("steering_off", f"This rank cannot pause: {reason}.", error=reason)
            return
        try:
            coordinator = RankCoordinator(channel, channel.rank, world_size, PATIENCE_S)
            coordinator.program, self._coordinator = checkpoint, coordinator
            if checkpoint is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                self._signals = StopSignals(coordinator.request_stop)
                self._signals.install()
        except Exception as error:  # noqa: BLE001
            self._leave(error)
        stack.end_of_body = self._body_ended

    def _step_ended(self, step: int) -> bool:
        """Pass the end of a step, or let the tracked loop do so. Return True if ranks waited."""
        self.global_step = step
        if stack.ends_steps:
            self._step_is_over = False
            return False
        return self._pass_boundary()

    def _body_ended(self) -> None:
        """Pass the end of the last step, now that the body of the loop has ended."""
        if self._step_is_over:
            self._has_loose_bodies = True
            return
        self._step_is_over = True
        if self._pass_boundary():
            self._telemetry.restart()
        self._has_loose_bodies = False

    def _pass_boundary(self) -> bool:
        """Pass the end of a step. Return True if the ranks waited there."""
        if RERUN is not None:
            RERUN.step_ended(
                self.global_step,
                body_ended=stack.ends_steps,
                more_batches=self._has_loose_bodies,
            )
        profile = self._profile
        if profile is None or profile.word[0] == profile.seen:
            return self._act_with_others()
        has_waited = profile.step_ended(self.global_step)
        if self._act_with_others():
            profile.exclude_boundary()
            has_waited = True
        return has_waited

    def _act_with_others(self) -> bool:
        """Act on a request together with the other ranks. Return True if they waited."""
        coordinator = self._coordinator
        if coordinator is None:
            return False
        kind = _EVALUATION if coordinator.program is None else _PROGRAM
        try:
            return coordinator.pass_boundary(self, kind, _FIT, self.global_step)
        except Exception as error:
            if coordinator.error_of_program is error:
                raise
            self._leave(error)
            return True

    def _leave(self, error: BaseException) -> None:
        """Take no further part in what the ranks agree on, and report ``error``."""
        coordinator, self._coordinator = self._coordinator, None
        what = "pause" if _checkpoint is None else "stop with a checkpoint, pause or save"
        end_coordination(self._channel, coordinator, self._signals, f"{what} any more", error)

    # The end.

    def _telemetry_failed(self, error: BaseException) -> None:
        self._telemetry.switch_off()
        if self._coordinator is not None:
            self._leave(error)
        self._channel.telemetry_off(error)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._channel.pid == os.getpid():
            report_exception(self._send_exception, error)
        self._excepthook(kind, error, trace)

    def _send_exception(self, error: BaseException) -> None:
        if self._coordinator is not None:
            self._coordinator.leave()
        self._channel.send_exception(error)

    def _on_exit(self) -> None:
        channel = self._channel
        if channel.pid != os.getpid() or _current is not self:
            return
        with contextlib.suppress(Exception):  # a second error must not hide the first
            if channel.pulse.outcome == Outcome.RUNNING and (error := _ending_error()) is not None:
                self._send_exception(error)
            if channel.pulse.outcome == Outcome.RUNNING:
                if self._coordinator is not None:
                    self._coordinator.fit_ended(_FIT)
                channel.pulse.set(outcome=Outcome.FINISHED)
            self._telemetry.program_ends()
            logged_values.send_waiting()
            self._metrics.flush()
            report_missing_values(channel, at_end=True)
            channel.ended()


def _ending_error() -> BaseException | None:
    """Return the error that ends this child of ``multiprocessing``, which calls no excepthook.

    ``torch.multiprocessing.spawn`` writes the error to a file and exits with 1.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


def _why_no_agreement(
    kind: ProgramKind, environment: RankEnvironment, world_size: int
) -> str | None:
    """Return why the ranks cannot wait for each other; None if they can."""
    if world_size == 1:
        return None
    local_size = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if environment.nodes == 1 and local_size != str(world_size):
        return "it trains on several machines, and ltui does not connect them"
    if kind.wrapper is None:
        return "nothing shows that all ranks take the same steps (no DDP, FSDP or DeepSpeed)"
    return None
