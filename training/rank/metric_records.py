"""METRICS records: values that the user's program logs, on any device, at one step."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping

import torch

from ltui.training.rank.channel import Channel
from ltui.training.tensor_queue.record_types import RecordKind

_METRICS = int(RecordKind.METRICS)


def send_metrics(
    channel: Channel,
    values: Mapping[str, float | torch.Tensor],
    step: int,
    epoch: int | None,
    t: float | None = None,
) -> None:
    """Send ``values``, which are numbers or tensors of one element, one record for each device.

    ``t`` is the time at which they were logged, by default now. A value on a GPU is copied without
    waiting for it. Raises ``ValueError`` if a record is too large for the queue.
    """
    numbers: dict[str, float] = {}
    tensors: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault(value.device, {})[name] = value
        else:
            numbers[name] = value
    known_epoch = "null" if epoch is None else epoch
    place = f'"step":{step},"epoch":{known_epoch},"t":{t or time.time():.6f}'
    if numbers:
        channel.queue.put_vector([*numbers.values()], _METRICS, _label((*numbers,), place))
    for group in tensors.values():
        # Stacked on their device, so that the queue stages one copy off it.
        vector = torch.stack([value.detach().reshape(()).double() for value in group.values()])
        channel.queue.put(vector, _METRICS, _label((*group,), place))


def _label(names: tuple[str, ...], place: str) -> bytes:
    return f'{{"names":{_to_json(names)},{place}}}'.encode()


@functools.lru_cache
def _to_json(names: tuple[str, ...]) -> str:
    return json.dumps(names)
