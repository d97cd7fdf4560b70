# ruff: noqa: ARG002  (the hooks' arguments are Lightning's)
"""What a rank tells of its training: the pulse, one STEP row a batch, the metrics that a user
logs.

Everything here runs between Lightning's own instructions, so it must be cheap and must never wait:
no lock, no I/O beyond stores to mapped memory, no synchronisation of the device. A loss that lives
on a GPU is sent as a METRICS record named ``train/loss`` once its copy has come, and the row says
NaN.

Time is accounted by one clock hand: every mark charges the time since the last mark to what the
rank was doing, then says what it does now. The marks are put around methods of the Trainer's own
objects, since a callback hook costs twice as much. They are: the profiler hooks around
``next(iterator)`` (exactly the wait for data, without Lightning's broadcast that precedes it), the
logger connector's ``on_batch_start``, the strategy's ``backward``, and the precision plugin's
``_after_closure``, which runs between the backward pass and the optimizer's step. What is left of
the step belongs to none of them: callbacks, logging, waiting for peers in Lightning's own per-step
broadcast.

Between two marks a part of a training step passes, which leaves little of this code in the
processor's caches: what a mark costs is the memory that it touches. Hence objects with slots, a row
that is filled where it is sent from, and fewer calls than elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ltui.training.rank.logged_metrics import LoggedMetrics
from ltui.training.rank.rank_queue import Channel
from ltui.training.tensor_queue.record_types import Outcome, Phase, RecordKind, StepField

_NAN = math.nan
_clock = time.monotonic_ns
_LOOK_EVERY_NS = 100_000_000
"""How often what is rarer than a row is looked at: metrics, memory, the wall clock's offset."""
_MEMORY_EVERY_NS = 500_000_000
"""torch builds a dictionary of a hundred entries to say how much memory is allocated."""

_FETCH, _TRANSFER, _FORWARD = int(Phase.FETCH), int(Phase.TRANSFER), int(Phase.FORWARD)
_BACKWARD, _OPTIMIZER = int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_BATCH_END = int(Phase.BATCH_END)
_STEP, _METRICS = int(RecordKind.STEP), int(RecordKind.METRICS)

_NO_TIME = [0] * len(Phase)


class Telemetry:
    """The training loop of one Trainer, as seen by one rank.

    Its ``on_...`` methods are Lightning's hooks; ``failed`` is told what goes wrong in them and in
    the marks.
    """

    __slots__ = (
        "_before_fetch",
        "_channel",
        "_doing",
        "_epoch",
        "_failed",
        "_list_type",
        "_look_due",
        "_mark",
        "_memory_due",
        "_metrics",
        "_next_batch",
        "_nonfinite_told",
        "_on_cuda",
        "_param_group",
        "_profiled",
        "_publish",
        "_pulse",
        "_row",
        "_scaled_loss",
        "_since",
        "_spent",
        "_step_began",
        "_steps",
        "_tensor_type",
        "_wall_offset_s",
        "global_step",
        "stepped",
    )

    def __init__(self, channel: Channel, failed: Callable[[BaseException], None]) -> None:
        self._channel = channel
        self._failed = failed
        self._metrics = LoggedMetrics(channel)
        self._pulse = channel.pulse
        self._mark = channel.pulse.mark
        row = channel.queue.row(_STEP, len(StepField))
        self._publish, self._row = row.publish, row.fields
        for field in StepField:
            row.fields[field] = _NAN
        self.global_step = 0
        self.stepped = False
        """Whether the optimizer stepped in the batch that just ended; taken back by who acts on
        it."""
        self._epoch = 0
        self._look_due = self._memory_due = 0
        self._wall_offset_s = 0.0
        self._next_batch = 0
        self._on_cuda = False
        self._profiled = True
        """Whether somebody profiles. Lightning's own profiler does nothing, at some cost."""
        self._scaled_loss = True
        self._list_type: Any = None
        self._tensor_type: Any = None
        self._param_group: Mapping[str, Any] | None = None
        self._steps: Any = None
        self._nonfinite_told = False
        self._doing = self._before_fetch = _BATCH_END
        """The phase that the time since the last mark belongs to."""
        self._since = self._step_began = _clock()
        self._spent = list(_NO_TIME)
        """Nanoseconds in each phase since the end of the batch before."""

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
        self._profiled = not silence_idle_profiler(trainer)
        optimizers = trainer.optimizers
        self._param_group = optimizers[0].param_groups[0] if optimizers else None
        self._epoch = trainer.current_epoch
        self.global_step = self._steps.completed
        self._pulse.set(epoch=self._epoch, batch=0, global_step=self.global_step)
        self._mark[2], self._mark[3] = 0, self.global_step
        self._next_batch = 0
        self._row[StepField.EPOCH] = self._epoch

    def install_marks(self, trainer: Any) -> None:
        """Put the marks around what a batch is made of."""
        self._watch_fetch(trainer.fit_loop.epoch_loop)
        self._watch_batch_start(trainer)
        strategy = trainer.strategy
        precision = strategy.precision_plugin
        strategy.backward = self._marked(strategy.backward, _BACKWARD)
        precision._after_closure = self._marked(precision._after_closure, _OPTIMIZER)
        self._watch_manual_optimization(trainer.fit_loop.epoch_loop.manual_optimization)

    def _watch_fetch(self, loop: Any) -> None:
        before, after = loop._on_before_fetch, loop._on_after_fetch

        def on_before_fetch() -> None:
            now, doing, mark = _clock(), self._doing, self._mark
            self._spent[doing] += now - self._since
            self._since = now
            self._before_fetch = doing
            if doing == _BATCH_END:
                mark[2] = self._next_batch
            mark[1] = now
            mark[0] = self._doing = _FETCH
            if self._profiled:
                before()

        def on_after_fetch() -> None:
            if self._profiled:
                after()
            now, mark = _clock(), self._mark
            self._spent[self._doing] += now - self._since
            self._since = now
            mark[1] = now
            # A user's own iteration fetches inside training_step.
            before_fetch = self._before_fetch
            mark[0] = self._doing = _TRANSFER if before_fetch == _BATCH_END else before_fetch

        loop._on_before_fetch, loop._on_after_fetch = on_before_fetch, on_after_fetch

    def _watch_batch_start(self, trainer: Any) -> None:
        connector, state = trainer._logger_connector, trainer.state
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        start, training = connector.on_batch_start, type(state.stage).TRAINING

        @functools.wraps(start)
        def on_batch_start(*args: Any, **kwargs: Any) -> None:
            # Validation's batches come by here too.
            if state.stage is training:
                self._batch_started(batches.ready - 1)
            start(*args, **kwargs)

        connector.on_batch_start = on_batch_start

    def _batch_started(self, batch_index: int) -> None:
        try:
            now = _clock()
            self._spent[self._doing] += now - self._since
            self._since = now
            mark = self._mark
            mark[2] = self._pulse.batch = batch_index
            mark[1] = now
            mark[0] = self._doing = _FORWARD
            group = self._param_group
            if group is not None:
                lr = group["lr"]
                self._row[5] = lr if type(lr) is float else host_float(lr)
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def _marked(self, method: Callable[..., Any], phase: int) -> Callable[..., Any]:
        """``method``, which enters ``phase``. It lasts until the next mark."""

        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            try:
                now = _clock()
                self._spent[self._doing] += now - self._since
                self._since = now
                mark = self._mark
                mark[1] = now
                mark[0] = self._doing = phase
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            return method(*args, **kwargs)

        return marked

    def _enter_phase(self, phase: int) -> None:
        """Charge the time since the last mark to the phase that ends, and enter ``phase``.

        What runs every batch has these lines written out.
        """
        now = _clock()
        self._spent[self._doing] += now - self._since
        self._since = now
        mark = self._mark
        mark[1] = now
        mark[0] = self._doing = phase

    def _watch_manual_optimization(self, manual: Any) -> None:
        step_done = manual._on_after_step

        def on_after_step() -> None:
            step_done()
            self._enter_phase(_FORWARD)

        manual._on_after_step = on_after_step

    def restart_clock(self) -> None:
        """What happened since the last batch (validation, a pause, an epoch's end) is no part of a
        step."""
        self._spent[:] = _NO_TIME
        self._doing = _BATCH_END
        self._since = self._step_began = _clock()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch's row, and now and then a look at what is rarer.

        A field that did not change still stands in the row.
        """
        try:
            now = _clock()
            spent = self._spent
            spent[self._doing] += now - self._since
            if now >= self._look_due:
                self._look(trainer, now)
            pulse, mark, row = self._pulse, self._mark, self._row
            step = self._steps.completed
            self.stepped = step != self.global_step
            if self.stepped:
                self.global_step = pulse.global_step = mark[3] = step
            row[0] = step  # by StepField
            row[2] = batch_idx
            listed = type(batch) is self._list_type and len(batch) > 0
            first = batch[0] if listed else batch
            # A tensor without dimensions has no length.
            sized = type(first) is self._tensor_type and first.ndim
            row[3] = len(first) if sized else self._samples_of(batch)
            loss = _NAN
            if type(outputs) is dict and "loss" in outputs:
                factor = trainer.accumulate_grad_batches if self._scaled_loss else 1
                if self._on_cuda:
                    self._send_loss(outputs["loss"], factor)
                else:
                    loss = outputs["loss"].item() * factor
                    if loss - loss != 0.0:
                        self._note_loss(loss)
            row[4] = loss
            row[6] = (now - self._step_began) * 1e-9
            row[7] = spent[4] * 1e-9  # by Phase: fetch, forward, backward, optimizer, transfer
            row[8] = spent[6] * 1e-9
            row[9] = spent[7] * 1e-9
            row[10] = spent[8] * 1e-9
            row[15] = spent[5] * 1e-9
            row[13] = now * 1e-9 + self._wall_offset_s
            row[14] = self.stepped
            self._publish(now)
            spent[4] = spent[5] = spent[6] = spent[7] = spent[8] = 0
            self._since = self._step_began = now
            self._next_batch = batch_idx + 1
            mark[1] = now
            mark[0] = self._doing = pulse.current_phase = _BATCH_END
        except Exception as error:  # noqa: BLE001
            self.stepped = True  # for all that is known
            self._failed(error)

    def _samples_of(self, batch: Any) -> float:
        """``count_samples``; remembers a plain structure so that the next batch need not be
        searched."""
        samples = count_samples(batch)
        kind = type(batch)
        listed = kind in (list, tuple) and len(batch) > 0
        if type(batch[0] if listed else batch) is torch.Tensor:
            self._list_type, self._tensor_type = kind if listed else None, torch.Tensor
        return samples

    def _note_loss(self, loss: float) -> None:
        if not self._nonfinite_told:
            self._nonfinite_told = True
            where = f"at step {self.global_step} on rank {self._channel.rank}"
            self._channel.event("note", f"The loss became {loss} {where}.")

    def _send_loss(self, loss: torch.Tensor, factor: int) -> None:
        """Through the staged path: published when the copy has come, by a later call."""
        if loss is None or loss.numel() != 1:
            return
        tensor = loss.detach().reshape(1)
        place = f'"step":{self.global_step},"epoch":{self._epoch},"t":{time.time():.6f}'
        label = f'{{"names":["train/loss"],{place}}}'
        queue = self._channel.queue
        queue.put(
            tensor.double() * factor if factor != 1 else tensor.double(), _METRICS, label.encode()
        )
        queue.flush_staged()

    # What is rarer than a batch.

    def _look(self, trainer: Any, now: int) -> None:
        self._look_due = now + _LOOK_EVERY_NS
        self._wall_offset_s = time.time() - now * 1e-9
        # Lightning has put this batch's metrics nowhere yet: these are of the batch before.
        self._metrics.send(trainer, self.global_step, self._epoch)
        if self._on_cuda and now >= self._memory_due:
            self._memory_due = now + _MEMORY_EVERY_NS
            self._row[StepField.MEMORY_BYTES] = torch.cuda.memory_allocated()
            self._row[StepField.MEMORY_PEAK_BYTES] = torch.cuda.max_memory_allocated()

    def send_metrics(self, trainer: Any) -> None:
        self._metrics.send(trainer, trainer.global_step, self._pulse.epoch)

    def forget_metrics(self) -> None:
        self._metrics.forget()

    # Longer phases.

    def enter(self, phase: Phase) -> None:
        self._pulse.set(phase=phase)

    def ended(self, outcome: Outcome) -> None:
        self._pulse.set(outcome=outcome)

    def off(self, error: BaseException) -> None:
        """The last thing that a failing telemetry does, as far as it still can."""
        self._pulse.set(telemetry_ok=False)
        text = f"{type(error).__name__}: {error}"
        self._channel.event("telemetry_off", f"Telemetry switched itself off ({text}).", error=text)


def silence_idle_profiler(trainer: Any) -> bool:
    """Whether nobody profiles: Lightning's own profiler does nothing, and its context managers
    around every hook, some fifty microseconds a step, are then put out. Another profiler, also one
    that is given to the trainer later, is left as it is."""
    profiler = trainer.profiler
    kind = type(profiler)
    lightnings = kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    if not lightnings or kind.__name__ != "PassThroughProfiler":
        return False
    profiler.profile = contextlib.nullcontext  # gives the action's name, as ``profile`` does
    return True


def count_samples(batch: Any) -> float:
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
            # The truth of a tensor on a GPU would be waited for.
            if not isinstance(shape, torch.Tensor) and shape:
                return float(shape[0])
            for size in (getattr(batch, "num_graphs", None), getattr(batch, "batch_size", None)):
                if isinstance(size, int) and size:
                    return float(size)
            if not is_dataclass(batch) or isinstance(batch, type):
                return _NAN
            values = (getattr(batch, field.name, None) for field in fields(batch))
            batch = next((value for value in values if value is not None), None)
    return _NAN


def host_float(value: Any) -> float:
    """A learning rate as a number; NaN where it stands on a device that would be waited for."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return _NAN
    return float(value)
