"""The questions before a run is stopped or killed: their keys are easily pressed by mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType

from ltui.app.presentation.notifications import stopping_sentence
from ltui.app.screens.confirm import ConfirmScreen
from ltui.training.state.good_checkpoints import last_good_checkpoint, nan_since
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name


class InterruptScreen(ConfirmScreen):
    """The question of Ctrl-C: stop the run, close ltui, or stay. Return True for a stop."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "interrupt_question",
        """
        q | leave | close | Close ltui; training continues
        """,
    )

    def __init__(self, question: str, *, can_stop: bool) -> None:
        super().__init__(question, yes="stop it", no="stay")
        self.answers[1:1] = [("q", "close, training continues", "leave")]
        self.answers[-1] = ("Esc", "stay", "answer(False)")
        self._can_stop = can_stop
        if not can_stop:
            del self.answers[0]

    def action_answer(self, yes: bool) -> None:
        if not yes or self._can_stop:
            super().action_answer(yes)

    async def action_leave(self) -> None:
        if not self.is_deaf:
            await self.app.run_action("leave")


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


def interrupt_question(name: str, snapshot: RunSnapshot | None) -> InterruptScreen:
    """Return the question of Ctrl-C about a live run, or about one that is not known yet."""
    if snapshot is None:
        return InterruptScreen(f"Stop {name}?", can_stop=True)
    if snapshot.state is RunState.STOPPING:
        return InterruptScreen(f"{stopping_sentence(snapshot)}.", can_stop=False)
    return InterruptScreen(stop_question(snapshot), can_stop=True)


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
    instead = f"To stop it {gentle} instead, press Esc, then s."
    return f"Kill {name}? All its processes end at once.\n{lost}\n{instead}"
