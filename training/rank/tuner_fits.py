"""The trial fits with which Lightning's Tuner finds a learning rate or a batch size.

Lightning undoes them afterwards. Therefore a run does not stop in them, and ltui saves no
checkpoint there. An event says that a finder runs, and its batches update the pulse.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_TUNER_FILE_PREFIXES = (".lr_find_", ".scale_batch_size_")
"""Prefixes of the names of the Tuner's own temporary checkpoints."""


def active_finder(trainer: Any, callback: Any) -> str | None:
    """Return the name of the finder that trains now, or None during the user's training.

    The Tuner removes all callbacks for its trials. The learning rate finder adds one of its own
    instead, the batch size finder adds none.
    """
    callbacks = trainer.callbacks
    if any(c is callback for c in callbacks):
        return None
    finds_rate = any(type(c).__name__ == "_LRCallback" for c in callbacks)
    return "learning rate finder" if finds_rate else "batch size finder"


def is_tuner_checkpoint(filepath: Any) -> bool:
    """Return True for a temporary checkpoint of the Tuner, which it removes again."""
    return os.path.basename(str(filepath)).startswith(_TUNER_FILE_PREFIXES)


class TunerFits:
    """Sends an event when a finder begins and when it ends."""

    def __init__(self, send_phase_event: Callable[[str], None]) -> None:
        self.finder: str | None = None
        """The finder that is running."""
        self._send = send_phase_event

    def batch_ended(self, finder: str) -> None:
        """Record that ``finder`` has trained a batch."""
        if finder != self.finder:
            self.end()
            self.finder = finder
            self._send(f"The {finder} began its trial training.")

    def end(self) -> None:
        """Record that no finder runs any more."""
        if self.finder is not None:
            self._send(f"The {self.finder} ended.")
            self.finder = None
