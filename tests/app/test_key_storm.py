"""The dashboard survives any input, and a crash ends with a sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.style import Style
from textual import events, on
from textual.app import App, ComposeResult
from textual.css.query import NoMatches
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input
from textual.worker import Worker

from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.keys.ordered_input import OrderedKeysApp
from ltui.app.panels.linked_charts import toggle_log, toggle_outliers
from ltui.app.panels.presets_panel import PresetCatalog
from ltui.app.panels.runs_panel import RunsPanel
from ltui.app.screens.choosers import ChangingList
from ltui.app.screens.dialog import call_screen
from ltui.app.screens.help import HelpScreen
from ltui.app.screens.palette import Palette
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.store.run_directory import RunDir
from tests.app.key_storm import Storm, nothing_starts
from tests.app.one_run import notices, reached, until
from tests.stored_runs import stored_run

SECONDS = float(os.environ.get("LTUI_STORM_S", "6"))


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_dashboard_survives_a_storm_of_input(
    seed: int, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storm = Storm(seed)
    with nothing_starts():
        try:
            while storm.inputs <= 10:  # A slow machine needs longer.
                await storm.blow(private_home, SECONDS)
        except Exception:
            print("\n".join(storm.last))
            raise


@asynccontextmanager
async def at_home(home: Path) -> AsyncIterator[tuple[Pilot[Any], LtuiApp]]:
    app = LtuiApp(home)
    async with app.run_test(size=(100, 30)) as pilot:
        yield pilot, app


async def test_a_palette_is_closed_once_and_opened_again_while_it_is_being_removed(
    private_home: Path,
) -> None:
    async with at_home(private_home) as (pilot, app):
        home = app.screen
        await pilot.press("ctrl+p")
        first = await reached(pilot, Palette)
        # A click that was meant for a larger terminal does nothing.
        first.post_message(events.Click(None, 117, 40, 0, 0, 1, False, False, False))
        await pilot.pause()
        assert app.screen is first
        first._action_escape()
        first._action_escape()
        app.action_command_palette()
        assert isinstance(app.screen, Palette)
        assert app.screen is not first
        await until(pilot, lambda: not first.is_attached)
        app.screen.dismiss()
        await until(pilot, lambda: app.screen is home)
        await pilot.press("question_mark")
        await reached(pilot, HelpScreen)
        first.dismiss()
        assert isinstance(app.screen, HelpScreen)


def _run_screen(home: Path) -> RunScreen:
    return RunScreen(RunDir(home / "runs" / "brave-owl-3f2a"))


async def test_an_action_of_a_closed_screen_does_nothing(private_home: Path) -> None:
    async with at_home(private_home) as (pilot, app):
        screen = _run_screen(private_home)
        await app.push_screen(screen)
        assert await app.run_action("zoom", default_namespace=screen)
        screen.dismiss()
        assert not await app.run_action("zoom", default_namespace=screen)
        await until(pilot, lambda: not screen.is_attached)
        assert not await app.run_action("zoom", default_namespace=screen)


async def test_a_screen_that_is_closed_before_it_is_mounted_sets_up_nothing(
    private_home: Path,
) -> None:
    async with at_home(private_home) as (pilot, app):
        home = app.screen
        for screen in (_run_screen(private_home), HelpScreen([], "")):
            app.push_screen(screen)
            screen.dismiss()
            screen.remove()
            await until(pilot, lambda: app.screen is home)
            await pilot.pause()
        assert app.is_running


async def test_a_missing_widget_matters_only_on_an_open_screen(private_home: Path) -> None:
    with pytest.raises(NoMatches, match="#open"):  # noqa: PT012 - raised when the app ends
        async with at_home(private_home) as (pilot, app):
            closed = _run_screen(private_home)
            await app.push_screen(closed)
            closed.call_later(closed.query_one, "#closed")
            closed.set_timer(0.001, lambda: closed.query_one("#closed"))
            closed.dismiss()
            await until(pilot, lambda: not closed.is_running)
            assert app.is_running
            app.screen.call_later(app.screen.query_one, "#open")
            await until(pilot, lambda: not app.is_running)


async def test_a_worker_calls_no_closed_screen(private_home: Path) -> None:
    async with at_home(private_home) as (pilot, app):
        screen = _run_screen(private_home)
        await app.push_screen(screen)
        closed, calls = threading.Event(), list[int]()

        def work() -> None:
            call_screen(screen, calls.append, 1)
            closed.wait()
            call_screen(screen, calls.append, 2)

        worker = screen.run_worker(work, thread=True)
        await until(pilot, lambda: calls)
        screen.dismiss()
        closed.set()
        await until(pilot, lambda: worker.is_finished)
        assert calls == [1]


async def test_an_unexpected_error_of_a_worker_is_a_notice_that_names_the_log(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected error")

    monkeypatch.setattr(PresetCatalog, "read_all", fail)
    private_home.mkdir(exist_ok=True)
    async with at_home(private_home) as (pilot, app):
        log = private_home / "dashboard.log"
        sentence = (
            "An action in the background has failed (RuntimeError: injected error). Training"
            f" continues. The traceback is in {log}"
        )
        await until(pilot, lambda: notices(app) == [sentence])
        assert app.is_running
        assert "in fail" in log.read_text()


async def test_an_error_of_a_closed_screens_worker_is_not_shown(private_home: Path) -> None:
    async with at_home(private_home) as (pilot, app):
        screen = _run_screen(private_home)
        await app.push_screen(screen)
        closed, workers = threading.Event(), list[Worker[None]]()

        def work() -> None:
            closed.wait()
            raise RuntimeError("injected error")

        screen.call_later(lambda: workers.append(screen.run_worker(work, thread=True)))
        await until(pilot, lambda: workers)
        screen.dismiss()
        await until(pilot, lambda: not screen.is_attached)
        closed.set()
        await until(pilot, lambda: workers[0].is_finished)
        assert not (private_home / "dashboard.log").exists()


async def test_keys_of_the_list_of_runs_wait_for_its_table(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(panel: RunsPanel) -> None:
        pass

    monkeypatch.setattr(RunsPanel, "start", never)
    stored_run(private_home, "brave-owl-3f2a")
    async with at_home(private_home) as (_, app):
        for action in ("sort", "reverse", "columns", "mark", "mark_all", "open_run"):
            await app.run_action(f"screen.{action}")
        panel = app.screen.query_one(RunsPanel)
        panel.focus_run("brave-owl-3f2a")
        panel.fill_list()


class _OneFooter(OrderedKeysApp):
    def compose(self) -> ComposeResult:
        yield KeyFooter([KeyHint("↑↓", "zoom", "focused.zoom(1)")])


async def test_a_click_on_a_key_of_a_widget_that_lost_the_focus_does_nothing() -> None:
    app = _OneFooter()
    async with app.run_test() as pilot:
        await pilot.click(KeyFooter, offset=(2, 0))
        assert app.is_running


class _OneList(App[None]):
    def __init__(self, *, display: bool = True) -> None:
        super().__init__()
        self.options = ChangingList("one", "two")
        self.options.display = display
        self.selected: list[int] = []

    def compose(self) -> ComposeResult:
        yield self.options

    def on_option_list_option_selected(self, event: ChangingList.OptionSelected) -> None:
        self.selected.append(event.option_index)


async def test_a_click_on_an_option_counts_once_and_on_one_that_is_gone_never() -> None:
    app = _OneList()
    async with app.run_test() as pilot:
        for option in (1, 2):
            style = Style(meta={"option": option})
            app.options.post_message(
                events.Click(app.options, 0, 0, 0, 0, 1, False, False, False, style=style)
            )
            await pilot.pause()
        assert app.selected == [1]


async def test_a_list_without_room_has_no_pages() -> None:
    app = _OneList(display=False)
    async with app.run_test():
        app.options.highlighted = 1
        app.options.action_page_up()
        assert app.options.highlighted == 1


def test_the_scale_of_no_chart_is_switched_without_an_error() -> None:
    toggle_log([])
    toggle_outliers([])


# -- keys that arrive close together, as an ssh connection delivers them ---------------------------


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
    await pilot.pause(0.01)
    await until(pilot, lambda: app._current_key is None and not app._waiting_keys)


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
        await until(pilot, lambda: app.query_one("#first", Input).value == "3012")
