"""The dashboard with a configuration file: keys, theme, notices; also with a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.app.keys.footer import KeyFooter, listed_keys
from ltui.app.keys.own_keys import default_keys, textual_key
from ltui.app.panels.runs_table import RunsTable
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.palette import ThemeScreen
from ltui.app.settings import (
    config_path,
    read_preferences,
    read_script_preferences,
    write_preference,
    write_script_preferences,
)
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_snapshot import RunState
from tests.app.frames import frame, snapshot
from tests.app.one_run import (
    OneRun,
    Script,
    answer,
    noticed,
    notices,
    one_run,
    reached,
    shown,
    until,
)
from tests.stored_runs import stored_run


def write_config(text: str) -> None:
    path = config_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def test_an_own_key_replaces_the_default_one_everywhere_it_is_named() -> None:
    write_config("keys: {run.stop: [ctrl+s, f9], run.log: '?', help: f1}\n")
    async with one_run(frame()) as (pilot, app, screen):
        await pilot.press("s")
        await pilot.pause()
        assert app.screen is screen
        footer = str(screen.query_one(KeyFooter).render())
        assert "ctrl+s f9 stop" in footer
        assert "f1 help" in footer
        keys = {key.binding.id: key.keys for key in listed_keys(screen)}
        assert (keys["run.stop"], keys["run.log"], keys["help"]) == ("ctrl+s f9", "?", "f1")
        assert keys["run.kill"] == "k"
        await pilot.press("?")
        await until(pilot, lambda: screen.panels.log_panel.has_focus_within)
        await pilot.press("f9")
        await reached(pilot, ConfirmScreen)
        assert notices(app) == []


async def test_two_actions_can_swap_their_keys_and_one_may_have_the_name_of_a_setting() -> None:
    write_config("keys: {run.kill: d, run.diagnose: k, theme: f2}\n")
    async with one_run(frame()) as (pilot, app, _):
        assert app.theme == "ltui-dark"
        await pilot.press("f2")
        await reached(pilot, ThemeScreen)
        await pilot.press("escape")
        await pilot.press("d")
        await answer(pilot)
        await until(pilot, lambda: app.asked == ["kill"])


async def test_a_damaged_value_is_named_and_the_rest_is_used() -> None:
    write_config("theme: ltui-light\nkeys: {run.stop: ctl+s, run.kill: f9}\nnotifications: 3\n")
    async with one_run(frame(), notifications=True) as (pilot, app, _):
        await noticed(pilot, app, "config.yaml:3 notifications: must be a mapping")
        assert "And 1 more. `ltui config --check` lists" in notices(app)[0]
        assert app.theme == "ltui-light"
        await pilot.press("f9")
        await answer(pilot)
        await until(pilot, lambda: app.asked == ["kill"])
        await pilot.press("s")
        await reached(pilot, ConfirmScreen)


@pytest.mark.parametrize(("content", "words"), [(b"\xff\xfe", "UTF-8"), (None, "not a file")])
async def test_a_damaged_file_or_a_folder_does_not_prevent_the_start(
    content: bytes | None, words: str
) -> None:
    config_path().parent.mkdir(parents=True)
    if content is None:
        config_path().mkdir()
    else:
        config_path().write_bytes(content)
    async with one_run(frame(), notifications=True) as (pilot, app, _):
        await noticed(pilot, app, words)


async def test_unknown_actions_and_shared_keys_are_named_after_the_start() -> None:
    write_config("theme: none\nkeys: {run.stp: f9, run.stop: k}\n")
    async with one_run(frame(), notifications=True) as (pilot, app, _):
        await noticed(pilot, app, "And 2 more. `ltui config --check` lists")
        assert len(notices(app)) == 1


def test_what_is_chosen_for_one_preset_leaves_what_is_remembered_for_others(tmp_path: Path) -> None:
    write_script_preferences(tmp_path, "gpt", {"metrics": ["loss"], "joined": True})
    write_script_preferences(tmp_path, "cnn", {"metrics": ["accuracy"], "joined": True})
    write_script_preferences(tmp_path, "cnn", {"joined": False})
    assert read_script_preferences(tmp_path, "gpt") == {"metrics": ["loss"], "joined": True}
    assert read_script_preferences(tmp_path, "cnn") == {"metrics": ["accuracy"]}


async def test_the_file_wins_over_the_remembered_theme_and_says_so(tmp_path: Path) -> None:
    write_preference(tmp_path, "theme", "nord")
    write_config("\ntheme: ltui-light\n")
    async with one_run(frame(), (120, 40), notifications=True, home=tmp_path) as (pilot, app, _):
        assert app.theme == "ltui-light"
        await pilot.press("t", "down", "enter")
        await noticed(pilot, app, "config.yaml:2 sets theme: the choice holds until you quit.")
        assert app.theme != "ltui-light"
        assert read_preferences(tmp_path) == {"theme": "nord"}


@pytest.mark.parametrize(
    ("config", "shown_notices", "rings"),
    [("", 2, 0), ("notifications: {show: problems, bell: all}", 1, 2),
     ("notifications: {show: none, bell: problems}", 0, 1)],
)  # fmt: skip
async def test_events_are_shown_and_rung_as_the_file_says(
    monkeypatch: pytest.MonkeyPatch, config: str, shown_notices: int, rings: int
) -> None:
    write_config(config)
    script = Script(frame())
    app = OneRun(script)
    rung: list[None] = []
    monkeypatch.setattr(app, "bell", lambda: rung.append(None))
    async with app.run_test(size=(160, 50), notifications=True) as pilot:
        screen = await shown(pilot, app)
        for state in (RunState.PAUSED, RunState.FAILED):
            script.frame = frame(snapshot=snapshot(state=state))
            await until(pilot, lambda s=state: screen.snapshot.state is s)  # type: ignore[misc, union-attr]
            await pilot.pause()
        assert (len(notices(app)), len(rung)) == (shown_notices, rings)


@pytest.mark.parametrize(
    ("written", "named"),
    [("s", "s"), ("S", "S"), ("shift+s", "S"), ("?", "question_mark"), (",", "comma"),
     ("Ctrl+S", "ctrl+s"), ("ctrl+/", "ctrl+slash"), ("f5", "f5"), ("shift+left", "shift+left"),
     ("escape", "escape"), ("question_mark", "question_mark"), ("+", "plus"), ("é", "é"),
     ("ctl+s", None), ("ctrl+", None), ("ctrl+ctrl+s", None), ("abc", None), ("\x07", None)],
)  # fmt: skip
def test_keys_are_named_as_textual_names_them(written: str, named: str | None) -> None:
    assert textual_key(written) == named


def test_no_action_that_a_file_may_name_is_gone() -> None:
    # Files of users name these actions. To rename one would break them.
    stored = Path(__file__).with_name("key_ids.txt").read_text().split()
    assert set(stored) <= set(default_keys(LtuiApp))


async def test_the_list_of_runs_has_the_columns_of_the_file(private_home: Path) -> None:
    write_config("runs: {columns: [state, val/loss], sort: -val/loss}\n")
    stored_run(private_home, "calm-fox-1111", metrics={"val/loss": 0.1})
    stored_run(private_home, "old-pine-2222", metrics={"val/loss": 0.3})
    app = LtuiApp(private_home)
    async with app.run_test(size=(160, 50), notifications=True) as pilot:
        await until(pilot, lambda: bool(app.screen.query(RunsTable)))
        table = app.screen.query_one(RunsTable)
        await until(pilot, lambda: [row.name for row in table.rows] == ["old-pine", "calm-fox"])
        assert table.columns == ("state", "val/loss")
        await pilot.press("3", "O")
        await until(pilot, lambda: [row.name for row in table.rows] == ["calm-fox", "old-pine"])
        await noticed(pilot, app, "config.yaml:1 sets runs.sort: the choice holds until you quit.")
        assert read_preferences(private_home) == {}
