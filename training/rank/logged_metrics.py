"""The user's ``self.log`` values on their way to the watchers.

Read from where Lightning has put them for callbacks, never computed here: computing an epoch's
metric may be a collective. A value that is replaced is another object, so "what is new" is told by
identity.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from ltui.training.rank.rank_queue import Channel
from ltui.training.tensor_queue.record_types import RecordKind


class LoggedMetrics:
    """Sends what is new among a Trainer's logged metrics."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._seen: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        self._seen = {}

    def send(self, trainer: Any, global_step: int, epoch: int) -> None:
        current = trainer._logger_connector._callback_metrics
        seen = self._seen
        new = {
            name: value
            for name, value in current.items()
            if seen.get(name) is not value and value.numel() == 1
        }
        if not new:
            return
        self._seen = dict(current)
        for values in _by_device(_without_aliases(new)):
            self._put(values, global_step, epoch)

    def _put(self, values: dict[str, torch.Tensor], global_step: int, epoch: int) -> None:
        label = {"names": list(values), "step": global_step, "epoch": epoch, "t": time.time()}
        # Stacked where they are: one copy off the device, staged by the queue.
        tensor = torch.stack([value.detach().reshape(()).double() for value in values.values()])
        self._channel.queue.put(tensor, RecordKind.METRICS, json.dumps(label).encode())


def _without_aliases(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``loss`` beside ``loss_step`` or ``loss_epoch`` is the same tensor twice: keep the exact
    name."""
    names: dict[int, str] = {}
    for name, value in metrics.items():
        known = names.get(id(value))
        if known is None or name in (f"{known}_step", f"{known}_epoch"):
            names[id(value)] = name
    return {name: metrics[name] for name in names.values()}


def _by_device(metrics: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    groups: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in metrics.items():
        groups.setdefault(value.device, {})[name] = value
    return list(groups.values())
