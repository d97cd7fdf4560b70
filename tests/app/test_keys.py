"""The help lists every key, the palette every command, and the footer only what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.command import CommandList, CommandPalette
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from ltui.app.keys.footer import READONLY_BADGE, SCREEN, KeyFooter, listed_keys
from ltui.app.panels.run_charts import RunCharts
from ltui.app.presentation.metric_charts import shown_metrics
from ltui.app.screens.help import TYPING, HelpScreen, help_lines
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.palette import MAX_RUNS, PlacesProvider, read_places
from ltui.app.screens.run import RunScreen
from ltui.app.screens.run_questions import LabelQuestion
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart import Chart
from ltui.widgets.log_view import LogLines, LogView
from ltui.widgets.table import Table
from tests.app.frames import frame, snapshot
from tests.app.one_run import Script, one_run, until
from tests.stored_runs import stored_run

RUN_KEYS = {"s", "S", "p", "c", "k", "r", "d", "v", "/", "1", "z", "x", "y", "+", "-", "0", "q"}
PAIRS = {
    *("⏎", "↑↓", "←→", "shift+←→", "tab", "1-5", "1-6", "+-", "esc"),
    *(", .", "n N", "< >", "( )", "1 2"),
}
"""Names in the footer of keys that Textual binds, and of several keys at once."""
WIDGET_KEYS = {"↑", "←", "shift+←", "home", "end", "g", "f", "n", "enter"}


@pytest.mark.parametrize("focus", ["1", "4", "5"])
async def test_help_lists_every_key_whatever_has_the_focus(focus: str) -> None:
    async with one_run(frame()) as (pilot, app, _):
        await pilot.press(focus, "question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert isinstance(app.screen, HelpScreen)
        groups = [heading for heading, _ in app.screen._groups]
        assert groups[:3] == ["Run", "Charts", "Log"]
        assert groups[-1] == SCREEN
        keys = {key for _, lines in app.screen._groups for names, _, _ in lines
                for key in names.split()}  # fmt: skip
        assert keys >= RUN_KEYS | WIDGET_KEYS | {"?", "t", "tab", "ctrl+p", "ctrl+q", "mouse"}


@pytest.mark.parametrize("opening", ["S", "slash", "n"])
async def test_f1_helps_while_a_field_takes_every_sign(opening: str) -> None:
    async with one_run(frame()) as (pilot, app, _):
        if opening == "n":
            app.push_screen(LabelQuestion("note", "brave-owl", [RunLabels()], set()))
        else:
            await pilot.press("5", opening)
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        screen, field = app.screen, app.screen.focused
        assert isinstance(field, Input)
        await pilot.press("question_mark")
        assert field.value.endswith("?")
        assert "f1" in "".join(strip.text for strip in screen._compositor.render_strips())
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert isinstance(app.screen, HelpScreen)
        assert app.screen._about == TYPING
        keys = {keys for _, lines in app.screen._groups for keys, _, _ in lines}
        assert ("t" in keys) is not screen.is_modal, "a dialog does not choose the theme"
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is screen)


async def test_help_marks_what_can_not_be_done_now() -> None:
    ended = snapshot(state=RunState.FINISHED, detail="finished at step 9")
    async with one_run(frame(snapshot=ended), (80, 24)) as (pilot, app, _):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert isinstance(app.screen, HelpScreen)
        usable = {keys: now for _, lines in app.screen._groups for keys, _, now in lines}
        assert not usable["k"]
        assert not usable["S"]
        assert usable["d"]
        lines = help_lines(app.screen._groups, "", 76)
        texts = {"".join(cell.text for cell in line).strip() for line in lines}
        assert "k  Kill every process of the run, after a question (not now)" in texts
        assert "d  Show what is wrong and what each rank does" in texts


async def test_the_palette_offers_each_thing_once_and_nothing_that_is_refused() -> None:
    script = Script(frame())
    async with one_run(script) as (pilot, app, screen):
        titles = [command.title for command in app.get_system_commands(screen)]
        assert len(titles) == len({title.lower() for title in titles})
        assert {"Stop", "Kill", "Checkpoint", "Log", "Theme", "Quit"} <= set(titles)
        assert not [title for title in titles if "rosshair" in title or title == "Palette"]
        script.frame = frame(snapshot=snapshot(state=RunState.FINISHED))
        await until(pilot, lambda: screen.snapshot.state is RunState.FINISHED)  # type: ignore[union-attr]
        titles = [command.title for command in app.get_system_commands(screen)]
        assert not {"Stop", "Kill", "Checkpoint", "Pause"} & set(titles)


async def test_the_palette_shows_a_metric() -> None:
    async with one_run(frame()) as (_, app, screen):
        assert screen.frame is not None
        charts = screen.query_one(RunCharts)
        before = shown_metrics(screen.frame, charts.settings)
        other = next(name for name in screen.frame.curve_names if name not in before)
        commands = {c.title: c.callback for c in app.get_system_commands(screen)}
        commands[f"Show metric {other}"]()
        assert shown_metrics(screen.frame, charts.settings) == (*before, other)


async def choose(pilot: Pilot[Any], app: LtuiApp, words: str, title: str) -> None:
    """Type some words into the palette, and take the first command, which has this title."""
    await pilot.press("ctrl+p")
    await until(pilot, lambda: isinstance(app.screen, CommandPalette))
    palette = app.screen
    assert palette.query_one(Input).placeholder == "Search keys, metrics, runs and presets…"
    palette.query_one(Input).value = words
    found = palette.query_one(CommandList)

    def first() -> str:
        return str(found.get_option_at_index(0).prompt) if found.highlighted == 0 else ""

    await until(pilot, lambda: found.option_count < 20 and first().startswith(title))
    await pilot.press("enter")
    await until(pilot, lambda: app.screen is not palette)


def opened(app: LtuiApp) -> str | None:
    return app.screen.run_dir.id if isinstance(app.screen, RunScreen) else None


async def test_the_palette_goes_to_another_run(private_home: Path) -> None:
    for name in ("calm-fox-1111", "brave-owl-3f2a"):
        (private_home / "runs" / name).mkdir(parents=True)
        (private_home / "runs" / name / "spec.yaml").write_text("")
    async with one_run(frame(), home=private_home) as (pilot, app, _):
        await choose(pilot, app, "open calm-fox", "Open run calm-fox-1111")
        await until(pilot, lambda: opened(app) == "calm-fox-1111")
        await choose(pilot, app, "open brave-owl", "Open run brave-owl-3f2a")
        await until(pilot, lambda: opened(app) == "brave-owl-3f2a")
        assert len(app.screen_stack) == 2


async def test_the_palette_finds_a_run_by_its_labels_and_a_preset_from_anywhere(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("calm-fox-1111", "old-pine-2222"):
        stored_run(private_home, name)
    tagged = RunDir(private_home / "runs" / "old-pine-2222")
    change_labels(tagged, lambda _: RunLabels(tags=("baseline",), note="[b]try[/] again"))
    async with one_run(frame(), home=private_home) as (pilot, app, _):
        await choose(pilot, app, "open baseline", "Open run old-pine-2222")
        await until(pilot, lambda: opened(app) == "old-pine-2222")
        await choose(pilot, app, "preset gpt-fsdp", "Go to preset gpt-fsdp")
        await until(pilot, lambda: isinstance(app.screen, HomeScreen))
        assert isinstance(app.screen, HomeScreen)
        home = app.screen
        await until(pilot, lambda: home.presets_panel.highlighted_name == "gpt-fsdp")
        await choose(pilot, app, "open calm-fox", "Open run calm-fox-1111")
        await until(pilot, lambda: opened(app) == "calm-fox-1111")
        await choose(pilot, app, "preset cifar10-cnn", "Go to preset cifar10-cnn")
        await until(pilot, lambda: app.screen is home)
        await until(pilot, lambda: home.presets_panel.highlighted_name == "cifar10-cnn")


async def test_the_palette_finds_a_run_by_the_name_that_it_was_given(private_home: Path) -> None:
    stored_run(private_home, "old-pine-2222")
    named = RunDir(private_home / "runs" / "old-pine-2222")
    change_labels(named, lambda _: RunLabels(name="Größe [b]12"))
    async with one_run(frame(), home=private_home) as (pilot, app, _):
        await choose(pilot, app, "open größe", "Open run Größe [b]12 (old-pine-2222)")
        await until(pilot, lambda: opened(app) == "old-pine-2222")


async def test_the_palette_names_the_key_of_each_command_and_leaves_out_esc() -> None:
    async with one_run(frame()) as (_, app, screen):
        commands = {c.title: c.help for c in app.get_system_commands(screen)}
        assert commands["Stop"].endswith(" · key s")
        assert not {"Cancel", "Clear"} & set(commands)
        assert not [title for title in commands if "order left" in title or "charts" in title]


async def test_the_palette_looks_like_the_other_dialogs() -> None:
    async with one_run(frame()) as (pilot, app, _):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        palette = app.screen
        await until(pilot, lambda: bool(palette.query_one(CommandList).option_count))
        await pilot.pause()
        for part in (palette.query_one("#--input"), palette.query_one(CommandList)):
            assert part.styles.border_top[0] == part.styles.border_left[0] == "round"
            assert part.size.width <= 100
        text = "\n".join(line.text for line in palette._compositor.render_strips())
        assert "🔎" not in text, "a picture has another width on some terminals"


async def test_the_palette_offers_at_most_fifty_of_thousands_of_runs(private_home: Path) -> None:
    for number in range(400):
        folder = private_home / "runs" / f"calm-fox-{number:04}"
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text("")
    async with one_run(frame(), home=private_home) as (_, app, screen):
        runs, presets = read_places(app, None)
        assert (len(runs), presets[0].title) == (400, "Go to preset quickstart")
        provider = PlacesProvider(screen)
        await provider.startup()
        found = [hit async for hit in provider.search("fox")]
        assert len(found) == MAX_RUNS
        oldest = [hit.text async for hit in provider.search("open 0007")]
        assert oldest == ["Open run calm-fox-0007", "Compare with run calm-fox-0007"]


def unknown_hints(screen: Screen[Any]) -> list[str]:
    """Return the hints of the footer whose key is bound to something else, or to nothing."""
    bound: dict[str, set[str]] = {}
    for key in listed_keys(screen):
        for name in key.keys.split():
            bound.setdefault(name, set()).add(key.binding.action)
    wrong = []
    for hint in screen.query_one(KeyFooter)._hints:
        target, _, call = hint.action.rpartition(".")
        name = call.partition("(")[0]
        owner = {"app": screen.app, "screen": screen, "focused": screen.focused}[target]
        if not hasattr(owner, f"action_{name}") or not (hint.key in bound or hint.key in PAIRS):
            wrong.append(f"{hint.key} {hint.words}")
    return wrong


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.PAUSED, RunState.FAILED])
async def test_every_key_of_the_footer_is_bound(state: RunState) -> None:
    async with one_run(frame(snapshot=snapshot(state=state)), (200, 50)) as (pilot, _, screen):
        for focus in "12345":
            await pilot.press(focus)
            await pilot.pause()
            assert unknown_hints(screen) == [], focus


async def test_every_key_of_the_footer_at_home_is_bound(private_home: Path) -> None:
    (private_home / "runs").mkdir(parents=True)
    app = LtuiApp(private_home)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: bool(app.screen.query("#runs-table")))
        assert unknown_hints(app.screen) == []


async def test_a_chart_names_its_keys_in_the_footer() -> None:
    async with one_run(frame()) as (pilot, _, screen):
        await pilot.press("1")
        await until(pilot, lambda: "crosshair" in str(screen.query_one(KeyFooter).render()))
        assert "zoom" in str(screen.query_one(KeyFooter).render())
        await pilot.press("4")
        await until(pilot, lambda: "crosshair" not in str(screen.query_one(KeyFooter).render()))


async def test_escape_does_not_quit_a_run_that_was_opened_alone() -> None:
    async with one_run(frame(), (100, 30), notifications=True) as (pilot, app, _):
        await pilot.press("escape", "escape")
        notices = app._notifications
        await until(pilot, lambda: any("training continues" in n.message for n in notices))
        assert app.is_running
        await pilot.press("z", "escape")
        await until(pilot, lambda: not app.run_screen.panels.zoomed)
        await pilot.press("z", "q")
        await until(pilot, lambda: not app.is_running)


async def test_escape_in_a_run_that_has_ended_does_not_state_that_training_continues() -> None:
    async with one_run(
        frame(snapshot=snapshot(state=RunState.FINISHED)), (100, 30), notifications=True
    ) as (pilot, app, _):
        await pilot.press("escape", "escape")
        notices = app._notifications
        await until(pilot, lambda: [n.message for n in notices][:1] == ["q quits ltui"])


async def test_readonly_is_marked_on_every_screen(private_home: Path) -> None:
    (private_home / "runs").mkdir(parents=True)
    async with one_run(frame(), (60, 15), readonly=True) as (_, _, screen):
        assert READONLY_BADGE in str(screen.query_one(KeyFooter).render())
    home = LtuiApp(private_home, readonly=True)
    async with home.run_test(size=(60, 15)):
        assert isinstance(home.screen, HomeScreen)
        assert READONLY_BADGE in str(home.screen.query_one(KeyFooter).render())


def test_every_binding_of_a_widget_says_what_it_does() -> None:
    kinds: tuple[type[Widget], ...] = (Chart, LogLines, LogView, Table)
    for kind in kinds:
        for binding in Binding.make_bindings(kind.BINDINGS):
            assert binding.id, binding
            assert binding.tooltip or "move" in binding.action or "table" in binding.id, binding


@pytest.mark.parametrize("size", [(160, 50), (80, 24), (60, 15)])
@pytest.mark.parametrize("key", ["question_mark", "s", "S", "k"])
async def test_dialogs_are_whole_at_every_size(size: tuple[int, int], key: str) -> None:
    async with one_run(frame(), size) as (pilot, app, _):
        await pilot.press(key)
        await until(pilot, lambda: not isinstance(app.screen, RunScreen))
        await pilot.pause()
        answers = app.screen.query_one("#answers")
        dialog = app.screen.query_one(".dialog")
        assert dialog.content_region.contains_region(answers.region)
        assert answers.region.height >= 1
        assert dialog.max_scroll_y == 0
