"""The screen of a sweep, driven by keys."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.launch import sweep_changes
from ltui.app.panels.launch_panel import READONLY
from ltui.app.screens.compare import CompareScreen
from ltui.app.screens.dialog import ConfirmScreen, ProblemScreen
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.run import RunScreen
from ltui.app.screens.sweep import SweepScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.config.run_spec import RunSpec
from ltui.training.sweep.record import State, Sweep, Told, Trial
from ltui.training.sweep.space import parse_dimension
from ltui.training.sweep.sweep_files import SweepDir, create_sweep
from tests.app.one_run import noticed, reached, text_of_screen, until
from tests.stored_runs import stored_run


@pytest.fixture(autouse=True)
def no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_changes, "wake_dispatcher", lambda _: None)
    monkeypatch.setattr(sweep_changes, "ensure_dispatcher", lambda _: None)


def make_sweep(home: Path, name: str = "rates") -> SweepDir:
    """Create a sweep of three trials, two of which have a run."""
    states = {"finished": 0.25, "out of memory": None, "pruned": 0.75}
    tried = tuple(
        Trial(
            number=number,
            suggestion=number,
            parameters={"model.lr": 0.1 / (number + 1), "data.size": 8},
            cell=str(number),
            state=State(state),
            last=last,
            scores={} if last is None else {100: last},
            detail="the detail of the trial",
        )
        for number, (state, last) in enumerate(states.items())
    )
    space = tuple(map(parse_dimension, ("model.lr=interval(0, 1)", "data.size=choice(8, 9)")))
    best = Told(suggestion=0, parameters=tried[0].parameters, state=State.FINISHED, value=0.25)
    sweep = Sweep(
        name=name,
        created_at=time.time(),
        space=space,
        metric="val/loss",
        tried=tried,
        told=(best,),
        stopped=True,
    )
    for trial in tried[:1] + tried[2:]:
        stored_run(home, sweep.run_id(trial), metrics={"val/loss": 0.1})
    spec = RunSpec(id="s", name="s", created_at=0, cwd="/", python="python", command=("x",))
    return create_sweep(home, sweep, spec, {})


def app_at(home: Path, made: SweepDir, *, readonly: bool = False) -> LtuiApp:
    first = partial(SweepScreen, made, readonly=readonly)
    return LtuiApp(home, first=first, readonly=readonly)


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_every_trial_is_shown_with_its_parameters(
    private_home: Path, size: tuple[int, int]
) -> None:
    app = app_at(private_home, make_sweep(private_home))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "8 combinations have finished" in text_of_screen(app))
        text = text_of_screen(app)
        for words in (
            *("stopped; 1 finished, 1 out of memory, 1 pruned", "best val/loss"),
            *("★  0", "0.0333333", "model.lr=interval(0.0, 1.0)"),
            *("trial 0: model.lr=0.1, data.size=8", "0.2500 at 100", "the detail"),
            *("importance: n/a (fewer than 8 combinations have finished)", "compare"),
        ):
            assert words in text
        await pilot.press("down", "down")
        await until(pilot, lambda: "0.7500 at 100" in text_of_screen(app))


async def test_trials_are_opened_and_compared(private_home: Path) -> None:
    app = app_at(private_home, make_sweep(private_home))
    async with app.run_test(size=(160, 50), notifications=True) as pilot:
        await until(pilot, lambda: "pruned" in text_of_screen(app))
        await pilot.press("enter")
        await reached(pilot, RunScreen)
        await pilot.press("q")
        await reached(pilot, SweepScreen)
        await pilot.press("C")
        await reached(pilot, CompareScreen)
        await pilot.press("q")
        await reached(pilot, SweepScreen)
        await pilot.press("down", "enter")
        await noticed(pilot, app, "is not there")


async def test_the_keys_change_the_record(private_home: Path) -> None:
    made = make_sweep(private_home)
    app = app_at(private_home, made)
    async with app.run_test(size=(160, 50), notifications=True) as pilot:
        await until(pilot, lambda: "pruned" in text_of_screen(app))
        await pilot.press("s")
        await noticed(pilot, app, "The sweep is stopped.")
        await pilot.press("r")
        await until(pilot, lambda: not made.read().stopped)
        await until(pilot, lambda: "running" in text_of_screen(app))
        await pilot.press("up", "r")
        await reached(pilot, ProblemScreen)
        await pilot.press("escape")
        await reached(pilot, SweepScreen)
        await pilot.press("down", "r")
        await until(pilot, lambda: made.read().tried[1].state == "planned")
        await pilot.press("s")
        await reached(pilot, ConfirmScreen)
        app.screen.dismiss(True)
        await until(pilot, lambda: made.read().stopped)


async def test_the_home_screen_opens_the_last_sweep(private_home: Path) -> None:
    older = make_sweep(private_home, "older")
    app = LtuiApp(private_home, readonly=True)
    async with app.run_test(size=(160, 50), notifications=True) as pilot:
        home = await reached(pilot, HomeScreen)
        await until(pilot, lambda: home.focused is not None)
        newer = make_sweep(private_home, "newer")
        older.change(lambda sweep: replace(sweep, problem="the disk is full"))
        await pilot.press("W")
        screen = await reached(pilot, SweepScreen)
        assert screen.sweep_dir == newer
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: "the disk is full" in text_of_screen(app))
        await pilot.press("r")
        await noticed(pilot, app, READONLY)
        await pilot.press("q")
        await reached(pilot, HomeScreen)
