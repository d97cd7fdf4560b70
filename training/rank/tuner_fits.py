"""Fits that Lightning's Tuner makes to find a learning rate or a batch size.

They train on trial and are undone afterwards. So they are no place to stop and leave no checkpoint
of ltui's; what they are is reported as an event, and their batches move the pulse.
"""

from __future__ import annotations

import os
from typing import Any

_FILES = (".lr_find_", ".scale_batch_size_")
"""How the Tuner's own temporary checkpoints begin."""


def active_finder(trainer: Any, callback: Any) -> str | None:
    """The finder that trains now; None where the user's training does.

    The Tuner puts all callbacks aside for its trials: the learning rate finder puts one of its own
    in their place, the batch size finder none.
    """
    callbacks = trainer.callbacks
    if any(c is callback for c in callbacks):
        return None
    finds_rate = any(type(c).__name__ == "_LRCallback" for c in callbacks)
    return "learning rate finder" if finds_rate else "batch size finder"


def is_tuner_checkpoint(filepath: Any) -> bool:
    """Whether a checkpoint is the Tuner's own, which it removes again."""
    return os.path.basename(str(filepath)).startswith(_FILES)
