"""The dashboard survives any input, and a crash ends with a sentence."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.css.query import NoMatches
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
from tests.app.one_run import until
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
            await storm.blow(private_home, SECONDS)
        except Exception:
            print("\n".join(storm.last))
            raise
    assert storm.inputs > 10


async def test_a_palette_that_is_closed_twice_closes_nothing_else(private_home: Path) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        home = app.screen
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, Palette))
        palette = app.screen
        assert isinstance(palette, Palette)
        palette._action_escape()
        palette._action_escape()
        await until(pilot, lambda: app.screen is home)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        palette.dismiss()
        assert isinstance(app.screen, HelpScreen)


async def test_a_palette_is_opened_again_while_the_last_one_is_being_removed(
    private_home: Path,
) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        app.action_command_palette()
        await until(pilot, lambda: isinstance(app.screen, Palette))
        first = app.screen
        assert isinstance(first, Palette)
        first.dismiss()
        app.action_command_palette()
        assert isinstance(app.screen, Palette)
        assert app.screen is not first
        await until(pilot, lambda: not first.is_attached)


async def test_a_click_outside_of_a_smaller_terminal_does_nothing(private_home: Path) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(60, 15)) as pilot:
        app.action_command_palette()
        await until(pilot, lambda: isinstance(app.screen, Palette))
        app.screen.post_message(events.Click(None, 117, 40, 0, 0, 1, False, False, False))
        await pilot.pause()
        assert isinstance(app.screen, Palette)


def _run_screen(home: Path) -> RunScreen:
    return RunScreen(RunDir(home / "runs" / "brave-owl-3f2a"))


async def test_an_action_of_a_closed_screen_does_nothing(private_home: Path) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
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
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        home = app.screen
        for screen in (_run_screen(private_home), HelpScreen([], "")):
            app.push_screen(screen)
            screen.dismiss()
            screen.remove()
            await until(pilot, lambda: app.screen is home)
            await pilot.pause()
        assert app.is_running


async def test_a_missing_widget_matters_only_on_an_open_screen(private_home: Path) -> None:
    app = LtuiApp(private_home)
    with pytest.raises(NoMatches, match="#open"):  # noqa: PT012 - raised when the app ends
        async with app.run_test(size=(100, 30)) as pilot:
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
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
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
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
        log = private_home / "dashboard.log"
        sentence = (
            "An action in the background has failed (RuntimeError: injected error). Training"
            f" continues. The traceback is in {log}"
        )
        await until(pilot, lambda: [n.message for n in app._notifications] == [sentence])
        assert app.is_running
        assert "in fail" in log.read_text()


async def test_an_error_of_a_closed_screens_worker_is_not_shown(private_home: Path) -> None:
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)) as pilot:
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
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)):
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
