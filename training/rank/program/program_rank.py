"""The rank of a program without a Trainer: it begins with the first step of an optimizer.

It sends the steps (``step_telemetry.py``) and pauses with the other ranks at the end of a step. It
saves no checkpoint, because it does not know what the program would have to save.

The ranks may only wait for each other if all of them take the same steps. DDP, FSDP and DeepSpeed
combine the gradients of all ranks before each step, so under these they do, except where a rank
runs out of data before the others. Therefore a rank that waits gives up after ``PATIENCE_S``.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from types import TracebackType

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ltui.training.rank import torch_internals
from ltui.training.rank.channel import Channel, current_channel, open_channel
from ltui.training.rank.coordination.coordinator import RankCoordinator
from ltui.training.rank.environment import RankEnvironment, rank_from_environment
from ltui.training.rank.heartbeat.heartbeat_thread import start_heartbeat_thread
from ltui.training.rank.metric_records import send_metrics
from ltui.training.rank.program.attach import call_after_steps, ignore_step
from ltui.training.rank.program.logged_values import Values, logged_values
from ltui.training.rank.program.program_kind import (
    ProgramKind,
    find_module_of,
    read_program_kind,
    trained_parameter,
)
from ltui.training.rank.program.rank_claim import claim_rank
from ltui.training.rank.program.step_telemetry import StepTelemetry
from ltui.training.rank.resume.loop_counters import BoundaryKind
from ltui.training.tensor_queue.record_types import Outcome, Phase

PATIENCE_S = 60.0
"""Seconds that a rank waits for the others at the end of a step, before it goes on alone."""
_FIT = 1
"""The number of the only training of a program. Lightning's Trainer counts each ``fit``."""

_current: ProgramRank | None = None


def start(optimizer: torch.optim.Optimizer) -> None:
    """Make this process a rank, unless a Trainer or another process is that rank already."""
    global _current
    environment = RankEnvironment.read(os.environ)
    channel = current_channel()
    trainer_trains = channel is not None and channel.hello_sent
    in_worker = torch.utils.data.get_worker_info() is not None
    rank, world_size = _place()
    if (
        environment is None
        or trainer_trains
        or in_worker
        or not claim_rank(environment.queue_dir, rank)
    ):
        logged_values.end()
        return
    kind = read_program_kind()
    channel = open_channel(environment, rank)
    _current = ProgramRank(channel, kind, world_size, optimizer)


def stop_watching() -> None:
    """End the watch, because a Trainer begins and its callback watches from now on."""
    global _current
    current, _current = _current, None
    if current is not None:
        current.detach()


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank = rank_from_environment(os.environ)
    return (0, 1) if rank is None else (rank, int(os.environ["WORLD_SIZE"]))


class ProgramRank:
    """Hooks of torch that watch this process's training, and what they report to."""

    def __init__(
        self,
        channel: Channel,
        kind: ProgramKind,
        world_size: int,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Begin after the first step of ``optimizer``."""
        channel.fit_count = _FIT
        channel.pulse.set(phase=Phase.COMPUTE, epoch=-1, global_step=1)
        self._channel, self._kind = channel, kind
        self._coordinator: RankCoordinator | None = None
        self.global_step = 1
        parameter = trained_parameter(optimizer)
        device = parameter.device
        local_rank = os.environ.get("LOCAL_RANK", "")
        channel.send_hello(
            device,
            int(local_rank) if local_rank.isdigit() else channel.rank,
            world_size,
            program=self._kind.describe(),
            saves=False,
            strategy=self._kind.wrapper,
        )
        self._telemetry = StepTelemetry(
            channel,
            optimizer,
            device,
            find_module_of(parameter),
            self._pass_boundary,
            self._send_waiting,
            self._telemetry_failed,
        )
        start_heartbeat_thread(
            channel.environment.run_dir, channel.environment.attempt, channel.rank
        )
        self._begin_coordination(world_size)
        self._attach()
        self._values_are_missing = False
        logged_values.begin(self._send_values, lambda: self.global_step)

    def _attach(self) -> None:
        telemetry = self._telemetry
        self._pre_hook = register_optimizer_step_pre_hook(telemetry.before_step)
        call_after_steps(telemetry.after_step)
        torch_internals.wrap_loader_fetch(telemetry.timed_fetch)
        self._save = torch.save
        torch.save = telemetry.marked_save(torch.save)
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        if multiprocessing.parent_process() is None:
            atexit.register(self._on_exit)
        else:  # a child that was forked ends without the functions of atexit
            multiprocessing.util.Finalize(None, self._on_exit, exitpriority=0)
        os.register_at_fork(after_in_child=self._telemetry.switch_off)

    def detach(self) -> None:
        """Leave torch as it was, and record no values that the program logs."""
        logged_values.end()
        self._telemetry.switch_off()
        self._pre_hook.remove()
        call_after_steps(ignore_step)
        torch_internals.unwrap_loader_fetch()
        torch.save = self._save
        sys.excepthook = self._excepthook

    # The values that the program logs.

    def _send_values(self, values: Values, step: int, t: float) -> None:
        try:
            send_metrics(self._channel, values, step, None, t)
        except Exception as error:  # noqa: BLE001  (such as a record that is too large)
            if not self._values_are_missing:
                self._values_are_missing = True
                reason = f"{type(error).__name__}: {error}"
                text = f"Values that the program logged are missing ({reason})."
                self._channel.event("note", text)

    def _send_waiting(self) -> None:
        """Send what other threads logged, and what was on a GPU."""
        logged_values.send_waiting()
        self._channel.queue.flush_staged()

    # What all ranks do together.

    def _begin_coordination(self, world_size: int) -> None:
        channel = self._channel
        reason = _why_no_agreement(self._kind, channel.environment, world_size)
        if reason is not None:
            channel.event("steering_off", f"This rank cannot pause: {reason}.", error=reason)
            return
        try:
            self._coordinator = RankCoordinator(channel, channel.rank, world_size, PATIENCE_S)
        except Exception as error:  # noqa: BLE001
            self._leave(error)

    def _pass_boundary(self, step: int) -> bool:
        """Pass the end of a step. Return True if the ranks waited there."""
        self.global_step = step
        if self._coordinator is None:
            return False
        try:
            return self._coordinator.pass_boundary(self, BoundaryKind.EVALUATION, _FIT, step)
        except Exception as error:
            if self._coordinator.error_of_program is error:
                raise
            self._leave(error)
            return True

    def _leave(self, error: BaseException) -> None:
        """Take no further part in what the ranks agree on, and report ``error``."""
        coordinator, self._coordinator = self._coordinator, None
        with contextlib.suppress(Exception):
            if coordinator is not None:
                coordinator.leave()
            reason = f"{type(error).__name__}: {error}"
            text = f"This rank cannot pause any more: {reason}."
            self._channel.event("steering_off", text, error=reason)

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
            with contextlib.suppress(Exception):  # a second error must not hide the first
                if self._coordinator is not None:
                    self._coordinator.leave()
                self._channel.send_exception(error)
        self._excepthook(kind, error, trace)

    def _on_exit(self) -> None:
        channel = self._channel
        if channel.pid != os.getpid() or _current is not self:
            return
        with contextlib.suppress(Exception):  # a second error must not hide the first
            if channel.pulse.outcome == Outcome.RUNNING:
                if self._coordinator is not None:
                    self._coordinator.fit_ended(_FIT)
                channel.pulse.set(outcome=Outcome.FINISHED)
            logged_values.send_waiting()
            channel.ended()


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
