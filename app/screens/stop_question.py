"""The question before a run is stopped: ``s`` is easily pressed by mistake."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType

from ltui.app.keys.key_table import bindings
from ltui.app.screens.confirm import ConfirmScreen
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name


class StopScreen(ConfirmScreen):
    """Returns True for ``y``, and for a second ``s``."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "stop_question",
        """
        s | answer(True) | stop | Stop the run
        """,
    )

    def __init__(self, question: str) -> None:
        super().__init__(question, yes="(or s) stop it", no="keep it running")


def stop_question(snapshot: RunSnapshot) -> str:
    """Say what a stop does, and how to undo it."""
    step = snapshot.global_step
    now = f" (now at step {formats.step(step)})" if step else ""
    return (
        f"Stop {clean_name(snapshot.name)}?\n"
        f"It saves a checkpoint after the current step{now}, then it ends.\n"
        "To continue it later, press r."
    )
