"""Send the values that the user's module logs with ``self.log``.

They are read from where Lightning stores them for callbacks. They are never computed here, because
computing an epoch's metric may be a collective. Lightning replaces a value by a new object, so a
changed identity means a new value.
"""

from __future__ import annotations

from typing import Any

import torch

from ltui.training.rank.channel import Channel
from ltui.training.rank.lightning_internals import callback_metrics
from ltui.training.rank.metric_records import send_metrics


class LoggedMetrics:
    """Sends the new ones among a Trainer's logged metrics."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sent: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Treat every value as new."""
        self._sent = {}

    def ignore_present(self, trainer: Any) -> None:
        """Treat every present value as sent: a resume has restored it from a checkpoint."""
        self._sent = dict(callback_metrics(trainer))

    def send(self, trainer: Any, global_step: int, epoch: int) -> None:
        """Send the metrics that are new since the last call."""
        current = callback_metrics(trainer)
        sent = self._sent
        new = {
            name: value
            for name, value in current.items()
            if sent.get(name) is not value and value.numel() == 1
        }
        if not new:
            return
        self._sent = dict(current)
        send_metrics(self._channel, _remove_aliases(new), global_step, epoch)


def _remove_aliases(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep one name for each tensor.

    Lightning stores the same tensor as ``loss`` and as ``loss_step`` or ``loss_epoch``; the longer
    name is kept.
    """
    names: dict[int, str] = {}
    for name, value in metrics.items():
        kept_name = names.get(id(value))
        if kept_name is None or name in (f"{kept_name}_step", f"{kept_name}_epoch"):
            names[id(value)] = name
    return {name: metrics[name] for name in names.values()}
