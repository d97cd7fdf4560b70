"""The telemetry of a program without a Trainer: one STEP row for each optimizer step.

It sees what torch calls for every program: the hooks before and after an optimizer's step, the
iterators of DataLoader, and ``torch.save``. All of it runs inside of the training loop, so it must
be cheap and must never wait: no lock, no I/O except stores to mapped memory, no synchronisation of
the device.

A step ends when the program's first optimizer has stepped. Other optimizers step together with it,
unless they step many times without it: then the program has gone on to another one.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ltui.training.rank import torch_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.telemetry import count_samples, host_float
from ltui.training.shared.record_types import Phase, RecordKind, StepField

_OTHER_STEPS = 16
"""Steps of another optimizer without one of the first, after which that one counts."""
_PERIODIC_NS = 500_000_000
"""Nanoseconds between reads of the wall clock and of the allocated memory."""

clock = time.monotonic_ns

# Plain numbers: reading a member from an enumeration takes a call.
_STEP = int(RecordKind.STEP)
_COMPUTE, _FETCH, _OPTIMIZER = int(Phase.COMPUTE), int(Phase.FETCH), int(Phase.OPTIMIZER)
_VALIDATION, _CHECKPOINT = int(Phase.VALIDATION), int(Phase.CHECKPOINT)
_ROW_GLOBAL_STEP, _ROW_STEP_S = int(StepField.GLOBAL_STEP), int(StepField.STEP_S)
_ROW_FETCH_S, _ROW_OPTIMIZER_S = int(StepField.FETCH_S), int(StepField.OPTIMIZER_S)
_ROW_SAMPLES, _ROW_LR = int(StepField.SAMPLES), int(StepField.LR)
_ROW_WALL_S, _ROW_STEPPED = int(StepField.WALL_S), int(StepField.STEPPED)


def batch_samples(batch: Any, iterator: Any) -> float:
    """Return how many samples are in a batch that ``iterator`` of a DataLoader returned.

    The tensors of a dictionary may count other things, such as the boxes in its images. Then the
    batch size of the loader tells which; NaN if nothing does.
    """
    if type(batch) is torch.Tensor:
        return float(batch.shape[0]) if batch.ndim else 1.0
    if not isinstance(batch, (Mapping, list, tuple)):
        return count_samples(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    lengths = {int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.ndim}
    if len(lengths) < 2 and not isinstance(batch, Mapping):
        return count_samples(batch)
    size = torch_internals.loader_batch_size(iterator)
    if len(lengths) == 1 and size in (None, 1):  # a loader of size 1 may return whole batches
        return float(lengths.pop())
    if size is None:
        return math.nan
    # Only the last batch of a pass may be smaller.
    return float(max((n for n in lengths if n <= size), default=size))


class StepTelemetry:
    """Measures the steps of one rank.

    ``module`` is a part of the model that the optimizer trains: outside of its training mode the
    program evaluates.
    ``step_ended`` is called with the number of each step, and returns True if it has waited.
    ``send_waiting`` is called twice a second at most. ``failed`` is called with an error in the
    telemetry, which is then off.
    """

    __slots__ = (
        *("_channel", "_device", "_failed", "_fetch_ns", "_fetched", "_first", "_loads", "_mark"),
        *("_module", "_optimizer_began", "_optimizer_ns", "_other_steps", "_periodic_due"),
        *("_publish", "_pulse", "_row", "_samples", "_send_waiting", "_step_began"),
        *("_step_ended", "_thread", "_validated_ns", "_validating", "_validation_began"),
        *("_validation_samples", "_wall_offset_s", "global_step"),
    )

    def __init__(
        self,
        channel: Channel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        module: torch.nn.Module | None,
        step_ended: Callable[[int], bool],
        send_waiting: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._channel, self._device = channel, device
        self._step_ended, self._send_waiting, self._failed = step_ended, send_waiting, failed
        self._pulse, self._mark = channel.pulse, channel.pulse.mark
        row = channel.queue.row(_STEP, len(StepField))
        self._publish, self._row = row.publish, row.fields
        for field in StepField:
            row.fields[field] = math.nan
        row.fields[_ROW_STEPPED] = 1.0
        self._first = id(optimizer)
        self._other_steps: dict[int, int] = {}
        """How often each other optimizer has stepped since the first one did."""
        self._thread = threading.get_ident()
        self._loads = False
        """True if the training has fetched a batch from a DataLoader."""
        self._fetched = False
        """True if the step that goes on has."""
        self._validating = False
        self._validation_began = self._validated_ns = 0
        """When the last validation began, and when its newest batch was there."""
        self._validation_samples = 0.0
        """Samples of the newest batch of a validation."""
        self._module: weakref.ref[torch.nn.Module] | None = None
        """Held weakly, so that the program can free its memory."""
        if module is not None and module.training:  # else the program trains in evaluation mode
            self._module = weakref.ref(module)
        self._samples = math.nan
        self._fetch_ns = self._optimizer_ns = self._optimizer_began = 0
        self._periodic_due = 0
        self._wall_offset_s = 0.0
        self.global_step = 1
        """Steps that the program has made."""
        self._step_began = clock()

    # The optimizer.

    def before_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Begin the phase of the optimizer. A hook of torch."""
        if threading.get_ident() == self._thread:
            now, mark = clock(), self._mark
            self._optimizer_began = now
            mark[1] = now
            mark[0] = _OPTIMIZER

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Send the row of the step, and pass the boundary behind it. A hook of torch."""
        if threading.get_ident() != self._thread:
            return
        try:
            now, mark, row = clock(), self._mark, self._row
            self._optimizer_ns += now - self._optimizer_began
            if id(optimizer) != self._first and not self._follows(optimizer):
                mark[1] = now
                mark[0] = _COMPUTE
                return
            if self._other_steps:
                self._other_steps.clear()
            if self._validating:
                self._end_validation()
            step = self.global_step = self.global_step + 1
            if now >= self._periodic_due:
                self._do_periodic(now)
            row[_ROW_GLOBAL_STEP] = step
            row[_ROW_STEP_S] = (now - self._step_began) * 1e-9
            if self._loads:
                row[_ROW_FETCH_S] = self._fetch_ns * 1e-9
                row[_ROW_SAMPLES] = self._samples
                self._fetch_ns, self._samples = 0, 0.0
                self._fetched = False
            row[_ROW_OPTIMIZER_S] = self._optimizer_ns * 1e-9
            lr = optimizer.param_groups[0]["lr"]
            row[_ROW_LR] = lr if type(lr) is float else host_float(lr)
            row[_ROW_WALL_S] = now * 1e-9 + self._wall_offset_s
            self._publish(now)
            self._optimizer_ns = 0
            self._step_began = now
            mark[3] = self._pulse.global_step = step
            mark[1] = now
            mark[0] = self._pulse.phase = _COMPUTE
        except Exception as error:  # noqa: BLE001
            self._failed(error)
            return
        if self._step_ended(step):
            self.restart()

    def _follows(self, optimizer: Any) -> bool:
        """Return True if this optimizer has taken the place of the first one.

        Its earlier steps count then.
        """
        own_steps = self._other_steps[id(optimizer)] = self._other_steps.get(id(optimizer), 0) + 1
        if own_steps <= _OTHER_STEPS:
            return False
        self._first = id(optimizer)
        self.global_step += _OTHER_STEPS
        return True

    def restart(self) -> None:
        """Exclude the time since the last step (a pause) from the next one."""
        self._step_began = clock()
        self._fetch_ns = self._optimizer_ns = 0
        self._fetched = False
        self._samples = 0.0 if self._loads else math.nan

    def _end_validation(self) -> None:
        """Note that the program has stepped with a batch that seemed to belong to a validation.

        Some programs leave the evaluation mode after they have fetched the next batch.
        """
        self._validating = False
        self._exclude_validation(self._validated_ns)
        if self._loads:
            self._samples += self._validation_samples
        if not self._is_in_training_mode():
            self._module = None  # it trains in evaluation mode, so that the mode says nothing

    def _exclude_validation(self, ended_ns: int) -> None:
        """Exclude the time of a validation from the step in which it runs.

        A step of accumulated gradients keeps what it has done before. If it had not begun, what
        prepares the validation, such as the start of its workers, is excluded too.
        """
        began = self._validation_began if self._fetched else self._step_began
        self._step_began += ended_ns - began

    def _is_in_training_mode(self) -> bool:
        module = None if self._module is None else self._module()
        return module is None or module.training

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the following steps."""
        self._row[StepField.EPOCH] = epoch

    def _do_periodic(self, now: int) -> None:
        self._periodic_due = now + _PERIODIC_NS
        self._wall_offset_s = time.time() - now * 1e-9
        if self._device.type == "cuda":
            self._row[StepField.MEMORY_BYTES] = torch.cuda.memory_allocated(self._device)
            self._row[StepField.MEMORY_PEAK_BYTES] = torch.cuda.max_memory_allocated(self._device)
        self._send_waiting()

    # Data and checkpoints.

    def timed_fetch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``__next__`` of DataLoader's iterators, with the wait for data measured.

        A batch belongs to a validation if it is fetched where gradients are disabled, or while the
        model is in evaluation mode.
        """

        @functools.wraps(fetch)
        def timed(iterator: Any) -> Any:
            if threading.get_ident() != self._thread:
                return fetch(iterator)
            began, mark = clock(), self._mark
            training = torch.is_grad_enabled() and self._is_in_training_mode()
            if training:
                if self._validating:
                    self._exclude_validation(began)
            elif not self._validating:
                self._validation_began = began
            self._validating = not training
            mark[1] = began
            mark[0] = _FETCH if training else _VALIDATION
            try:
                batch = fetch(iterator)
            finally:
                now = clock()
                mark[1] = now
                mark[0] = _COMPUTE if training else _VALIDATION
                if training:
                    self._fetch_ns += now - began
                else:
                    self._validated_ns = now
            samples = batch_samples(batch, iterator)
            if not training:
                self._validation_samples = samples
                return batch
            if not self._loads:
                self._loads, self._samples = True, 0.0
            self._fetched = True
            self._samples += samples
            return batch

        return timed

    def marked_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``torch.save`` as a phase of its own, which reports the files that it wrote."""

        @functools.wraps(save)
        def marked(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return save(obj, f, *args, **kwargs)
            mark = self._mark
            phase = mark[0]
            mark[1] = clock()
            mark[0] = _CHECKPOINT
            try:
                result = save(obj, f, *args, **kwargs)
            finally:
                mark[1] = clock()
                mark[0] = phase
            if isinstance(f, (str, os.PathLike)):
                self._report_saved(os.fspath(f))
            return result

        return marked

    def _report_saved(self, path: Any) -> None:
        """Send that the program wrote a file, which may be a checkpoint."""
        try:
            path = os.path.abspath(os.fsdecode(path))
            if path.startswith(f"{self._channel.environment.checkpoints_dir}{os.sep}"):
                return  # a part of a checkpoint that ltui reports
            text = f"The program saved {path}."
            self._channel.event(
                "script_checkpoint", text, path=path, global_step=self.global_step, epoch=None
            )
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def switch_off(self) -> None:
        """Do nothing any more; torch may still call the hooks."""
        self._thread = 0
