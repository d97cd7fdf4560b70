"""Keys that arrive close together take effect in order, as an ssh connection delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from textual import events, on
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input

from ltui.app.keys.ordered_input import OrderedKeysApp


class Question(ModalScreen[str]):
    """A dialog with one field. Enter closes it."""

    AUTO_FOCUS = "*"

    def compose(self) -> ComposeResult:
        yield Input()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Form(OrderedKeysApp):
    AUTO_FOCUS = ""
    BINDINGS = [("d", "ask", "ask"), ("z", "note", "note")]  # noqa: RUF012 - Textual's way

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[str | None] = []
        self.noted = 0

    def compose(self) -> ComposeResult:
        yield Input("30", id="first", select_on_focus=False)
        yield Input("789", id="second", select_on_focus=False)

    def action_ask(self) -> None:
        self.push_screen(Question(), self.answers.append)

    def action_note(self) -> None:
        self.noted += 1


def at_once(app: Form, keys: Sequence[str]) -> None:
    """Put all the keys into the app's queue before any of them is handled."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


async def settle(pilot: Pilot[Any], app: Form) -> None:
    for _ in range(500):
        await pilot.pause(0.01)
        if app._current_key is None and not app._waiting_keys:
            return
    raise AssertionError("keys are still waiting")


@pytest.mark.parametrize(
    ("keys", "first", "second"),
    [
        (["backspace", "backspace", "1", "0", "0"], "100", "789"),
        (["tab", "end", "backspace", "1", "2"], "30", "7812"),
        (["home", "1", "right", "2"], "1320", "789"),
        (["1", "tab", "home", "2", "shift+tab", "3"], "3013", "2789"),
    ],
)
async def test_characters_do_not_overtake_bound_keys(
    keys: list[str], first: str, second: str
) -> None:
    app = Form()
    async with app.run_test() as pilot:
        app.query_one("#first").focus()
        await pilot.pause()
        at_once(app, keys)
        await settle(pilot, app)
        assert app.query_one("#first", Input).value == first
        assert app.query_one("#second", Input).value == second


async def test_keys_go_to_the_dialog_that_an_earlier_key_opened_and_then_to_the_screen() -> None:
    app = Form()
    async with app.run_test() as pilot:
        at_once(app, ["d", "z", "d", "enter", "z"])
        await settle(pilot, app)
        assert app.answers == ["zd"]
        assert app.noted == 1


async def test_a_key_whose_widget_is_gone_does_not_block_the_next_ones() -> None:
    app = Form()
    async with app.run_test() as pilot:
        app.query_one("#first").focus()
        await pilot.pause()
        app._follow_key = lambda *_: None  # type: ignore[method-assign]
        at_once(app, ["1", "2"])
        await settle_with_lost_reports(pilot, app)
        assert app.query_one("#first", Input).value == "3012"


async def settle_with_lost_reports(pilot: Pilot[Any], app: Form) -> None:
    for _ in range(500):
        await pilot.pause(0.01)
        if app.query_one("#first", Input).value == "3012":
            return
