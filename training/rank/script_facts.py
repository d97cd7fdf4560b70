"""What a script says of itself besides metrics: hyperparameters, and the checkpoints it saves.

Called when training begins and when a checkpoint was saved, never for a step.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ltui.training.rank.rank_queue import Channel

MAX_HYPERPARAMETERS = 100
MAX_VALUE = 200
"""Characters of a value."""
MAX_BYTES = 8000
"""Of all values together: a record must stay small beside the ring."""
_PRIVATE = "_"
"""LightningCLI's own entries begin with this."""


def send_hyperparameters(channel: Channel, trainer: Any, module: Any) -> None:
    """Send what ``save_hyperparameters`` kept of the module and of its data."""
    values: dict[str, Any] = {}
    for owner in (getattr(trainer, "datamodule", None), module):
        for name, value in dict(getattr(owner, "hparams", None) or {}).items():
            if not str(name).startswith(_PRIVATE):
                values[str(name)[:MAX_VALUE]] = _plain(value)
    kept: dict[str, Any] = {}
    size = 0
    for name, value in list(values.items())[:MAX_HYPERPARAMETERS]:
        size += len(json.dumps({name: value}))
        if size > MAX_BYTES:
            break
        kept[name] = value
    if kept:
        channel.event("hyperparameters", "", values=kept)


def _plain(value: Any) -> Any:
    """A number, a truth value or a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike, list, tuple, dict)):
        return str(value)[:MAX_VALUE]
    return type(value).__name__


def send_saved_checkpoint(channel: Channel, trainer: Any, path: Any) -> None:
    """Send that the script, or a callback of its own, saved the checkpoint ``path``."""
    text = os.fspath(path)
    kept = next((c for c in trainer.checkpoint_callbacks if _holds(c, text)), None)
    scores = getattr(kept, "best_k_models", None) or {}
    value = scores.get(text)
    channel.event(
        "script_checkpoint",
        f"The script saved {text}.",
        # A path with a scheme is no file of this machine.
        path=text if "://" in text else os.path.abspath(text),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        metric=getattr(kept, "monitor", None) if value is not None else None,
        value=None if value is None else float(value),
        best=value is not None and getattr(kept, "best_model_path", None) == text,
        last=getattr(kept, "last_model_path", None) == text,
    )


def _holds(callback: Any, path: str) -> bool:
    return path in (getattr(callback, "best_k_models", None) or {}) or path in (
        getattr(callback, "best_model_path", None),
        getattr(callback, "last_model_path", None),
    )
