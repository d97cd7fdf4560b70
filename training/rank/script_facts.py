"""Send a script's hyperparameters and the checkpoints that it saves itself.

Called when training begins and when a checkpoint was saved, never for a step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Any

from ltui.training.rank.rank_queue import Channel
from ltui.training.rank.tuner_fits import is_tuner_checkpoint
from ltui.training.tensor_queue.record_types import Phase

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


def report_saved_checkpoints(trainer: Any, channel: Channel) -> None:
    """Show the checkpoint phase while a ModelCheckpoint saves, and report the file."""
    save, pulse = trainer.save_checkpoint, channel.pulse

    @functools.wraps(save)
    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tuner_checkpoint(filepath):
            return save(filepath, *args, **kwargs)
        phase_before = pulse.phase
        pulse.set(phase=Phase.CHECKPOINT)
        try:
            saved = save(filepath, *args, **kwargs)
        finally:
            pulse.set(phase=phase_before)
        with contextlib.suppress(Exception):  # only shown in the dashboard
            _send_saved_checkpoint(channel, trainer, filepath)
        return saved

    trainer.save_checkpoint = save_checkpoint


def _send_saved_checkpoint(channel: Channel, trainer: Any, path: Any) -> None:
    """Send that the script or one of its own callbacks saved the checkpoint ``path``."""
    text = os.fspath(path)
    callback = next((c for c in trainer.checkpoint_callbacks if _has_saved(c, text)), None)
    scores = getattr(callback, "best_k_models", None) or {}
    value = scores.get(text)
    channel.event_from_rank_0(
        "script_checkpoint",
        f"The script saved {text}.",
        # A path with a scheme is not a file of this machine.
        path=text if "://" in text else os.path.abspath(text),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        metric=getattr(callback, "monitor", None) if value is not None else None,
        value=None if value is None else float(value),
        best=value is not None and getattr(callback, "best_model_path", None) == text,
        last=getattr(callback, "last_model_path", None) == text,
    )


def _has_saved(callback: Any, path: str) -> bool:
    return path in (getattr(callback, "best_k_models", None) or {}) or path in (
        getattr(callback, "best_model_path", None),
        getattr(callback, "last_model_path", None),
    )
