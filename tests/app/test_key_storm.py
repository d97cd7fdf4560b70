"""The dashboard survives any input, and a crash ends with a sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltui.app.screens.help import HelpScreen
from ltui.app.screens.palette import Palette
from ltui.app.textual_app import LtuiApp
from tests.app.key_storm import Storm, nothing_starts
from tests.app.one_run import until

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
