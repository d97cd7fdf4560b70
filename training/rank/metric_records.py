"""METRICS records: values that a program logs, on any device, and the rows of Lightning.

Up to ``MAX_VALUES`` values of a step are sent one by one. Beyond that, the values of each metric
are combined into windows (count, mean, lowest, highest and last), so that a program that logs very
much overruns neither the queue nor the history.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ltui.training.rank import lightning_internals
from ltui.training.rank.channel import Channel
from ltui.training.shared.record_types import RecordKind

MAX_VALUES = 1000
"""Values of one step that are sent one by one."""
_MAX_ROWS = 1000
"""Rows of one step that a window combines."""
_MAX_RECORDS = 64
"""Sets of names whose records are kept."""
_PLACE_BYTES = 96
"""Bytes for step, epoch and time in the label of a record that is used again."""
_METRICS = int(RecordKind.METRICS)
_TENSOR = torch.Tensor

Names = tuple[str, ...]
Group = tuple[Names, torch.device | None, torch.dtype | None]
"""Names of values of one type on one device; None for numbers."""


@dataclass(slots=True)
class _Window:
    """Combined rows of the same names. The tensors have one element for each name."""

    rows: int
    """Rows after which the window ends."""
    first_step: int
    step: int
    epoch: int | None
    t: float
    total: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    last: torch.Tensor
    count: int = 1

    def add(self, vector: torch.Tensor) -> None:
        self.total = self.total + vector
        # A NaN shows in the mean and does not hide the extremes of the other values.
        self.low, self.high = torch.fmin(self.low, vector), torch.fmax(self.high, vector)
        self.last = vector
        self.count += 1


class _Record:
    """The record of a set of names, which is used again for each row of numbers.

    To frame it each time would double the cost.
    """

    __slots__ = ("_fields", "_place", "_publish")

    def __init__(self, channel: Channel, names: Names) -> None:
        head = f'{{"names":{_to_json(names)},'.encode()
        row = channel.queue.row(_METRICS, len(names), len(head) + _PLACE_BYTES + 1)
        row.label[:] = head + bytes(_PLACE_BYTES) + b"}"
        self._place = row.label[len(head) : -1]
        self._fields, self._publish = row.fields, row.publish

    def send(self, values: Mapping[str, Any], place: str) -> bool:
        """Send numbers. Return False if one of the values is none that can be read at once."""
        fields, index = self._fields, 0
        try:
            for value in values.values():
                if type(value) is _TENSOR:
                    if not value.is_cpu:
                        return False
                    fields[index] = value.item()
                else:
                    fields[index] = value
                index += 1
        except (RuntimeError, TypeError, ValueError):  # not one number
            return False
        self._place[:] = place.ljust(_PLACE_BYTES).encode()
        self._publish(time.monotonic_ns())
        return True


class MetricSender:
    """Sends the logged values of one rank. A value on a GPU is copied without waiting for it."""

    __slots__ = ("_announced", "_channel", "_records", "_step", "_values", "_windows")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._records: dict[Names, _Record] = {}
        self._step = -1
        self._values = 0
        """Values of this step so far."""
        self._windows: dict[Group, _Window] = {}
        self._announced = False

    def send(
        self, values: Mapping[str, Any], step: int, epoch: int | None, t: float | None = None
    ) -> None:
        """Send numbers and tensors of one element; anything else is left out.

        ``t`` is the time at which they were logged, by default now. Raises ``ValueError`` if a
        record is too large for the queue.
        """
        t = t or time.time()
        if step != self._step:
            self._step, self._values = step, 0
            if self._windows:
                self._end_windows(of_one_step=True)
        self._values += len(values)
        if self._values > MAX_VALUES:
            self._combine(values, step, epoch, t)
            return
        place = record_place(step, epoch, t)
        record = self._records.get((*values,))
        if record is not None and record.send(values, place):
            return
        numbers, tensors = _split(values)
        if numbers:
            self._record_of((*numbers,)).send(numbers, place)
        for (names, _, _), parts in _groups(tensors):
            self._channel.queue.put(torch.stack(parts), _METRICS, record_label(names, place))

    def _record_of(self, names: Names) -> _Record:
        record = self._records.get(names)
        if record is None:
            if len(self._records) >= _MAX_RECORDS:
                self._records.clear()
            record = self._records[names] = _Record(self._channel, names)
        return record

    def flush(self) -> None:
        """Send the windows that are not complete."""
        if self._windows:
            self._end_windows()

    # Windows.

    def _combine(self, values: Mapping[str, Any], step: int, epoch: int | None, t: float) -> None:
        numbers, tensors = _split(values)
        rows = _MAX_ROWS if len(values) <= MAX_VALUES else -(-len(values) // MAX_VALUES)
        if numbers:
            vector = torch.tensor([*numbers.values()], dtype=torch.float64)
            self._add_row(((*numbers,), None, None), vector, rows, step, epoch, t)
        for group, parts in _groups(tensors):
            self._add_row(group, torch.stack(parts).double(), rows, step, epoch, t)

    def _add_row(
        self, group: Group, vector: torch.Tensor, rows: int, step: int, epoch: int | None, t: float
    ) -> None:
        window = self._windows.get(group)
        if window is None:
            window = _Window(rows, step, step, epoch, t, vector, vector, vector, vector)
            self._windows[group] = window
        else:
            window.step, window.epoch, window.t = step, epoch, t
            window.add(vector)
        if window.count >= window.rows:
            self._send_window(group[0], self._windows.pop(group))

    def _end_windows(self, *, of_one_step: bool = False) -> None:
        """Send open windows: all, or those that combine the rows of one step."""
        for group, window in [*self._windows.items()]:
            if not of_one_step or window.rows == _MAX_ROWS:
                self._send_window(group[0], self._windows.pop(group))

    def _send_window(self, names: Names, window: _Window) -> None:
        place = record_place(window.step, window.epoch, window.t)
        if window.count > 1:
            self._announce(len(names), window)
            place += f',"first_step":{window.first_step},"count":{window.count}'
            mean = window.total / window.count
            table = torch.stack([mean, window.low, window.high, window.last])
        else:
            table = window.last.reshape(1, -1)
        for first in range(0, len(names), MAX_VALUES):
            part = table[:, first : first + MAX_VALUES]
            if window.count == 1:
                part = part[0]
            label = record_label(names[first : first + MAX_VALUES], place)
            self._channel.queue.put(part, _METRICS, label)

    def _announce(self, values: int, window: _Window) -> None:
        if self._announced:
            return
        self._announced = True
        text = (
            f"More than {MAX_VALUES:,} values are logged in a step ({values:,} at once at step "
            f"{window.step}), so ltui combines up to {window.rows:,} values of a metric: it keeps "
            "their count, mean, lowest, highest and last value."
        )
        remedy = "Log fewer values, or less often, to have each of them."
        self._channel.warn_from_rank_0(text, remedy, step=window.step)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the values that can be read at once as numbers, and the tensors on a device."""
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            numbers[name] = float(value)
            continue
        if type(value) is not _TENSOR and isinstance(value, torch.nn.Parameter):
            value = value.data
        if type(value) is not _TENSOR or value.numel() != 1 or value.is_complex():
            continue
        if value.is_cpu:
            numbers[name] = value.item()
        elif value.is_cuda:
            tensors[name] = value
    return numbers, tensors


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Group, list[torch.Tensor]]]:
    """Return the tensors of each type and device, which are stacked there into one copy."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        groups.setdefault((value.device, value.dtype), {})[name] = (
            value.detach() if value.ndim == 0 else value.detach().reshape(())
        )
    return [(((*group,), *key), [*group.values()]) for key, group in groups.items()]


def record_place(step: int, epoch: int | None, t: float) -> str:
    """Return step, epoch and unix time as a part of a label."""
    return f'"step":{step},"epoch":{"null" if epoch is None else epoch},"t":{t:.6f}'


def record_label(names: Names, place: str) -> bytes:
    """Return the label of a METRICS record."""
    return f'{{"names":{_to_json(names)},{place}}}'.encode()


@functools.lru_cache
def _to_json(names: Names) -> str:
    return json.dumps(names)


Row = Mapping[str, Any]
"""Names and values, which are tensors of one element or numbers."""


class LoggedMetrics:
    """Sends the values that a module and callbacks log, row by row as a logger gets them.

    A row is taken where Lightning makes it: after a batch in which the optimizer stepped, after a
    batch or the end of an evaluation, and at the end of an epoch. So ltui has the rows of a logger
    with ``log_every_n_steps=1``. Nothing is computed here, because computing an epoch's metric may
    be a collective.

    Values that reach no logger (``logger=False``, or a callback that sets ``callback_metrics``) are
    read from where Lightning keeps values for callbacks. It replaces a value by one in other
    memory, so that tells a new value.
    """

    __slots__ = ("_batch_row", "_connector", "_row", "_sent", "flush", "send")

    def __init__(self, channel: Channel) -> None:
        sender = MetricSender(channel)
        self.send, self.flush = sender.send, sender.flush
        self._connector: Any = None
        self._row: Row = {}
        """What Lightning last read from the results of the training."""
        self._batch_row: Row = {}
        """The row of the last batch of the training that was sent."""
        self._sent: dict[str, Any] = {}
        """Values for callbacks that were sent."""

    def ignore_present(self, trainer: Any) -> None:
        """Treat every present value as sent: a resume has restored it from a checkpoint."""
        connector = lightning_internals.logger_connector(trainer)
        self._sent = dict(lightning_internals.callback_table(connector))

    def watch(
        self,
        trainer: Any,
        steps_completed: Callable[[], int],
        active_finder: Callable[[], object],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Send every row from now on, except those of batches of the training.

        ``active_finder`` returns a true value while a trial of Lightning's Tuner runs, whose values
        do not belong to the run. ``failed`` is called with an error.
        """
        connector = self._connector = lightning_internals.logger_connector(trainer)
        results, log = lightning_internals.training_results(trainer), connector.log_metrics
        read = results.metrics

        def metrics(on_step: bool) -> Any:
            values = read(on_step)
            self._row = values["log"]
            return values

        @functools.wraps(log)
        def log_metrics(row: Row, *args: Any, **kwargs: Any) -> None:
            try:
                send_row(row)
            except Exception as error:  # noqa: BLE001
                failed(error)
            log(row, *args, **kwargs)

        def send_row(row: Row) -> None:
            in_batch = lightning_internals.is_within_batch(connector)
            if (in_batch and (row is self._row or not row)) or active_finder():
                return  # the row of a batch of the training was sent when the batch ended
            step = steps_completed() + lightning_internals.is_accumulating(trainer)
            if in_batch:  # of an evaluation
                self.send(row, step, trainer.current_epoch)
            else:
                self._send_row(row, step, trainer.current_epoch)
                self.flush()

        results.metrics, connector.log_metrics = metrics, log_metrics

    def send_batch(self, step: int, epoch: int) -> None:
        """Send the row of the batch of the training that has just ended."""
        row = self._batch_row = self._row
        table = lightning_internals.callback_table(self._connector)
        # The table has every name of the row.
        if len(table) != len(row):
            row = self._with_others(row, table)
        if row:
            self.send(row, step, epoch)

    def _send_row(self, row: Row, step: int, epoch: int) -> None:
        table = lightning_internals.callback_table(self._connector)
        all_values = self._with_others(row, table)
        self._sent.update(table)
        if all_values:
            self.send(all_values, step, epoch)

    def _with_others(self, row: Row, table: Row) -> Row:
        """Return ``row`` with the values for callbacks that it lacks and that are new."""
        sent, new = self._sent, {}
        for name, value in table.items():
            if name not in row and (old := sent.get(name)) is not value:
                sent[name] = value
                if old is None or _memory(old) != _memory(value):
                    new[name] = value
        if not new:
            return row
        # The same value under another name (``loss`` for ``loss_step``), or of a batch of the
        # training, which was sent or only accumulated gradients.
        rows = (row, self._row, self._batch_row)
        in_rows = {_memory(value) for values in rows for value in values.values()}
        new = {name: value for name, value in new.items() if _memory(value) not in in_rows}
        return {**row, **new}


def _memory(value: Any) -> int:
    """Return what identifies a value: Lightning makes new tensors of the same memory."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)
