"""Themes: every one of the list can be chosen, and the choice is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.color import Color, ColorType
from textual.widgets import OptionList

from ltui.app.screens.palette import ThemeScreen
from ltui.app.settings import read_preferences, write_preference
from ltui.app.textual_app import LtuiApp, has_light_background
from ltui.widgets.palette import COLOURBLIND_SERIES, DARK_SERIES, LTUI_ANSI, THEMES
from tests.app.frames import frame
from tests.app.one_run import noticed, one_run, reached, settled, until


async def test_every_theme_of_the_list_can_be_shown(tmp_path: Path) -> None:
    async with one_run(frame(), (120, 40), home=tmp_path) as (pilot, app, _):
        await pilot.press("t")
        await reached(pilot, ThemeScreen)
        names = [option.id for option in app.screen.query_one(OptionList).options]
        assert names[: len(THEMES)] == [theme.name for theme in THEMES]
        assert set(names) == set(app.available_themes)
        for name in names:
            await until(pilot, lambda name=name: app.theme == name)  # type: ignore[misc]
            await pilot.press("down")


def colours_on(app: LtuiApp) -> set[Color]:
    """Return every colour on the screen."""
    return {
        colour
        for strip in app.screen._compositor.render_strips()
        for segment in strip
        if segment.style is not None
        for colour in (segment.style.color, segment.style.bgcolor)
        if colour is not None
    }


@pytest.mark.skipif(LTUI_ANSI is None, reason="Textual 8.2.5 and newer have native ANSI colours")
async def test_the_ansi_theme_draws_with_the_16_colours_only(tmp_path: Path) -> None:
    write_preference(tmp_path, "theme", "ltui-ansi")
    async with one_run(frame(), home=tmp_path) as (pilot, app, _):
        for keys in (["6"], ["question_mark"], ["escape", "s"], ["escape", "M"]):
            await pilot.press(*keys)
            await settled(pilot)
            types = {colour.type for colour in colours_on(app)}
            assert types <= {ColorType.DEFAULT, ColorType.STANDARD}, keys


async def test_a_theme_with_other_curves_alone_repaints_them(tmp_path: Path) -> None:
    async with one_run(frame(), home=tmp_path) as (pilot, app, _):
        await until(pilot, lambda: Color.parse(DARK_SERIES[0]) in colours_on(app))
        app.theme = "ltui-colourblind"
        await until(pilot, lambda: Color.parse(COLOURBLIND_SERIES[1]) in colours_on(app))
        assert Color.parse(DARK_SERIES[0]) not in colours_on(app)


async def test_escape_restores_the_theme_and_enter_remembers_it(tmp_path: Path) -> None:
    async with one_run(frame(), (120, 40), home=tmp_path) as (pilot, app, _):
        await pilot.press("t", "down")
        await until(pilot, lambda: app.theme == THEMES[1].name)
        await pilot.press("escape")
        await until(pilot, lambda: app.theme == THEMES[0].name)
        assert read_preferences(tmp_path) == {}
        await pilot.press("t", "down", "enter")
        await until(pilot, lambda: read_preferences(tmp_path) == {"theme": THEMES[1].name})
    assert LtuiApp(tmp_path).theme == THEMES[1].name


async def test_a_home_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    async with one_run(frame(), (120, 40), notifications=True, home=missing) as (pilot, app, _):
        await pilot.press("t", "down", "enter")
        await noticed(pilot, app, "remembered")
        assert app.theme == THEMES[1].name


def test_a_theme_that_is_gone_or_a_damaged_file_starts_with_the_default(tmp_path: Path) -> None:
    write_preference(tmp_path, "theme", "textual-ansi-of-another-version")
    assert LtuiApp(tmp_path).theme == THEMES[0].name
    (tmp_path / "preferences.json").write_text("[1,")
    assert LtuiApp(tmp_path).theme == THEMES[0].name


@pytest.mark.parametrize(
    ("value", "light"),
    [("0;15", True), ("0;default;7", True), ("15;0", False), ("7;8", False),
     ("0;default", False), ("", False)],
)  # fmt: skip
def test_colorfgbg_names_a_light_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, light: bool
) -> None:
    assert has_light_background({"COLORFGBG": value}) is light
    monkeypatch.setenv("COLORFGBG", value)
    assert LtuiApp(tmp_path).theme == ("ltui-light" if light else "ltui-dark")


async def test_the_keys_of_the_list_are_in_sight_on_small_terminals(tmp_path: Path) -> None:
    async with one_run(frame(), (80, 24), home=tmp_path) as (pilot, _, _):
        await pilot.press("t")
        screen = await reached(pilot, ThemeScreen)
        for size in ((80, 24), (60, 15)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            dialog = screen.query_one(".dialog").content_region
            assert dialog.contains_region(screen.query_one("#answers").region)
