"""The base of all dialogs, how a screen closes itself alone, and how it gets a worker's result."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.dom import DOMNode
from textual.errors import NoWidget
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.widgets import Static
from textual.worker import get_current_worker

from ltui.app.keys.ordered_input import OrderedKeysApp, is_closing
from ltui.widgets.make_bindings import bindings


class ClosableScreen(Screen[ScreenResultType]):
    """A screen that may be closed twice, and before it was drawn.

    Textual removes the top screen, whichever it is: of two keys that close a screen, the second one
    would close the screen below, and the last screen cannot be closed at all.
    """

    # As on most terminals. Textual applies all styles again when it adds the class later.
    DEFAULT_CLASSES = "-high"

    async def on_event(self, event: events.Event) -> None:
        # A screen that was closed before it was mounted has no widgets to set up.
        if not (isinstance(event, events.Mount) and is_closing(self)):
            # A click that came before the terminal became smaller may be outside the screen.
            with contextlib.suppress(NoWidget):
                await super().on_event(event)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        stack = self.app.screen_stack
        if self not in stack[1:]:
            return AwaitComplete()
        # What is above is closed first.
        for _ in stack[stack.index(self) + 1 :]:
            self.app.pop_screen()
        return super().dismiss(result)

    def replace_by(self, screen: Screen[Any]) -> None:
        """Show another screen in place of this one, which is the top one.

        The first screen of the app stays below, because Textual cannot replace it.
        """
        if self is self.app.screen_stack[0]:
            self.app.push_screen(screen)
        else:
            self.app.switch_screen(screen)


class Dialog(ModalScreen[ScreenResultType], ClosableScreen[ScreenResultType]):
    """A dialog above a screen. The keys of the app do not reach it, except those for help."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,f1", "app.help", show=False),
    ]
    _key_at = math.inf
    """Time of the app's clock at which the key or the click came that opened the dialog."""

    def on_mount(self) -> None:
        self._key_at = self._keys.input_at

    @property
    def _keys(self) -> OrderedKeysApp:
        return cast(OrderedKeysApp, self.app)

    @property
    def is_typed_at_once(self) -> bool:
        """Whether all keys since the one that opened the dialog came without a pause, as those of a
        text that was meant for another window do."""
        return not self._keys.had_pause(self._key_at)


class FullScreen(ClosableScreen[ScreenResultType]):
    """A screen that is not painted while another one hides it."""

    @property
    def is_current(self) -> bool:
        """Return whether the user sees this screen, perhaps through the ones above it.

        Textual takes every screen right below the top one as visible. It would then paint the whole
        terminal again whenever something changes on the hidden screen.
        """
        if not super().is_current:
            return False
        stack = self.app.screen_stack
        above = stack[stack.index(self) + 1 :]
        return all(screen.styles.background.a < 1 for screen in above)


TYPED_AT_ONCE = "Nothing was done: the keys came in one go. Wait a moment, then press Enter."
"""Notice if Enter in a form is ignored because of ``is_typed_at_once``."""


class ConfirmScreen(Dialog[bool]):
    """Return True for ``y`` only, and False for every other key.

    So a sentence that was meant for another window answers no. A ``y`` is ignored, and the question
    stays, unless it comes half a second after the question was painted and after the last key. A
    click on an answer is treated in the same way. ``n`` and Escape work at once.
    """

    ANSWERS: ClassVar[frozenset[str]] = frozenset({"answer", "app.help"})
    """Actions of keys that do not close the question."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "confirm",
        """
        y          | answer(True)  | yes | Do it
        n,escape,q | answer(False) | no  | Cancel
        """,
    )

    def __init__(self, question: str, *, yes: str, no: str = "cancel") -> None:
        super().__init__()
        self.question = question
        self._opened_at = math.inf
        """Time of the app's clock at which the question was first painted."""
        self.answers = [("y", yes, "answer(True)"), ("n or Esc", no, "answer(False)")]
        """Keys with their meaning, and what a click on them does."""

    def compose(self) -> ComposeResult:
        keys = Text()
        for key, meaning, action in self.answers:
            start = len(keys)
            keys.append(key, "bold")
            keys.append(f" {meaning}")
            keys.apply_meta({"@click": f"screen.{action}"}, start, len(keys))
            keys.append("     ")
        with Vertical(classes="dialog"):
            yield Static(Text(self.question), id="question")
            yield Static(keys, id="answers")

    def on_mount(self) -> None:
        self.call_after_refresh(self._painted)

    def _painted(self) -> None:
        self._opened_at = self._keys.clock()

    def on_key(self, event: events.Key) -> None:
        active = self.active_bindings.get(event.key)
        if active is not None and active.binding.action.partition("(")[0] in self.ANSWERS:
            return
        event.stop()
        if not self._keys.is_repeat:
            self.dismiss(False)

    def action_answer(self, yes: bool) -> None:
        if not yes or self._keys.follows_pause(self._opened_at):
            self.dismiss(yes)


def do_after(node: DOMNode, question: ConfirmScreen, action: Callable[[], object]) -> None:
    """Ask, and carry out ``action`` if the answer is yes."""

    def answered(yes: bool | None) -> None:
        if yes:
            action()

    node.app.push_screen(question, answered)


class CountQuestion(ConfirmScreen):
    """A question about several things, which takes their number and Enter in place of ``y``."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "count_question",
        """
        enter | answer(True) | number | Do it, after the number was typed
        """,
    )

    def __init__(self, question: str, count: int, *, yes: str, no: str = "cancel") -> None:
        super().__init__(question, yes=yes, no=no)
        self._count, self._typed = str(count), ""
        self.answers[0] = (f"{count} and Enter", yes, "answer(True)")

    def on_mount(self) -> None:
        self._show_typed()

    def _show_typed(self) -> None:
        text = f"{self.question}\nType the number of runs, {self._count}, and Enter: {self._typed}▏"
        self.query_one("#question", Static).update(Text(text))

    def on_key(self, event: events.Key) -> None:
        if event.key == "backspace":
            self._typed = self._typed[:-1]
        elif event.is_printable and (event.character or "").isdecimal():
            self._typed += event.character or ""
        else:
            return
        event.prevent_default()
        event.stop()
        self._show_typed()

    def action_answer(self, yes: bool) -> None:
        if yes and self._typed == self._count and not self._keys.had_pause(self._opened_at):
            return
        self.dismiss(yes and self._typed == self._count)


class ProblemScreen(Dialog[None]):
    """A list of problems, each with its remedy, after an action has failed."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "problem",
        """
        escape,enter,q,space | dismiss | close | Back
        """,
    )

    def __init__(self, title: str, lines: list[str]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -bad"):
            yield Static(Text(self._title, "bold"), id="question")
            for line in self._lines:
                yield Static(Text(f"✗ {line}"), classes="problem")
            yield Static(Text("Enter or Esc: close"), id="answers")


def call_screen(node: DOMNode, function: Callable[..., Any], *values: object) -> None:
    """Call ``function`` on the event loop, unless the worker was cancelled or the screen of
    ``node`` is being closed."""
    worker = get_current_worker()

    def call() -> Any:
        return None if worker.is_cancelled or is_closing(node) else function(*values)

    if not worker.is_cancelled and node.app.is_running:
        node.app.call_from_thread(call)


def error_lines(error: Exception) -> list[str]:
    """Return the problems of an error, one line each; an unexpected error with its type."""
    # Imported here: the first frame shows no problem.
    from ltui.training.problem import ProblemError

    if isinstance(error, ProblemError):
        return [str(problem) for problem in error.problems]
    return [f"{type(error).__name__}: {error}"]


def show_error(node: DOMNode, title: str, error: Exception) -> None:
    """Show the problems of an action that failed in the worker's thread."""
    lines = error_lines(error)
    call_screen(node, lambda: node.app.push_screen(ProblemScreen(title, lines)))
