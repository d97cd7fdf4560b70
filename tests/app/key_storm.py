"""A storm of keys, palette words, clicks and sizes on the dashboard, from a seed.

``python -m tests.app.key_storm``: LTUI_STORM_S seconds (300) from LTUI_CHAOS_SEED (drawn, and
printed).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from textual import events
from textual.geometry import Size

from ltui.app.machines_demo import MachinesDemoApp
from ltui.app.screens.compare import CompareScreen
from ltui.app.scripted_machines import Cluster
from ltui.app.textual_app import LtuiApp
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import list_runs
from tests.app.frames import frame
from tests.app.one_run import OneRun, Script
from tests.stored_runs import stored_run

KEYS = [
    *"abcdefghijklmnopqrstuvwxyzCDGMNORSTLYWXZ0123456789/?.,+-<>()[]*=y",
    *("enter", "escape", "tab", "shift+tab", "up", "down", "left", "right", "pageup", "pagedown"),
    *("home", "end", "space", "delete", "backspace", "ctrl+p", "ctrl+p", "ctrl+s", "ctrl+up"),
]
WORDS = ("stop", "kill", "run", "note", "tag", "edit", "compare", "theme", "metric", "del", "open")
SIZES = ((160, 50), (120, 40), (80, 24), (60, 15), (40, 10), (200, 60))
JOURNEYS = {
    "HomeScreen": ("enter", "a C", "N e", "N enter", "a T", "a G", "n", "x", "D", "m", "R", "/ o"),
    "RunScreen": ("M", "m", "d", "3 enter", "6", "S", "R", "s", "k", "v", "4 / 1", "5 / a"),
    "CompareScreen": ("m", "2 enter", "2 space", "G", "4", "z", "n", "escape"),
    "MetricsScreen": ("/ l", "z", "n", "escape"),
    "YamlScreen": ("escape", "ctrl+s", "escape y"),
}
"""For the screens from which others open: the keys that open them."""
LIFE_S = 20.0
"""Maximum seconds until the dashboard is opened anew, with another first screen."""
LEAVING = ("q", "ctrl+q", "ctrl+c")
"""Keys that may close the dashboard; they come seldom, so that a life lasts."""
STARTS = (
    "ltui.app.launch.build_spec.start_run",
    "ltui.training.lifecycle.launch_run.launch",
    "ltui.training.lifecycle.resume_run.resume",
    "ltui.app.live.run_requests.send_request",
    "ltui.app.panels.launch_panel.FormPanel.check_with_classes",
)
"""What starts or needs processes: the storm is on the dashboard alone."""


def _refused(*_: object, **__: object) -> None:
    raise ProblemError.of(where="storm", what="nothing is started here.")


@contextmanager
def nothing_starts() -> Iterator[None]:
    patches: list[Any] = [patch(name, _refused) for name in STARTS[:-1]]
    patches.append(patch(STARTS[-1], lambda _: None))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def a_home(home: Path) -> None:
    """Some ended runs in a home, as far as they are missing."""
    for number, state in enumerate((RunState.FINISHED, RunState.FAILED, RunState.STOPPED) * 2):
        if not (home / "runs" / f"storm-{number}-1a2b").exists():
            stored_run(home, f"storm-{number}-1a2b", state=state, metrics={"val/loss": 0.5})


class Storm:
    """Random input of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self.last: deque[str] = deque(maxlen=40)
        """The last inputs, for whoever reads of a crash."""
        self.inputs = self.lives = 0
        self.screens: Counter[str] = Counter()
        """How often an input found each screen on top."""

    async def blow(self, home: Path, seconds: float) -> None:
        """Blow for some seconds of an open dashboard. Fails with its error if it crashes."""
        left = seconds
        while left > 0:
            self.lives += 1
            a_home(home)
            app = self._an_app(home)
            async with app.run_test(size=SIZES[0], notifications=True):
                began = time.monotonic()
                end = began + min(left, LIFE_S)
                while app.is_running and app._exception is None and time.monotonic() < end:
                    self._burst(app)
                    await asyncio.sleep(self._random.choice((0.0, 0.0, 0.01, 0.1)))
                app.exit()  # As a user does; run_test alone removes screens of a running app.
            left -= time.monotonic() - began
            assert app.return_code in (0, None)

    def _an_app(self, home: Path) -> LtuiApp:
        """A dashboard at the home screen, a live run, simulated machines, or a comparison."""
        kind, readonly = self._random.random(), self._random.random() < 0.25
        if kind < 0.5:
            return LtuiApp(home, readonly=readonly)
        if kind < 0.7:
            return OneRun(Script(frame()), readonly=readonly)
        if kind < 0.85:
            return MachinesDemoApp(Cluster(nodes=self._random.choice((1, 3))))
        return LtuiApp(home, first=lambda: CompareScreen(list_runs(home)), readonly=readonly)

    def _burst(self, app: LtuiApp) -> None:
        draw = self._random
        width, height = app.size
        kind = draw.random()
        self.inputs += 1
        names = [] if not app.screen_stack else [each.__name__ for each in type(app.screen).__mro__]
        self.screens.update(names[:1])
        journeys = next((JOURNEYS[name] for name in names if name in JOURNEYS), ())
        if journeys and draw.random() < 0.2:
            self._press(app, *draw.choice(journeys).split())
        elif kind < 0.5:
            keys = draw.choices(KEYS, k=draw.randint(1, 4))
            if draw.random() < 0.1:
                keys.append(draw.choice(LEAVING))
            self._press(app, *keys)
        elif kind < 0.65:
            self._press(app, "ctrl+p", *draw.choice(WORDS), *["enter"] * draw.randint(1, 3))
        elif kind < 0.97:
            x, y = draw.randrange(max(1, width)), draw.randrange(max(1, height))
            self.last.append(f"click {x} {y}")
            for _ in range(draw.randint(1, 3)):
                self._mouse(app, events.MouseMove, x, y)
                self._mouse(app, events.MouseDown, x, y)
                if draw.random() < 0.2:
                    x, y = draw.randrange(max(1, width)), draw.randrange(max(1, height))
                    self._mouse(app, events.MouseMove, x, y)
                self._mouse(app, events.MouseUp, x, y)
        else:
            size = Size(*draw.choice(SIZES))
            self.last.append(f"size {size}")
            app.post_message(events.Resize(size, size))

    def _press(self, app: LtuiApp, *keys: str) -> None:
        self.last.append(" ".join(keys))
        for key in keys:
            name = {"?": "question_mark", "/": "slash", "*": "asterisk"}.get(key, key)
            app.post_message(events.Key(name, key if len(key) == 1 else None))

    @staticmethod
    def _mouse(app: LtuiApp, kind: Any, x: int, y: int) -> None:
        app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, x, y))


def main() -> int:
    seconds = float(os.environ.get("LTUI_STORM_S", "300"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    print(f"{seconds:.0f} s of keys, palette words and clicks, LTUI_CHAOS_SEED={seed}", flush=True)
    storm = Storm(seed)
    with tempfile.TemporaryDirectory(prefix="ltui-storm-") as folder, nothing_starts():
        os.environ["LTUI_HOME"] = os.environ["XDG_CONFIG_HOME"] = f"{folder}/home"
        os.chdir(folder)
        try:
            asyncio.run(storm.blow(Path(folder) / "home", seconds))
        except BaseException:
            print("\n".join(storm.last), f"crashed after {storm.inputs} inputs", sep="\n")
            raise
    print(", ".join(f"{name} {count}" for name, count in storm.screens.most_common()))
    print(f"the dashboard survived {storm.inputs} bursts of input in {storm.lives} lives")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
