"""A run as ``ltui show --json`` and ``ltui runs --json`` print it. Pure.

It is the stored snapshot in the words and counts of the screens: epochs are counted from 1.
"""

from __future__ import annotations

from typing import Any

from ltui.app.presentation.snapshot_text import shown_epoch
from ltui.app.state_words import detail_words, state_word
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import RunSnapshot, head_json


def head_document(run: RunSnapshot) -> dict[str, Any]:
    """Return the run's part of ``ltui runs --json``."""
    return {**head_json(run), **_words(run)}


def run_document(run: RunSnapshot) -> dict[str, Any]:
    """Return everything that a snapshot holds."""
    document = {**to_json(run), **_words(run)}
    for part in (*document["ranks"], *document["checkpoints"], *document["script_checkpoints"]):
        if part.get("epoch") is not None:
            part["epoch"] += 1
    return document


def _words(run: RunSnapshot) -> dict[str, Any]:
    """Return the epoch as the screens count it, and the words for the state."""
    return {
        "epoch": shown_epoch(run),
        "state_word": state_word(run),
        "detail": detail_words(run),
    }
