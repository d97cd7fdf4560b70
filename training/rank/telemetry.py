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
_clock = time.perf_counter
_MEMORY_EVERY_S = 0.5
"""torch builds a dictionary of a hundred entries to say how much memory is allocated."""

_STEP, _METRICS = int(Kind.STEP), int(Kind.METRICS)
_FETCH, _TRANSFER, _FORWARD = int(Phase.FETCH), int(Phase.TRANSFER), int(Phase.FORWARD)
_BATCH_END = int(Phase.BATCH_END)
_NO_TIME = [0.0] * len(Phase)


class Telemetry:
    """The training loop of one Trainer, as seen by one rank."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.metrics = UserMetrics(channel)
        self.global_step = 0
        self.stepped = False
        """Whether the optimizer stepped in the batch that just ended."""
        self._pulse = channel.pulse
        self._enter = channel.pulse.phase
        self._put_row = channel.queue.put_row
        self._spent = list(_NO_TIME)
        self._phase = _BATCH_END
        self._before_fetch = _BATCH_END
        self._mark = self._step_began = time.perf_counter()
        self._epoch = 0
        self._samples = self._lr = _NAN
        self._memory = self._memory_peak = _NAN
        self._memory_due = 0.0
        self._on_cuda = self._manual = False
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
        self._manual = not automatic
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
            self.fetch_begins()
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
        self._spent[self._phase] += now - self._mark
        self._mark = now
        self._phase = phase
        self._enter(phase)

    def restart_clock(self) -> None:
        """What happened since the last batch (validation, a pause, an epoch's end) is no part of a
        step."""
        self._mark = self._step_began = time.perf_counter()
        self._phase = _BATCH_END

    def fetch_begins(self) -> None:
        self._before_fetch = self._phase
        self.turn(_FETCH)

    def fetch_ended(self) -> None:
        if self._before_fetch != _BATCH_END:
            self.turn(self._before_fetch)  # a user's own iteration fetches inside training_step
        elif self._on_cuda:
            self.turn(_TRANSFER)
        else:  # on CPU there is nothing to wait for, so it is worth no pulse
            now = _clock()
            self._spent[_FETCH] += now - self._mark
            self._mark = now
            self._phase = _TRANSFER

    def batch_begins(self, batch: Any, batch_index: int) -> None:
        self._pulse.batch = batch_index
        self.turn(_FORWARD)
        self._samples = samples_of(batch)
        group = self._param_group
        if group is not None:
            lr = group["lr"]
            # A tensor may stand on the device, and reading it would wait for it.
            self._lr = lr if type(lr) is float else _host_float(lr)

    def batch_ended(self, trainer: Any, outputs: Any, batch_index: int) -> None:
        """The end of a batch: its row, then a look at the clocks of rarer things."""
        now = _clock()
        spent = self._spent
        spent[self._phase] += now - self._mark
        self._mark = now
        self._phase = _BATCH_END
        step = self._steps.completed
        stepped = self.stepped = step != self.global_step
        self.global_step = self._pulse.global_step = step
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
        began, self._step_began = self._step_began, now
        self._put_row(
            (
                step,
                self._epoch,
                batch_index,
                self._samples,
                loss,
                self._lr,
                now - began,
                spent[4],  # by Phase: fetch, forward, backward, optimizer
                spent[6],
                spent[7],
                spent[8],
                self._memory,
                self._memory_peak,
                time.time(),
                1.0 if stepped else 0.0,
                spent[5],  # transfer
            ),
            _STEP,
        )
        spent[:] = _NO_TIME
        self._enter(_BATCH_END)

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

    def _look_at_memory(self, now: float) -> None:
        self._memory_due = now + _MEMORY_EVERY_S if self._on_cuda else math.inf
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


def _host_float(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return _NAN
    return float(value)
