"""The app at one run, on frames from a script, and how a test waits for its screen."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from ltui.app.live.frame import Frame
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.store.run_directory import RunDir
from ltui.widgets.header import RunHeader

S = TypeVar("S", bound=Screen[Any])


class Script:
    """A poller that returns one frame again and again, or fails."""

    def __init__(self, first: Frame) -> None:
        self.frame: Frame | Exception = first
        self.closed = False

    def poll(self, now: float, now_ns: int) -> Frame:
        if isinstance(self.frame, Exception):
            raise self.frame
        return self.frame

    def close(self) -> None:
        self.closed = True


class OneRun(LtuiApp):
    """The app at one run with frames from a script. Commands are recorded, not sent.

    ``home`` is where the dashboard remembers its settings; the run is nowhere.
    """

    def __init__(
        self, script: Script, *, readonly: bool = False, home: Path = Path("/nowhere")
    ) -> None:
        super().__init__(home, readonly=readonly)
        self.script = script
        self.asked: list[Any] = []
        self.confirmations: list[str | None] = []

    def get_default_screen(self) -> RunScreen:
        run_dir = RunDir(Path("/nowhere/runs/brave-owl-3f2a"))
        screen = RunScreen(
            run_dir, readonly=self.readonly, alone=True, make_poller=lambda: self.script
        )

        def record(request: dict[str, Any], confirmation: Any) -> None:
            self.asked.append(request["cmd"])
            self.confirmations.append(confirmation)

        screen._send_request = record  # type: ignore[method-assign, assignment]
        screen._run_again = lambda *, new_run: self.asked.append(  # type: ignore[method-assign]
            "rerun" if new_run else "resume"
        )
        return screen

    @property
    def run_screen(self) -> RunScreen:
        screen = self.screen_stack[0]
        assert isinstance(screen, RunScreen)
        return screen


class OneRunAt(OneRun):
    """The run in a home of its own, where a choice can be remembered."""

    def __init__(self, home: Path, script: Script) -> None:
        super().__init__(script)
        self.run_dir = RunDir(home / "runs" / "brave-owl-3f2a")

    def get_default_screen(self) -> RunScreen:
        return RunScreen(self.run_dir, alone=True, make_poller=lambda: self.script)


async def until(pilot: Pilot[Any], true: Callable[[], object]) -> None:
    """Wait for something that will come, generously."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never came"
        await pilot.pause(0.02)


async def reached(pilot: Pilot[Any], kind: type[S]) -> S:
    """Wait until a screen of this kind is on top with its widgets, and return it."""

    def is_reached() -> bool:
        return isinstance(pilot.app.screen, kind) and pilot.app.screen.is_mounted

    await until(pilot, is_reached)
    screen = pilot.app.screen
    assert isinstance(screen, kind)
    return screen


def notices(app: App[Any]) -> list[str]:
    """Return the texts of the notifications."""
    return [notice.message for notice in app._notifications]


async def noticed(pilot: Pilot[Any], app: App[Any], words: str) -> str:
    """Wait for a notification with these words and return it."""
    await until(pilot, lambda: any(words in text for text in notices(app)))
    return next(text for text in notices(app) if words in text)


async def shown(pilot: Pilot[Any], app: OneRun) -> RunScreen:
    await until(pilot, lambda: app.run_screen.frame is not None and app.run_screen.frame.now > 1)
    await until(pilot, lambda: app.run_screen.query_one(RunHeader).view_model is not None)
    await pilot.pause()
    return app.run_screen


@asynccontextmanager
async def one_run(
    source: Frame | Script | OneRun,
    size: tuple[int, int] = (160, 50),
    *,
    readonly: bool = False,
    notifications: bool = False,
    home: Path = Path("/nowhere"),
) -> AsyncIterator[tuple[Pilot[Any], OneRun, RunScreen]]:
    """Yield pilot, app and screen of a run, once it shows its first frame."""
    if isinstance(source, OneRun):
        app = source
    else:
        script = source if isinstance(source, Script) else Script(source)
        app = OneRun(script, readonly=readonly, home=home)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        yield pilot, app, await shown(pilot, app)


async def settled(pilot: Pilot[Any]) -> None:
    """Wait until three screenshots in a row, 0.2 s apart, are equal."""
    seen: list[str] = []
    deadline = time.monotonic() + 60
    while len(seen) < 3 or len(set(seen[-3:])) > 1:
        assert time.monotonic() < deadline, "the screen never came to rest"
        await pilot.pause(0.2)
        seen.append(pilot.app.export_screenshot(simplify=True))


def text_of_screen(app: App[Any]) -> str:
    """Return all that is drawn, as lines of text."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def answer(pilot: Pilot[Any], *keys: str) -> None:
    """Wait for a question, let its first half second pass on the app's clock, and press the keys of
    an answer, by default ``y``."""
    app = pilot.app
    assert isinstance(app, LtuiApp)

    def painted() -> bool:
        return isinstance(app.screen, ConfirmScreen) and app.screen._opened_at < math.inf

    await until(pilot, painted)
    later(app)
    await pilot.press(*keys or "y")


def later(app: LtuiApp, seconds: float = 1.0) -> None:
    """Let the app's clock pass some seconds."""
    before = app.clock
    app.clock = lambda: before() + seconds
