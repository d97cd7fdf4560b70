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
from dataclasses import dataclass
from typing import Any

import torch

from ltui.training.rank import torch_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.live_profile import exclude_from_profile
from ltui.training.rank.telemetry import count_samples, host_float
from ltui.training.shared.record_types import Phase, StepField

_OTHER_STEPS = 16
"""Steps of another optimizer without one of the first, after which that one counts."""
_MAX_FETCHES = 64
"""Alternations of loaders between two backward passes that are told apart."""
_PERIODIC_NS = 500_000_000
"""Nanoseconds between reads of the wall clock and of the allocated memory."""

_REPORTED_NS = 50_000_000
"""Nanoseconds from which on a validation is reported."""

clock = time.monotonic_ns

# Plain numbers: reading a member from an enumeration takes a call.
_COMPUTE, _FETCH, _OPTIMIZER = int(Phase.COMPUTE), int(Phase.FETCH), int(Phase.OPTIMIZER)
_VALIDATION, _CHECKPOINT = int(Phase.VALIDATION), int(Phase.CHECKPOINT)
_ROW_GLOBAL_STEP, _ROW_STEP_S = int(StepField.GLOBAL_STEP), int(StepField.STEP_S)
_ROW_FETCH_S, _ROW_OPTIMIZER_S = int(StepField.FETCH_S), int(StepField.OPTIMIZER_S)
_ROW_SAMPLES, _ROW_LR = int(StepField.SAMPLES), int(StepField.LR)
_ROW_WALL_S, _ROW_STEPPED = int(StepField.WALL_S), int(StepField.STEPPED)


def batch_samples(batch: Any, iterator: Any) -> float:
    """Return how many samples are in a batch that ``iterator`` of a DataLoader returned.

    The tensors of a dictionary may count other things, such as the boxes in its images, and a list
    may hold the samples themselves. Where that is not clear from the types, the batch size of the
    loader tells; NaN if nothing does.
    """
    if type(batch) is torch.Tensor:
        return float(batch.shape[0]) if batch.ndim else 1.0
    if not isinstance(batch, (Mapping, list, tuple)) or not batch:
        return count_samples(batch)
    size = torch_internals.loader_batch_size(iterator)
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    lengths = {int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.ndim}
    if not isinstance(batch, Mapping):
        listed, is_sure = _listed_samples(batch)
        collated = count_samples(batch)
        if listed is not None and (is_sure or listed == size != collated):
            return float(listed)
        if listed is not None and size != collated != listed:
            return math.nan
        if len(lengths) < 2:
            return collated
    if len(lengths) == 1 and size in (None, 1):  # a loader of size 1 may return whole batches
        return float(lengths.pop())
    if size is None:
        return math.nan
    # Only the last batch of a pass may be smaller.
    return float(max((n for n in lengths if n <= size), default=size))


def _listed_samples(batch: list[Any] | tuple[Any, ...]) -> tuple[int | None, bool]:
    """Return the number of samples if ``batch`` may be a list of samples, and whether it is one.

    Else its values are batches themselves. It may also be turned: ``tuple(zip(*samples))``.
    """
    if all(isinstance(each, Mapping) for each in batch):
        return len(batch), True
    count, inner = len(batch), list(batch)
    lists = [each for each in batch if isinstance(each, (list, tuple))]
    if len(lists) == len(batch) and len({len(each) for each in lists}) == 1 and lists[0]:
        if len({(type(each), getattr(each, "ndim", None)) for each in lists[0]}) == 1:
            count = len(lists[0])  # it is turned
        inner = [each for values in lists for each in values]
    elif lists:
        return None, False
    lengths = {e.shape[0] if isinstance(e, torch.Tensor) and e.ndim else None for e in inner}
    are_images = all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in inner)
    is_sure = bool(lists or are_images) and (len(lengths) > 1 or None in lengths)
    return (count, is_sure) if are_images or is_sure else (None, False)


@dataclass(slots=True)
class _Fetches:
    """Batches that the program fetched one after another, and has not trained with so far."""

    iterator: int
    """The id of the iterator of the DataLoader."""
    is_evaluated: bool
    """True if gradients are disabled, or the model is in evaluation mode."""
    began: int
    """When the first of them was asked for (ns)."""
    ended: int = 0
    fetch_ns: int = 0
    samples: float = 0.0
    count: int = 0
    is_over: bool = False
    """True if the iterator has no further batch."""
    has_backward: bool = False
    """True if a backward pass followed."""

    def is_training(self, last: _Fetches, *, all_train: bool) -> bool:
        """Return True if the step is made with these batches, and ``last`` are those before it.

        ``all_train``: no backward pass tells which batches are trained with.
        """
        if self is last:
            return not (self.is_evaluated and self.is_over)
        if self.is_over:
            return all_train and not self.is_evaluated
        if self.iterator == last.iterator:
            return not self.is_evaluated or self.has_backward
        return not self.is_evaluated and (all_train or self.count <= last.count)


class StepTelemetry:
    """Measures the steps of one rank.

    ``module`` is a part of the model that the optimizer trains: outside of its training mode the
    program evaluates.
    ``step_ended`` is called with the number of each step, and returns True if it has waited.
    ``send_waiting`` is called twice a second at most. ``failed`` is called with an error in the
    telemetry, which is then off.
    """

    __slots__ = (
        *("_channel", "_device", "_failed", "_fetch_ns", "_fetched", "_fetches", "_first"),
        *("_has_backward", "_loads", "_mark", "_module", "_optimizer_began", "_optimizer_ns"),
        *("_other_steps", "_periodic_due", "_publish", "_pulse", "_row", "_samples"),
        *("_send_waiting", "_step_began", "_step_ended", "_thread", "_wall_offset_s"),
        "global_step",
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
        row = channel.step_row()
        self._publish, self._row = row.publish, row.fields
        row.fields[_ROW_STEPPED] = 1.0
        self._first = id(optimizer)
        self._other_steps: dict[int, int] = {}
        """How often each other optimizer has stepped since the first one did."""
        self._thread = threading.get_ident()
        self._loads = False
        """True if the training has fetched a batch from a DataLoader."""
        self._fetched = False
        """True if the step that goes on has."""
        self._fetches: list[_Fetches] = []
        """Batches of which it is not decided yet if they belong to the step or to a validation."""
        self._has_backward = False
        """True if the step that goes on has made a backward pass."""
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
            if self._fetches:
                self._assign_fetches(all_train=not self._has_backward)
            self._has_backward = False
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

    def _newest_fetches(self, iterator: Any, began: int, *, is_evaluated: bool) -> _Fetches:
        """Return what a batch belongs to that was asked for at ``began``."""
        if self._fetches:
            last = self._fetches[-1]
            is_same = (last.iterator, last.is_evaluated) == (id(iterator), is_evaluated)
            if is_same and not last.is_over:
                return last
            if len(self._fetches) >= _MAX_FETCHES:
                del self._fetches[1]
        self._fetches.append(_Fetches(id(iterator), is_evaluated, began))
        return self._fetches[-1]

    def _end_pass(self, iterator: Any, began: int, fetch_ns: int) -> None:
        """Note that ``iterator`` had no further batch at ``began``."""
        self._fetch_ns += fetch_ns
        for each in self._fetches:
            if each.iterator == id(iterator):
                each.is_over = True
        if self._fetches and self._fetches[-1].iterator == id(iterator):
            self._fetches[-1].ended = began

    def marked_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``torch.autograd.backward``, which tells the batches that are trained with."""

        @functools.wraps(backward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._note_backward()
            return backward(*args, **kwargs)

        return marked

    def _note_backward(self) -> None:
        self._has_backward = True
        if self._fetches:
            last = self._fetches[-1]
            last.has_backward = True
            if not last.is_evaluated:  # else the step decides
                self._assign_fetches(all_train=False)

    def _assign_fetches(self, *, all_train: bool) -> None:
        """Add the fetched batches to the step, or exclude the time of their validation from it.

        Some programs leave the evaluation mode after they have fetched the next batch.
        """
        fetches, self._fetches = self._fetches, []
        last = fetches[-1]
        validation_began: int | None = None
        evaluated = {each.iterator for each in fetches if each.is_evaluated} - {last.iterator}
        for each in fetches:
            each.is_evaluated |= each.iterator in evaluated
            if each.is_training(last, all_train=all_train):
                if validation_began is not None:
                    self._exclude_validation(validation_began, each.began)
                    validation_began = None
                if not self._loads:
                    self._loads, self._samples = True, 0.0
                self._fetched = True
                self._fetch_ns += each.fetch_ns
                self._samples += each.samples
            elif validation_began is None:
                validation_began = each.began
        if validation_began is not None:
            self._exclude_validation(validation_began, last.ended)
        if last.is_evaluated and not self._is_in_training_mode():
            self._module = None  # it trains in evaluation mode, so that the mode says nothing

    def _exclude_validation(self, began: int, ended: int) -> None:
        """Exclude the time of a validation from the step in which it runs.

        A step of accumulated gradients keeps what it has done before. If it had not begun, what
        prepares the validation, such as the start of its workers, is excluded too.
        """
        if not self._fetched:
            began, self._fetch_ns = self._step_began, 0
        self._step_began += ended - began
        exclude_from_profile(began, ended)
        if ended - began >= _REPORTED_NS:
            self._report_validation((ended - began) * 1e-9, ended)

    def program_ends(self) -> None:
        """Report the validations after the last step, which no later step tells apart.

        A single batch that is not evaluated is one that the training no longer needed.
        """
        fetches, self._fetches = self._fetches if self._thread else [], []
        evaluated = {each.iterator for each in fetches if each.is_evaluated}
        passes: dict[int, list[_Fetches]] = {}
        for each in fetches:
            if not each.has_backward and (each.iterator in evaluated or each.count > 1):
                passes.setdefault(each.iterator, []).append(each)
        for parts in passes.values():
            seconds = (parts[-1].ended - parts[0].began) * 1e-9
            if seconds * 1e9 >= _REPORTED_NS:
                self._report_validation(seconds, parts[-1].ended)

    def _report_validation(self, seconds: float, ended: int) -> None:
        try:
            ended_at = time.time() - (time.monotonic_ns() - ended) * 1e-9
            text = f"Validation took {seconds:.1f} s."
            self._channel.event_from_rank_0("phase", text, seconds=seconds, ended=ended_at)
        except Exception as error:  # noqa: BLE001
            self._failed(error)

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

        A batch belongs to a validation if it is fetched where gradients are disabled, while the
        model is in evaluation mode, or if no backward pass follows it.
        """

        @functools.wraps(fetch)
        def timed(iterator: Any) -> Any:
            if threading.get_ident() != self._thread:
                return fetch(iterator)
            began, mark = clock(), self._mark
            training = torch.is_grad_enabled() and self._is_in_training_mode()
            mark[1] = began
            mark[0] = _FETCH if training else _VALIDATION
            try:
                batch = fetch(iterator)
            except StopIteration:
                self._end_pass(iterator, began, clock() - began if training else 0)
                raise
            finally:
                now = clock()
                mark[1] = now
                mark[0] = _COMPUTE if training else _VALIDATION
            last = self._newest_fetches(iterator, began, is_evaluated=not training)
            last.ended = now
            last.fetch_ns += now - began
            last.samples += batch_samples(batch, iterator)
            last.count += 1
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
            began = mark[1] = clock()
            mark[0] = _CHECKPOINT
            try:
                result = save(obj, f, *args, **kwargs)
            finally:
                mark[1] = clock()
                mark[0] = phase
                exclude_from_profile(began, mark[1])
            if isinstance(f, (str, os.PathLike)):
                self._report_saved(os.fspath(f), (mark[1] - began) * 1e-9)
            return result

        return marked

    def _report_saved(self, path: Any, seconds: float) -> None:
        """Send that the program wrote a file, which may be a checkpoint."""
        try:
            path = os.path.abspath(os.fsdecode(path))
            if path.startswith(f"{self._channel.environment.checkpoints_dir}{os.sep}"):
                return  # a part of a checkpoint that ltui reports
            text = f"The program saved {path}."
            self._channel.event(
                "script_checkpoint",
                text,
                path=path,
                global_step=self.global_step,
                epoch=None,
                seconds=seconds,
            )
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def switch_off(self) -> None:
        """Do nothing any more; torch may still call the hooks."""
        self._thread = 0
