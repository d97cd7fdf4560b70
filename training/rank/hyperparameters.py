"""Send a script's hyperparameters, once, when training begins."""

from __future__ import annotations

import json
import os
from typing import Any

from ltui.training.rank.channel import Channel

MAX_HYPERPARAMETERS = 100
MAX_VALUE = 200
"""Characters of one value."""
MAX_BYTES = 8000
"""Bytes of all values together: a record must be small compared with the ring."""
_PRIVATE_PREFIX = "_"
"""Prefix of LightningCLI's own entries."""


def send_hyperparameters(channel: Channel, trainer: Any, module: Any) -> None:
    """Send what ``save_hyperparameters`` stored for the module and its data module."""
    values: dict[str, Any] = {}
    for owner in (getattr(trainer, "datamodule", None), module):
        for name, value in dict(getattr(owner, "hparams", None) or {}).items():
            if not str(name).startswith(_PRIVATE_PREFIX):
                values[str(name)[:MAX_VALUE]] = _plain_value(value)
    sent: dict[str, Any] = {}
    size = 0
    for name, value in list(values.items())[:MAX_HYPERPARAMETERS]:
        size += len(json.dumps({name: value}))
        if size > MAX_BYTES:
            break
        sent[name] = value
    if sent:
        channel.event("hyperparameters", "", values=sent)


def _plain_value(value: Any) -> Any:
    """Return a number, a boolean, None or a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike, list, tuple, dict)):
        return str(value)[:MAX_VALUE]
    return type(value).__name__
