"""The help lists every key, the palette every command, and the footer only what works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.command import CommandList, CommandPalette
from textual.pilot import Pilot
from textual.screen import Screen
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
from tests.app.one_run import Script, noticed, notices, one_run, reached, text_of_screen, until
from tests.required import required
from tests.stored_runs import stored_run

RUN_KEYS = {"s", "S", "p", "c", "k", "r", "d", "v", "/", "1", "z", "x", "y", "+", "-", "0", "q"}
PAIRS = {
    *("⏎", "↑↓", "←→", "shift+←→", "tab", "1-5", "1-6", "+-", "esc"),
    *(", .", "n N", "< >", "( )", "1 2"),
}
"""Names in the footer of keys that Textual binds, and of several keys at once."""
WIDGET_KEYS = {"↑", "←", "shift+←", "home", "end", "g", "f", "n", "enter"}


async def test_help_lists_every_key_whatever_has_the_focus() -> None:
    async with one_run(frame()) as (pilot, _, screen):
        for focus in "145":
            await pilot.press(focus, "question_mark")
            groups = (await reached(pilot, HelpScreen))._groups
            headings = [heading for heading, _ in groups]
            assert headings[:3] == ["Run", "Charts", "Log"]
            assert headings[-1] == SCREEN
            keys = {key for _, lines in groups for names, _, _ in lines for key in names.split()}
            assert keys >= RUN_KEYS | WIDGET_KEYS | {"?", "t", "tab", "ctrl+p", "ctrl+q", "mouse"}
            await pilot.press("escape")
            await reached(pilot, RunScreen)
        assert screen.is_current


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
        assert "f1" in text_of_screen(app)
        await pilot.press("f1")
        shown = await reached(pilot, HelpScreen)
        assert shown._about == TYPING
        keys = {keys for _, lines in shown._groups for keys, _, _ in lines}
        assert ("t" in keys) is not screen.is_modal, "a dialog does not choose the theme"
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is screen)


async def test_help_marks_what_can_not_be_done_now() -> None:
    ended = snapshot(state=RunState.FINISHED, detail="finished at step 9")
    async with one_run(frame(snapshot=ended), (80, 24)) as (pilot, _, _):
        await pilot.press("question_mark")
        groups = (await reached(pilot, HelpScreen))._groups
        usable = {keys: now for _, lines in groups for keys, _, now in lines}
        assert [usable[key] for key in "kSd"] == [False, False, True]
        texts = {"".join(cell.text for cell in line).strip() for line in help_lines(groups, "", 76)}
        assert "k  Kill every process of the run, after a question (not now)" in texts
        assert "d  Show what is wrong and what each rank does" in texts


async def test_the_palette_offers_each_thing_once_with_its_key_and_nothing_that_is_refused() -> (
    None
):
    script = Script(frame())
    async with one_run(script) as (pilot, app, screen):
        commands = list(app.get_system_commands(screen))
        titles = [command.title for command in commands]
        assert len(titles) == len({title.lower() for title in titles})
        assert {"Stop", "Kill", "Checkpoint", "Log", "Theme", "Quit"} <= set(titles)
        assert not {"Cancel", "Clear", "Palette"} & set(titles)
        hidden = ("rosshair", "order left", "charts")
        assert not [title for title in titles if any(words in title for words in hidden)]
        assert {c.title: c.help for c in commands}["Stop"].endswith(" · key s")
        charts = screen.query_one(RunCharts)
        shown = required(screen.frame)
        before = shown_metrics(shown, charts.settings)
        other = next(name for name in shown.curve_names if name not in before)
        {c.title: c.callback for c in commands}[f"Show metric {other}"]()
        assert shown_metrics(shown, charts.settings) == (*before, other)
        script.frame = frame(snapshot=snapshot(state=RunState.FINISHED))
        await until(pilot, lambda: required(screen.snapshot).state is RunState.FINISHED)
        titles = [command.title for command in app.get_system_commands(screen)]
        assert not {"Stop", "Kill", "Checkpoint", "Pause"} & set(titles)


async def choose(pilot: Pilot[Any], words: str, title: str) -> None:
    """Type some words into the palette, and take the first command, which has this title."""
    await pilot.press("ctrl+p")
    palette = await reached(pilot, CommandPalette)
    assert palette.query_one(Input).placeholder == "Search keys, metrics, runs and presets…"
    palette.query_one(Input).value = words
    found = palette.query_one(CommandList)

    def first() -> str:
        return str(found.get_option_at_index(0).prompt) if found.highlighted == 0 else ""

    await until(pilot, lambda: found.option_count < 20 and first().startswith(title))
    await pilot.press("enter")
    await until(pilot, lambda: pilot.app.screen is not palette)


async def open_run(pilot: Pilot[Any], words: str, run_id: str, title: str = "") -> None:
    """Open a run from the palette."""
    await choose(pilot, f"open {words}", f"Open run {title or run_id}")
    app = pilot.app
    await until(
        pilot, lambda: isinstance(app.screen, RunScreen) and app.screen.run_dir.id == run_id
    )


async def test_the_palette_finds_runs_by_id_label_or_name_and_presets_from_anywhere(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("calm-fox-1111", "old-pine-2222", "brave-owl-3f2a"):
        stored_run(private_home, name)
    tagged = RunDir(private_home / "runs" / "old-pine-2222")
    labels = RunLabels(name="Größe [b]12", tags=("baseline",), note="[b]try[/] again")
    change_labels(tagged, lambda _: labels)
    async with one_run(frame(), home=private_home) as (pilot, app, _):
        await open_run(pilot, "calm-fox", "calm-fox-1111")
        await open_run(pilot, "brave-owl", "brave-owl-3f2a")
        assert len(app.screen_stack) == 2
        old_pine = ("old-pine-2222", "Größe [b]12 (old-pine-2222)")
        await open_run(pilot, "baseline", *old_pine)
        await choose(pilot, "preset gpt-fsdp", "Go to preset gpt-fsdp")
        home = await reached(pilot, HomeScreen)
        await until(pilot, lambda: home.presets_panel.highlighted_name == "gpt-fsdp")
        await open_run(pilot, "größe", *old_pine)
        await choose(pilot, "preset cifar10-cnn", "Go to preset cifar10-cnn")
        await until(pilot, lambda: app.screen is home)
        await until(pilot, lambda: home.presets_panel.highlighted_name == "cifar10-cnn")


async def test_the_palette_looks_like_the_other_dialogs() -> None:
    async with one_run(frame()) as (pilot, app, _):
        await pilot.press("ctrl+p")
        palette = await reached(pilot, CommandPalette)
        await until(pilot, lambda: bool(palette.query_one(CommandList).option_count))
        await pilot.pause()
        for part in (palette.query_one("#--input"), palette.query_one(CommandList)):
            assert part.styles.border_top[0] == part.styles.border_left[0] == "round"
            assert part.size.width <= 100
        assert "🔎" not in text_of_screen(app), "a picture has another width on some terminals"


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
        assert len([hit async for hit in provider.search("fox")]) == MAX_RUNS
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


async def test_escape_does_not_quit_a_run_that_was_opened_alone() -> None:
    script = Script(frame())
    async with one_run(script, (100, 30), notifications=True) as (pilot, app, screen):
        await pilot.press("escape", "escape")
        await noticed(pilot, app, "training continues")
        assert app.is_running
        await pilot.press("z", "escape")
        await until(pilot, lambda: not screen.panels.zoomed)
        script.frame = frame(snapshot=snapshot(state=RunState.FINISHED))
        await until(pilot, lambda: required(screen.snapshot).state is RunState.FINISHED)
        await pilot.press("escape", "escape")
        # That training continues is not stated of a run that has ended.
        await until(pilot, lambda: notices(app)[-1] == "q quits ltui")
        await pilot.press("z", "q")
        await until(pilot, lambda: not app.is_running)


async def test_readonly_is_marked_on_every_screen(private_home: Path) -> None:
    (private_home / "runs").mkdir(parents=True)
    async with one_run(frame(), (60, 15), readonly=True) as (_, _, screen):
        assert READONLY_BADGE in str(screen.query_one(KeyFooter).render())
    home = LtuiApp(private_home, readonly=True)
    async with home.run_test(size=(60, 15)) as pilot:
        first = await reached(pilot, HomeScreen)
        assert READONLY_BADGE in str(first.query_one(KeyFooter).render())


def test_every_binding_of_a_widget_says_what_it_does() -> None:
    for kind in (Chart, LogLines, LogView, Table):
        for binding in Binding.make_bindings(kind.BINDINGS):
            assert binding.id, binding
            assert binding.tooltip or "move" in binding.action or "table" in binding.id, binding


@pytest.mark.parametrize("size", [(160, 50), (80, 24), (60, 15)])
async def test_dialogs_are_whole_at_every_size(size: tuple[int, int]) -> None:
    async with one_run(frame(), size) as (pilot, app, screen):
        for key in ("question_mark", "s", "S", "k"):
            await pilot.press(key)
            await until(pilot, lambda: app.screen is not screen)
            await pilot.pause()
            answers = app.screen.query_one("#answers")
            dialog = app.screen.query_one(".dialog")
            assert dialog.content_region.contains_region(answers.region)
            assert answers.region.height >= 1
            assert dialog.max_scroll_y == 0
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is screen)
