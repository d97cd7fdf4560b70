"""The home screen on real presets and real run directories, driven by keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.form_fields import KnobField
from ltui.app.panels.runs_table import RunsTable
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.home import HomeScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.config.run_spec import RunSpec
from ltui.training.store.run_directory import RunDir
from tests.app.one_run import S, noticed, reached, until

LAUNCH = "ltui.app.launch.build_spec.launch"
EPOCHS = "trainer.max_epochs"


def a_run(home: Path, run_id: str) -> RunDir:
    """A run directory with a specification alone."""
    run_dir = RunDir(home / "runs" / run_id)
    for folder in (run_dir.path, run_dir.logs_dir(1), run_dir.queue_dir(1)):
        folder.mkdir(parents=True)
    run_dir.write_spec(
        RunSpec(
            id=run_id,
            name=run_id[:-5],
            created_at=time.time(),
            cwd="/",
            python="python3",
            preset="quickstart",
            config={"trainer": {}},
        )
    )
    return run_dir


class Home:
    """The home screen of an app that runs."""

    def __init__(self, pilot: Pilot[Any]) -> None:
        self.pilot, self.app = pilot, cast(LtuiApp, pilot.app)
        screen = self.app.screen_stack[0]
        assert isinstance(screen, HomeScreen)
        self.screen, self.form, self.panel = screen, screen.form_panel, screen.runs_panel

    async def until(self, true: Callable[[], object]) -> None:
        await until(self.pilot, true)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def reached(self, kind: type[S]) -> S:
        return await reached(self.pilot, kind)

    async def back(self) -> None:
        """Wait until the home screen is on top."""
        await self.until(lambda: self.app.screen is self.screen)

    async def notice(self, words: str) -> str:
        return await noticed(self.pilot, self.app, words)

    async def question(self, kind: type = ConfirmScreen) -> str:
        """Wait for a question and return its text."""
        await self.until(
            lambda: isinstance(self.app.screen, kind) and self.app.screen.query("#question")
        )
        return self.text("#question")

    def text(self, selector: str) -> str:
        """Return the text of a widget of the screen on top."""
        return str(self.app.screen.query_one(selector, Static).content)

    def footer(self) -> set[str]:
        """Return the keys that the footer names."""
        return {hint.key for hint in self.screen.query_one(KeyFooter)._hints}

    # -- the list of runs ----------------------------------------------------------------------

    @property
    def table(self) -> RunsTable:
        return self.screen.query_one(RunsTable)

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.table.rows]

    @property
    def subtitle(self) -> str:
        return str(self.panel.border_subtitle)

    # -- the form of a preset ------------------------------------------------------------------

    @property
    def options(self) -> OptionList:
        return self.screen.query_one("#preset-list", OptionList)

    @property
    def preset(self) -> str | None:
        return None if self.form.preset is None else self.form.preset.name

    async def choose(self, name: str) -> None:
        self.options.highlighted = self.options.get_option_index(name)
        await self.until(lambda: self.preset == name and self.form.result is not None)

    def field(self, key: str) -> Input:
        (matching_field,) = [f for f in self.screen.query(KnobField) if f.knob.key == key]
        return matching_field.query_one(Input)

    def beside(self, key: str) -> str:
        (matching_field,) = [f for f in self.screen.query(KnobField) if f.knob.key == key]
        return str(matching_field.query_one(".field-note", Static).content)

    async def checked(self) -> None:
        """Wait until the form was checked after a change."""
        await self.until(lambda: self.form.result is None)
        await self.until(lambda: self.form.result is not None)


@asynccontextmanager
async def opened(
    home: Path,
    size: tuple[int, int] = (160, 50),
    *,
    runs: int | None = None,
    readonly: bool = False,
    notifications: bool = False,
) -> AsyncIterator[Home]:
    """Yield the home screen, once its form is checked.

    With ``runs``: once so many are listed, and with the focus on the first of them.
    """
    app = LtuiApp(home, readonly=readonly)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        it = Home(pilot)
        await it.until(lambda: bool(it.screen.query(RunsTable)))
        if runs is None:
            await it.until(lambda: it.form.result is not None)
        else:
            await it.until(lambda: len(it.table.rows) == runs)
            await it.press("3", "home")
        yield it
