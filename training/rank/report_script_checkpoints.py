"""Send the checkpoints that a script saves itself, for example with a ``ModelCheckpoint``.

Called when a checkpoint was saved, never for a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

from ltui.training.rank.channel import Channel
from ltui.training.rank.tuner_fits import is_tuner_checkpoint
from ltui.training.shared.record_types import Phase


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
