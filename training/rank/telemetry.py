# ruff: noqa: ARG002  (the hooks' arguments are Lightning's)
"""The telemetry of a rank: its pulse, one STEP row for each batch, and the user's logged metrics.

Everything here runs inside of Lightning's training loop. So it must be cheap and must never wait:
no lock, no I/O except stores to mapped memory, no synchronisation of the device. A loss on a GPU is
sent as a METRICS record named ``train/loss`` when its copy has arrived, and its row contains NaN.

The time of a step is divided into phases by marks. Every mark adds the time since the last mark to
the phase that ends, and begins the next phase. The marks wrap methods of the Trainer's own objects,
because a callback hook costs twice as much. They are:

- the profiler hooks around ``next(iterator)``, which enclose exactly the wait for data, without the
  broadcast of Lightning that precedes it
- the logger connector's ``on_batch_start``
- the strategy's ``backward``
- the precision plugin's ``_after_closure``, which runs between the backward pass and the
  optimizer's step

The rest of the step belongs to no phase: callbacks, logging, and waiting for other ranks in
Lightning's own broadcast for each step.

Between two marks a part of a training step runs, which evicts most of this code from the CPU's
caches. So a mark costs as much as the memory that it touches. Therefore the classes have slots, the
code of a mark stands in every place that needs it, the row is filled in the buffer from which it is
sent, and there are fewer calls than elsewhere.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ltui.training.rank import lightning_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.metric_records import LoggedMetrics, record_label, record_place
from ltui.training.shared.record_types import Phase, RecordKind, StepField

clock = time.monotonic_ns

# Plain numbers: reading a member from an enumeration takes a call.
FETCH, TRANSFER, FORWARD = int(Phase.FETCH), int(Phase.TRANSFER), int(Phase.FORWARD)
BACKWARD, OPTIMIZER = int(Phase.BACKWARD), int(Phase.OPTIMIZER)
BATCH_END = int(Phase.BATCH_END)

_NO_TIME = [0] * len(Phase)


class PhaseClock:
    """The phase that a rank is in, and the time in each phase since the last batch ended.

    ``mark`` is ``PulseWriter.mark``, with the indices 0 phase, 1 time of its begin, 2 batch, 3
    global step. ``failed`` is called with an error in a mark.
    """

    __slots__ = (
        *("_before_fetch", "_failed", "doing", "mark", "next_batch", "profiling", "since"),
        *("spent", "step_began"),
    )

    def __init__(self, mark: Any, failed: Callable[[BaseException], None]) -> None:
        self.mark = mark
        self._failed = failed
        self.next_batch = 0
        self.profiling = True
        """True if a profiler is in use. Lightning's default profiler does nothing."""
        self.doing = self._before_fetch = BATCH_END
        """The phase that the time since the last mark belongs to."""
        self.since = self.step_began = clock()
        self.spent = list(_NO_TIME)
        """Nanoseconds in each phase since the end of the previous batch."""

    def restart(self) -> None:
        """Exclude the time since the last batch (validation, a pause) from the next step."""
        self.spent[:] = _NO_TIME
        self.doing = BATCH_END
        self.since = self.step_began = clock()

    def install_marks(self, trainer: Any) -> None:
        """Wrap the methods between which the phases lie, except for the start of a batch."""
        epoch_loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
        lightning_internals.wrap_fetch_hooks(epoch_loop, self._mark_fetch)
        strategy.backward = self._marked(strategy.backward, BACKWARD)
        lightning_internals.wrap_after_closure(
            strategy.precision_plugin, lambda method: self._marked(method, OPTIMIZER)
        )
        lightning_internals.wrap_after_manual_step(
            epoch_loop.manual_optimization, self._mark_manual_step
        )

    def _mark_fetch(
        self, before: Callable[[], None], after: Callable[[], None]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        def on_before_fetch() -> None:
            now, doing, mark = clock(), self.doing, self.mark
            self.spent[doing] += now - self.since
            self.since = now
            self._before_fetch = doing
            if doing == BATCH_END:
                mark[2] = self.next_batch
            mark[1] = now
            mark[0] = self.doing = FETCH
            if self.profiling:
                before()

        def on_after_fetch() -> None:
            if self.profiling:
                after()
            now, mark = clock(), self.mark
            self.spent[self.doing] += now - self.since
            self.since = now
            mark[1] = now
            # If the user's module iterates the loader itself, it fetches inside training_step.
            before_fetch = self._before_fetch
            mark[0] = self.doing = TRANSFER if before_fetch == BATCH_END else before_fetch

        return on_before_fetch, on_after_fetch

    def _marked(self, method: Callable[..., Any], phase: int) -> Callable[..., Any]:
        """Return a wrapper of ``method`` that enters ``phase``, which lasts until the next mark."""

        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            try:
                now = clock()
                self.spent[self.doing] += now - self.since
                self.since = now
                mark = self.mark
                mark[1] = now
                mark[0] = self.doing = phase
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            return method(*args, **kwargs)

        return marked

    def _mark_manual_step(self, after_step: Callable[[], None]) -> Callable[[], None]:
        def on_after_step() -> None:
            after_step()
            now, mark = clock(), self.mark
            self.spent[self.doing] += now - self.since
            self.since = now
            mark[1] = now
            mark[0] = self.doing = FORWARD

        return on_after_step


_NAN = math.nan
_PERIODIC_NS = 100_000_000
"""Nanoseconds between updates of the memory and the wall clock's offset."""
_MEMORY_NS = 500_000_000
"""Nanoseconds between reads of the allocated memory, for which torch builds a large dictionary."""

_METRICS = int(RecordKind.METRICS)

# Fields of the row as plain numbers: reading a member from an enumeration takes a call.
_ROW_GLOBAL_STEP, _ROW_BATCH = int(StepField.GLOBAL_STEP), int(StepField.BATCH)
_ROW_SAMPLES, _ROW_LOSS, _ROW_LR = int(StepField.SAMPLES), int(StepField.LOSS), int(StepField.LR)
_ROW_STEP_S, _ROW_FETCH_S = int(StepField.STEP_S), int(StepField.FETCH_S)
_ROW_TRANSFER_S, _ROW_FORWARD_S = int(StepField.TRANSFER_S), int(StepField.FORWARD_S)
_ROW_BACKWARD_S, _ROW_OPTIMIZER_S = int(StepField.BACKWARD_S), int(StepField.OPTIMIZER_S)
_ROW_WALL_S, _ROW_STEPPED = int(StepField.WALL_S), int(StepField.STEPPED)


class Telemetry:
    """Measures the training loop of one Trainer on one rank.

    Its ``on_...`` methods are Lightning's hooks. ``failed`` is called with an error in them or in
    the marks.
    """

    __slots__ = (
        *("_channel", "_epoch", "_failed", "_list_type", "_log_due", "_memory_due"),
        *("_nonfinite_reported", "_on_cuda", "_param_group", "_periodic_due", "_phases"),
        *("_publish", "_pulse", "_row", "_scaled_loss", "_steps", "_tensor_type"),
        *("_wall_offset_s", "global_step", "metrics", "stepped"),
    )

    def __init__(self, channel: Channel, failed: Callable[[BaseException], None]) -> None:
        self._channel = channel
        self._failed = failed
        self.metrics = LoggedMetrics(channel)
        self._pulse = channel.pulse
        self._phases = PhaseClock(channel.pulse.mark, failed)
        row = channel.step_row()
        self._publish, self._row = row.publish, row.fields
        self.global_step = 0
        self.stepped = False
        """True if the optimizer stepped in the batch that just ended. The callback resets it."""
        self._log_due = False
        """True if loggers get a row of the batch that just ended."""
        self._epoch = 0
        self._periodic_due = self._memory_due = 0
        self._wall_offset_s = 0.0
        self._on_cuda = False
        self._scaled_loss = True
        self._list_type: Any = None
        self._tensor_type: Any = None
        self._param_group: Mapping[str, Any] | None = None
        self._steps: Any = None
        self._nonfinite_reported = False

    # Objects of Lightning that a row needs. They are read once for each epoch, not for each batch.

    def attach(self, trainer: Any) -> None:
        """Read the counters and objects of the epoch that begins."""
        loop = trainer.fit_loop.epoch_loop
        automatic = trainer.lightning_module.automatic_optimization
        self._steps = (
            loop.automatic_optimization.optim_progress.optimizer.step.total
            if automatic
            else loop.manual_optimization.optim_step_progress.total
        )
        # In automatic optimization Lightning divides the returned loss by the number of batches
        # over which gradients are accumulated.
        self._scaled_loss = automatic
        self._on_cuda = trainer.strategy.root_device.type == "cuda"
        phases = self._phases
        phases.profiling = not lightning_internals.silence_idle_profiler(trainer)
        optimizers = trainer.optimizers
        self._param_group = optimizers[0].param_groups[0] if optimizers else None
        self._epoch = trainer.current_epoch
        self.global_step = self._steps.completed
        self._pulse.set(epoch=self._epoch, batch=0, global_step=self.global_step)
        phases.mark[2], phases.mark[3] = 0, self.global_step
        phases.next_batch = 0
        self._row[StepField.EPOCH] = self._epoch

    def install_marks(self, trainer: Any, active_finder: Callable[[], object]) -> None:
        """Wrap the methods between which the phases of a batch lie, and those that log values.

        ``active_finder`` returns a true value while a trial of Lightning's Tuner runs.
        """
        self._phases.install_marks(trainer)
        connector, state = lightning_internals.logger_connector(trainer), trainer.state
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        start, training = connector.on_batch_start, type(state.stage).TRAINING
        phases, pulse, row = self._phases, self._pulse, self._row

        @functools.wraps(start)
        def on_batch_start(*args: Any, **kwargs: Any) -> None:
            if state.stage is training:  # called for batches of a validation too
                try:
                    now = clock()
                    phases.spent[phases.doing] += now - phases.since
                    phases.since = now
                    mark = phases.mark
                    mark[2] = pulse.batch = batches.ready - 1
                    mark[1] = now
                    mark[0] = phases.doing = FORWARD
                    group = self._param_group
                    if group is not None:
                        lr = group["lr"]
                        row[_ROW_LR] = lr if type(lr) is float else host_float(lr)
                except Exception as error:  # noqa: BLE001
                    self._failed(error)
            start(*args, **kwargs)

        end, metrics = connector.on_batch_end, self.metrics

        def on_batch_end() -> None:
            end()
            if self._log_due:
                self._log_due = False
                try:
                    metrics.send_batch(self.global_step, self._epoch)
                except Exception as error:  # noqa: BLE001
                    self._failed(error)

        def steps_completed() -> int:
            return int(trainer.global_step if self._steps is None else self._steps.completed)

        connector.on_batch_start, connector.on_batch_end = on_batch_start, on_batch_end
        metrics.watch(trainer, steps_completed, active_finder, self._failed)

    def restart_clock(self) -> None:
        """Exclude the time since the last batch (validation, a pause) from the next step."""
        self._phases.restart()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send the batch's row, and periodically the memory.

        The row keeps the values of fields that did not change.
        """
        try:
            now, phases = clock(), self._phases
            spent = phases.spent
            spent[phases.doing] += now - phases.since
            if now >= self._periodic_due:
                self._do_periodic(now)
            pulse, mark, row = self._pulse, phases.mark, self._row
            step = self._steps.completed
            self.stepped = stepped = step != self.global_step
            if stepped:
                self.global_step = pulse.global_step = mark[3] = step
            # While gradients are accumulated, loggers get nothing.
            self._log_due = stepped or not self._scaled_loss
            row[_ROW_GLOBAL_STEP] = step
            row[_ROW_BATCH] = batch_idx
            listed = type(batch) is self._list_type and len(batch) > 0
            first = batch[0] if listed else batch
            # A tensor without dimensions has no length.
            sized = type(first) is self._tensor_type and first.ndim
            row[_ROW_SAMPLES] = len(first) if sized else self._count_samples(batch)
            loss = _NAN
            if type(outputs) is dict and "loss" in outputs:
                factor = trainer.accumulate_grad_batches if self._scaled_loss else 1
                value = outputs["loss"]
                if type(value) is not torch.Tensor:
                    value = local_value(value)
                if self._on_cuda:
                    self._send_loss(value, factor)
                elif value is not None:
                    loss = value.item() * factor
                    if loss - loss != 0.0:
                        self._report_nonfinite_loss(loss)
            row[_ROW_LOSS] = loss
            row[_ROW_STEP_S] = (now - phases.step_began) * 1e-9
            row[_ROW_FETCH_S] = spent[FETCH] * 1e-9
            row[_ROW_FORWARD_S] = spent[FORWARD] * 1e-9
            row[_ROW_BACKWARD_S] = spent[BACKWARD] * 1e-9
            row[_ROW_OPTIMIZER_S] = spent[OPTIMIZER] * 1e-9
            row[_ROW_TRANSFER_S] = spent[TRANSFER] * 1e-9
            row[_ROW_WALL_S] = now * 1e-9 + self._wall_offset_s
            row[_ROW_STEPPED] = stepped
            self._publish(now)
            spent[FETCH] = spent[TRANSFER] = 0
            spent[FORWARD] = spent[BACKWARD] = spent[OPTIMIZER] = 0
            phases.since = phases.step_began = now
            phases.next_batch = batch_idx + 1
            mark[1] = now
            mark[0] = phases.doing = pulse.phase = BATCH_END
        except Exception as error:  # noqa: BLE001
            self.stepped = True  # unknown: then the boundary must not be skipped
            self._failed(error)

    def _count_samples(self, batch: Any) -> float:
        """Call ``count_samples``, and remember a plain structure for the next batches."""
        samples = count_samples(batch)
        kind = type(batch)
        listed = kind in (list, tuple) and len(batch) > 0
        if type(batch[0] if listed else batch) is torch.Tensor:
            self._list_type, self._tensor_type = kind if listed else None, torch.Tensor
        return samples

    def _report_nonfinite_loss(self, loss: float) -> None:
        if not self._nonfinite_reported:
            self._nonfinite_reported = True
            where = f"at step {self.global_step} on rank {self._channel.rank}"
            word = str(loss).replace("nan", "NaN")
            self._channel.event("note", f"The loss became {word} {where}.")

    def _send_loss(self, loss: torch.Tensor | None, factor: int) -> None:
        """Send a loss from the GPU, in its own type. The next one publishes it, or any other
        record, if its copy has arrived by then."""
        if loss is None or loss.numel() != 1:
            return
        tensor = loss.detach().reshape(1)
        if factor != 1:
            tensor = tensor.double() * factor
        place = record_place(self.global_step, self._epoch, time.time())
        self._channel.queue.put(tensor, _METRICS, record_label(("train/loss",), place))

    # Less often than once for each batch.

    def _do_periodic(self, now: int) -> None:
        self._periodic_due = now + _PERIODIC_NS
        self._wall_offset_s = time.time() - now * 1e-9
        if self._on_cuda and now >= self._memory_due:
            self._memory_due = now + _MEMORY_NS
            self._row[StepField.MEMORY_BYTES] = torch.cuda.memory_allocated()
            self._row[StepField.MEMORY_PEAK_BYTES] = torch.cuda.max_memory_allocated()


def count_samples(batch: Any) -> float:
    """Return the length of the first tensor in ``batch``, or NaN if there is none."""
    try:
        return _first_length(batch)
    except Exception:  # noqa: BLE001  (the attributes of a user's batch may do anything)
        return _NAN


def _first_length(batch: Any) -> float:
    for _ in range(8):
        if isinstance(batch, torch.Tensor):
            return float(batch.shape[0]) if batch.ndim else 1.0
        if isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            shape = getattr(batch, "shape", None)
            # Converting a tensor on a GPU to a boolean would wait for the GPU.
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


def local_value(value: Any) -> Any:
    """Return a loss without other ranks: of a ``DTensor``, this rank's part.

    Return None if that is only a share of the value. To add up the shares is a collective.
    """
    placements = getattr(value, "placements", None)
    if placements is None:
        return value
    return value.to_local() if all(p.is_replicate() for p in placements) else None


def host_float(value: Any) -> float:
    """Return a learning rate as a number, or NaN if reading it would wait for a device."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return _NAN
    return float(value)
