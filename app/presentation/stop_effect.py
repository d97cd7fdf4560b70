"""What a stop does to a run: every text that promises a checkpoint asks here. Pure.

A run saves a checkpoint when it is stopped if Lightning trains it, or if its program has said how
(``ltui_rank.on_checkpoint``, Hugging Face's Trainer). Any other program is ended by a signal.
"""

from __future__ import annotations

from ltui.training.state.run_snapshot import RunSnapshot

_NOT_KNOWN_YET = "whether with a checkpoint is known once it trains"


def stop_effect(snapshot: RunSnapshot | None) -> str:
    """Return what a stop does, to follow ``Ctrl-C``: ``stops it with a checkpoint``.

    ``snapshot`` is None before the run is known.
    """
    if snapshot is None or snapshot.saves_checkpoints is None:
        return f"stops it ({_NOT_KNOWN_YET})"
    if snapshot.saves_checkpoints:
        return "stops it with a checkpoint"
    return f"ends it by {snapshot.stop_signal}, without a checkpoint"


def stop_progress(snapshot: RunSnapshot | None) -> str:
    """Return what happens while the run stops: ``stopping with a checkpoint``."""
    if snapshot is None or snapshot.saves_checkpoints is None:
        return "stopping"
    if snapshot.saves_checkpoints:
        return "stopping with a checkpoint"
    return f"ending it by {snapshot.stop_signal}, without a checkpoint"
