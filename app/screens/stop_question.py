"""The questions before a run is stopped or killed: their keys are easily pressed by mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from ltui.app.screens.confirm import ConfirmScreen
from ltui.training.state.good_checkpoints import last_good_checkpoint, nan_since
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.widgets import formats
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name


class StopScreen(ConfirmScreen):
    """Return True for ``y``, and for a second ``s``."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "stop_question",
        """
        s | dismiss(True) | stop | Stop the run
        """,
    )

    def __init__(self, question: str, *, it: str = "it") -> None:
        """``it``: "them" for several runs."""
        super().__init__(question, yes=f"(or s) stop {it}", no=f"keep {it} running")


def stop_question(snapshot: RunSnapshot) -> str:
    """Explain what a stop does, and how to resume the run."""
    name = clean_name(snapshot.name)
    if snapshot.saves_checkpoints is None:
        return (
            f"Stop {name}?\n"
            "It has not begun to train, so ltui does not know if it can save a checkpoint.\n"
            f"Now it would end by {snapshot.stop_signal}, without one."
        )
    if not snapshot.saves_checkpoints:
        return (
            f"Stop {name}?\n"
            f"It ends by {snapshot.stop_signal}, without a checkpoint: the program has not told\n"
            "ltui how to save one. Only what it saves itself is kept."
        )
    return (
        f"Stop {name}?\n"
        "It saves a checkpoint after the current step, then it ends.\n"
        "To continue it later, press r."
    )


def question_for_several(runs: str, snapshots: Sequence[RunSnapshot]) -> str:
    """Explain what a stop of several runs does. ``runs``: what they are called."""
    ends = "Each saves a checkpoint after its current step, then it ends."
    unsaved = sum(not snapshot.saves_checkpoints for snapshot in snapshots)
    if unsaved == len(snapshots):
        ends = "Each ends by a signal. ltui cannot save checkpoints of these programs."
    elif unsaved:
        ends += f"\nltui cannot do that for {unsaved} of them: these end by a signal."
    return f"Stop {runs}?\n{ends}"


def kill_question(snapshot: RunSnapshot) -> str:
    """Explain what is lost if the run is killed."""
    name = clean_name(snapshot.name)
    saved = last_good_checkpoint(snapshot.checkpoints, nan_since(snapshot.verdicts))
    if saved is None:
        lost = "It has no good checkpoint. All its progress will be lost."
    else:
        done = max(0, (snapshot.global_step or saved.global_step) - saved.global_step)
        steps = "step" if done == 1 else "steps"
        lost = (
            f"Its last good checkpoint is from step {formats.step(saved.global_step)}: "
            f"{formats.count(done)} {steps} will be lost."
        )
    gentle = "by a signal" if not snapshot.saves_checkpoints else "with a checkpoint"
    instead = f"To stop it {gentle} instead, press s on the run's screen."
    return f"Kill {name}? All its processes end at once.\n{lost}\n{instead}"
