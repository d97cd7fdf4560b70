"""METRICS records: values that the user's program logs, on any device, at one step.

Up to ``MAX_VALUES`` values of a step are sent one by one. Beyond that, the values of each metric
are combined into windows (count, mean, lowest, highest and last), so that a program that logs very
much overruns neither the queue nor the history.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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
    """The record of a set of names, which is used again for each row of numbers."""

    __slots__ = ("fields", "place", "publish")

    def __init__(self, channel: Channel, names: Names) -> None:
        head = f'{{"names":{_to_json(names)},'.encode()
        row = channel.queue.row(_METRICS, len(names), len(head) + _PLACE_BYTES + 1)
        row.label[:] = head + bytes(_PLACE_BYTES) + b"}"
        self.place = row.label[len(head) : -1]
        self.fields, self.publish = row.fields, row.publish


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
        place = _place(step, epoch, t)
        if self._send_again(values, place):
            return
        numbers, tensors = _split(values)
        if numbers:
            names = (*numbers,)
            self._channel.queue.put_vector([*numbers.values()], _METRICS, _label(names, place))
            if not tensors and len(numbers) == len(values):
                if len(self._records) >= _MAX_RECORDS:
                    self._records.clear()
                self._records[names] = _Record(self._channel, names)
        if tensors:
            for (names, _, _), parts in _groups(tensors):
                self._channel.queue.put(torch.stack(parts), _METRICS, _label(names, place))

    def _send_again(self, values: Mapping[str, Any], place: str) -> bool:
        """Send numbers whose names were sent together before. Return False if they were not.

        A half of what ``put_vector`` costs is to frame the record.
        """
        record = self._records.get((*values,))
        if record is None or len(place) > _PLACE_BYTES:
            return False
        fields, index = record.fields, 0
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
        record.place[:] = place.ljust(_PLACE_BYTES).encode()
        record.publish(time.monotonic_ns())
        return True

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
        place = _place(window.step, window.epoch, window.t)
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
            label = _label(names[first : first + MAX_VALUES], place)
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
        self._channel.event_from_rank_0("warning", text, step=window.step, remedy=remedy)


def _split(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the values that can be read at once as numbers, and the tensors on a device."""
    numbers: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if type(value) is torch.Tensor:
            if value.numel() != 1:
                continue
            if value.is_cpu:
                numbers[name] = value.item()
            elif value.is_cuda:
                tensors[name] = value
        elif isinstance(value, (int, float)):
            numbers[name] = float(value)
        elif isinstance(value, torch.nn.Parameter):
            more_numbers, more_tensors = _split({name: value.data})
            numbers.update(more_numbers)
            tensors.update(more_tensors)
    return numbers, tensors


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Group, list[torch.Tensor]]]:
    """Return the tensors of each type and device, which are stacked there into one copy."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        groups.setdefault((value.device, value.dtype), {})[name] = (
            value.detach() if value.ndim == 0 else value.detach().reshape(())
        )
    return [(((*group,), *key), [*group.values()]) for key, group in groups.items()]


def _place(step: int, epoch: int | None, t: float) -> str:
    return f'"step":{step},"epoch":{"null" if epoch is None else epoch},"t":{t:.6f}'


def _label(names: Names, place: str) -> bytes:
    return f'{{"names":{_to_json(names)},{place}}}'.encode()


@functools.lru_cache
def _to_json(names: Names) -> str:
    return json.dumps(names)
