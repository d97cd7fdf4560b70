"""What a rank tells of its training: the pulse, one STEP row a batch, the metrics that a user
logs.

Everything here runs between Lightning's own instructions, so it must be cheap and must never wait:
no lock, no I/O beyond stores to mapped memory, no synchronisation of the device. A loss that lives
on a GPU is sent as a METRICS record named ``train/loss`` once its copy has come, and the row says
NaN.

Time is accounted by one clock hand: every mark charges the time since the last mark to what the
rank was doing, then says what it does now. The marks are Lightning's callback hooks, plus the
profiler hooks around ``next(iterator)`` (exactly the wait for data, without Lightning's broadcast
that precedes it) and around ``optimizer.step`` of manual optimization. What is left of the step
belongs to none of them: callbacks, logging, waiting for peers in Lightning's own per-step
broadcast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from ltui.training.queue.records import Kind, Outcome, Phase
from ltui.training.rank.channel import Channel
from ltui.training.rank.metrics import UserMetrics

_NAN = math.nan
_clock = time.monotonic_ns
_MEMORY_EVERY_NS = 500_000_000
"""torch builds a dictionary of a hundred entries to say how much memory is allocated."""

_STEP, _METRICS = int(Kind.STEP), int(Kind.METRICS)
_FETCH, _TRANSFER, _FORWARD = int(Phase.FETCH), int(Phase.TRANSFER), int(Phase.FORWARD)
_BATCH_END = int(Phase.BATCH_END)
_NO_TIME = [0] * len(Phase)


class Clock:
    """One hand: since when the rank has been in which phase, and what was spent in each, in ns."""

    __slots__ = ("phase", "since", "spent", "step_began")

    def __init__(self) -> None:
        self.spent = list(_NO_TIME)
        self.phase = _BATCH_END
        self.since = self.step_began = _clock()


class Telemetry:
    """The training loop of one Trainer, as seen by one rank."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.metrics = UserMetrics(channel)
        self.global_step = 0
        self.stepped = False
        """Whether the optimizer stepped in the batch that just ended."""
        self._pulse = channel.pulse
        self._mark = channel.pulse.mark
        self._put_row = channel.queue.put_row
        self.clock = Clock()
        self._before_fetch = _BATCH_END
        self._epoch = 0
        self._lr: Any = _NAN
        self._memory = self._memory_peak = _NAN
        self._memory_due = 0
        self._on_cuda = False
        self._scaled_loss = True
        self._param_group: Mapping[str, Any] | None = None
        self._steps: Any = None
        self._nonfinite_told = False

    # Where Lightning keeps what a row needs; looked up once an epoch, not once a batch.

    def attach(self, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        automatic = trainer.lightning_module.automatic_optimization
        self._steps = (
            loop.automatic_optimization.optim_progress.optimizer.step.total
            if automatic
            else loop.manual_optimization.optim_step_progress.total
        )
        # In automatic optimization Lightning divides the loss by this before it hands it out.
        self._scaled_loss = automatic
        self._on_cuda = trainer.strategy.root_device.type == "cuda"
        optimizers = trainer.optimizers
        self._param_group = optimizers[0].param_groups[0] if optimizers else None
        self._epoch = self._pulse.epoch = trainer.current_epoch
        self.global_step = self._pulse.global_step = self._steps.completed

    def watch_loops(self, trainer: Any) -> None:
        """Have the marks that no callback hook gives: around the fetch, and the manual optimizer
        step."""
        loop = trainer.fit_loop.epoch_loop
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def on_before_fetch() -> None:
            self._before_fetch = self.clock.phase
            self.turn(_FETCH)
            before()

        def on_after_fetch() -> None:
            after()
            self.fetch_ended()

        loop._on_before_fetch, loop._on_after_fetch = on_before_fetch, on_after_fetch
        self._watch_manual_optimization(loop.manual_optimization)

    def _watch_manual_optimization(self, manual: Any) -> None:
        step_done = manual._on_after_step

        def on_after_step() -> None:
            step_done()
            self.turn(_FORWARD)

        manual._on_after_step = on_after_step

    # The marks.

    def turn(self, phase: int) -> None:
        """Charge the time since the last mark to the phase that ends, and enter ``phase``."""
        now = _clock()
        clock = self.clock
        clock.spent[clock.phase] += now - clock.since
        clock.since = now
        clock.phase = phase
        mark = self._mark
        mark[1] = now
        mark[0] = phase

    def restart_clock(self) -> None:
        """What happened since the last batch (validation, a pause, an epoch's end) is no part of a
        step."""
        self.clock.since = self.clock.step_began = _clock()
        self.clock.phase = _BATCH_END

    def fetch_ended(self) -> None:
        # A user's own iteration fetches inside training_step.
        before = self._before_fetch
        self.turn(_TRANSFER if before == _BATCH_END else before)

    def batch_begins(self, batch_index: int) -> None:
        self.turn(_FORWARD)
        self._pulse.batch = batch_index
        group = self._param_group
        if group is not None:
            self._lr = group["lr"]

    def batch_ended(self, trainer: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        """The end of a batch: its row, then a look at the clocks of rarer things."""
        now = _clock()
        clock = self.clock
        spent = clock.spent
        spent[clock.phase] += now - clock.since
        metrics = self.metrics
        if now >= metrics.due_ns:
            # Lightning has put this batch's metrics nowhere yet: these are of the batch before.
            metrics.send_later(trainer, self.global_step, self._epoch, now)
        pulse = self._pulse
        step = self._steps.completed
        stepped = self.stepped = step != self.global_step
        self.global_step = pulse.global_step = step
        loss = _NAN
        if type(outputs) is dict:
            tensor = outputs.get("loss")
            if tensor is not None:
                factor = trainer.accumulate_grad_batches if self._scaled_loss else 1
                if self._on_cuda:
                    self._send_loss(tensor, factor)
                else:
                    loss = tensor.item() * factor
                    if loss - loss != 0.0:
                        self._note_loss(loss)
        if now >= self._memory_due:
            self._look_at_memory(now)
        lr = self._lr
        self._put_row(
            (
                step,
                self._epoch,
                batch_index,
                samples_of(batch),
                loss,
                lr if type(lr) is float else host_float(lr),
                (now - clock.step_began) * 1e-9,
                spent[4] * 1e-9,  # by Phase: fetch, forward, backward, optimizer
                spent[6] * 1e-9,
                spent[7] * 1e-9,
                spent[8] * 1e-9,
                self._memory,
                self._memory_peak,
                time.time(),
                1.0 if stepped else 0.0,
                spent[5] * 1e-9,  # transfer
            ),
            _STEP,
        )
        clock.since = clock.step_began = now
        clock.phase = _BATCH_END
        spent[:] = _NO_TIME
        pulse.move(_BATCH_END, now)

    def _note_loss(self, loss: float) -> None:
        if not self._nonfinite_told:
            self._nonfinite_told = True
            self.channel.event("note", f"The loss became {loss} at step {self.global_step}.")

    def _send_loss(self, loss: torch.Tensor, factor: int) -> None:
        """Through the staged path: published when the copy has come, by a later call."""
        if loss.numel() != 1:
            return
        tensor = loss.detach().reshape(1)
        place = f'"step":{self.global_step},"epoch":{self._epoch},"t":{time.time():.6f}'
        label = f'{{"names":["train/loss"],{place}}}'
        queue = self.channel.queue
        queue.put(
            tensor.double() * factor if factor != 1 else tensor.double(), _METRICS, label.encode()
        )
        queue.flush_staged()

    def _look_at_memory(self, now: int) -> None:
        self._memory_due = now + _MEMORY_EVERY_NS
        if self._on_cuda:
            self._memory = float(torch.cuda.memory_allocated())
            self._memory_peak = float(torch.cuda.max_memory_allocated())

    # Longer phases.

    def enter(self, phase: Phase) -> None:
        self._pulse.set(phase=phase)

    def ended(self, outcome: Outcome) -> None:
        self._pulse.set(outcome=outcome)

    def off(self, error: BaseException) -> None:
        """The last thing that a failing telemetry does, as far as it still can."""
        self._pulse.set(telemetry_ok=False)
        text = f"{type(error).__name__}: {error}"
        self.channel.event("telemetry_off", f"Telemetry switched itself off ({text}).", error=text)


def samples_of(batch: Any) -> float:
    """Length of the first tensor found in ``batch``, NaN where there is none."""
    for _ in range(8):
        if isinstance(batch, torch.Tensor):
            return float(batch.shape[0]) if batch.ndim else 1.0
        if isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            shape = getattr(batch, "shape", None)
            if shape:
                return float(shape[0])
            size = getattr(batch, "num_graphs", None) or getattr(batch, "batch_size", None)
            return float(size) if isinstance(size, int) else _NAN
    return _NAN


def host_float(value: Any) -> float:
    """A learning rate as a number; NaN where it stands on a device that would be waited for."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return _NAN
    return float(value)
