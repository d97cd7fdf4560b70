"""Resuming a run with changes, and running it again, in the form that is filled in from the run."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Input, Select, Static

from ltui.app.launch.past_run import (
    FROM_CHECKPOINT,
    FROM_START,
    OTHER_CHANGES,
    RESUME,
    Choice,
    _changed_settings,
    check_choice,
    read_past_run,
)
from ltui.app.panels.form_fields import FormField
from ltui.app.panels.panel import LaunchLine
from ltui.app.panels.runs_table import RunsTable
from ltui.app.presentation.snapshot_text import checkpoint_text
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.resume_or_rerun import CHECKPOINT, START, RerunScreen, _checkpoint_options
from ltui.app.textual_app import LtuiApp
from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import build_spec, load_preset
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import resolve
from ltui.training.lifecycle import launch_run, resume_run
from ltui.training.shared.checkpoint_files import checkpoint_name, partial_path, publish_checkpoint
from ltui.training.state.run_snapshot import CheckpointInfo, Event, RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.app.one_run import later, until

MACHINE = Machine(gpus=0, cores=8)
EPOCHS = "trainer.max_epochs"


@pytest.fixture
def home(private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (private_home / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return private_home


def a_run(
    home: Path, run_id: str = "calm-fox-1a2b", steps: tuple[int, ...] = (12, 40), **facts: Any
) -> RunDir:
    """A run of the quickstart that ended, with a checkpoint of each of ``steps``.

    ``facts`` stand in the manifest of the last one.
    """
    run_dir = RunDir(home / "runs" / run_id)
    for folder in (run_dir.path, run_dir.logs_dir(1), run_dir.checkpoints_dir):
        folder.mkdir(parents=True)
    spec = build_spec(
        load_preset("quickstart"),
        ("trainer.max_epochs=7",),
        id=run_id,
        name=run_id[:-5],
        cwd=Path.cwd(),
        python="python3",
        created_at=time.time(),
        machine=MACHINE,
    )
    run_dir.write_spec(spec)
    for step in steps:
        path = run_dir.checkpoints_dir / checkpoint_name(step, "request")
        partial_path(path).write_bytes(b"weights")
        publish_checkpoint(
            partial_path(path),
            path,
            0,
            global_step=step,
            epoch=0,
            reason="request",
            attempt=1,
            fit=1,
            **(facts if step == steps[-1] else {}),
        )
    return run_dir


class Started:
    """Record the requests to start runs; nothing is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed: list[tuple[RunDir, RunSpec | None, Path | None]] = []
        self.launched: list[tuple[RunSpec, Any]] = []
        monkeypatch.setattr(resume_run, "resume", self._resume)
        monkeypatch.setattr(launch_run, "launch", self._launch)

    def _resume(self, run_dir: RunDir, *, spec: RunSpec | None, checkpoint: Path | None) -> None:
        self.resumed.append((run_dir, spec, checkpoint))

    def _launch(self, spec: RunSpec, home: Path, start_from: Any = None, **_: Any) -> RunDir:
        self.launched.append((spec, start_from))
        return RunDir(home / "runs" / spec.id)


async def opened(pilot: Pilot[Any], app: LtuiApp, key: str) -> RerunScreen:
    home = app.screen
    assert isinstance(home, HomeScreen)
    # The form is opened over the run's line; the run itself is not shown here.
    home._open = lambda run_dir: None  # type: ignore[method-assign]
    await until(pilot, lambda: home.query(RunsTable) and home.query_one(RunsTable).rows)
    await pilot.press("3", key)
    await until(pilot, lambda: isinstance(app.screen, RerunScreen))
    screen = app.screen
    assert isinstance(screen, RerunScreen)
    # What is typed at once starts nothing.
    later(app)
    return screen


@asynccontextmanager
async def form(
    home: Path, key: str, *, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Pilot[Any], LtuiApp, RerunScreen]]:
    """Yield pilot, app and form, which ``key`` has opened at home."""
    app = LtuiApp(home)
    async with app.run_test(size=size) as pilot:
        yield pilot, app, await opened(pilot, app, key)


def field(screen: RerunScreen, key: str) -> FormField:
    (found,) = [f for f in screen.query(FormField) if f.key == key]
    return found


async def filled(pilot: Pilot[Any], screen: RerunScreen) -> None:
    await until(pilot, lambda: screen.checked is not None)


async def test_r_and_enter_resume_as_the_run_was(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, started = a_run(home), Started(monkeypatch)
    async with form(home, "r") as (pilot, app, screen):
        # Enter is kept, should it come before the run is read.
        await pilot.press("enter")
        await until(pilot, lambda: started.resumed)
        assert started.resumed == [(run_dir, None, None)]
        await until(pilot, lambda: app.screen is not screen)


async def test_a_line_that_was_meant_for_a_shell_starts_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(monkeypatch)
    a_run(home)
    app = LtuiApp(home)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await until(pilot, lambda: app.screen.query(RunsTable))
        await until(pilot, lambda: app.screen.query_one(RunsTable).rows)
        now = [app.clock() + 100.0]
        app.clock = lambda: now[0]
        await pilot.press("3", "r")
        await until(pilot, lambda: isinstance(app.screen, RerunScreen))
        screen = app.screen
        assert isinstance(screen, RerunScreen)
        title = str(screen.query_one("#question", Static).content)
        assert title == "Resume: calm-fox"
        await filled(pilot, screen)
        for key in ("tab", "enter"):
            now[0] += 0.15
            await pilot.press(key)
        assert any("keys came in one go" in n.message for n in app._notifications)
        assert app.screen is screen
        assert not started.resumed
        # A short pause, and Enter counts.
        now[0] += 0.75
        await pilot.press("enter")
        await until(pilot, lambda: started.resumed)


async def test_a_key_does_not_hide_that_the_run_is_being_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, may_start = a_run(home), threading.Event()

    def start(*_: object) -> RunDir:
        may_start.wait(60)
        return run_dir

    monkeypatch.setattr("ltui.app.screens.resume_or_rerun.start_choice", start)
    async with form(home, "r") as (pilot, app, screen):
        await filled(pilot, screen)
        await pilot.press("enter")
        field(screen, EPOCHS).query_one(Input).value = "9"
        await until(pilot, lambda: screen.checked is None)
        screen._check()
        assert str(screen.query_one(LaunchLine).content) == " ⏎ Resume   starting …"
        may_start.set()
        await until(pilot, lambda: app.screen is not screen)


async def test_a_resume_with_changes_from_an_earlier_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, started = a_run(home), Started(monkeypatch)
    monkeypatch.setattr("ltui.app.launch.build_spec._interpreter_problems", lambda *_: [])
    async with form(home, "r") as (pilot, _, screen):
        await filled(pilot, screen)
        assert field(screen, EPOCHS).text == "7"
        field(screen, EPOCHS).query_one(Input).value = "9"
        field(screen, OTHER_CHANGES).query_one(Input).value = "trainer.precision=bf16-mixed"
        earlier = checkpoint_name(12, "request")
        field(screen, CHECKPOINT).query_one(Select).value = earlier
        line = screen.query_one(LaunchLine)
        await until(pilot, lambda: "from step 12: 2 ranks, 9 epochs" in str(line.content))
        assert field(screen, EPOCHS).has_class("-changed")
        await pilot.press("enter")
        await until(pilot, lambda: started.resumed)
        ((resumed, spec, checkpoint),) = started.resumed
        assert resumed == run_dir
        assert checkpoint == run_dir.checkpoints_dir / earlier
        assert spec is not None
        assert spec.config is not None
        assert spec.config["trainer"]["max_epochs"] == 9
        assert spec.overrides[-2:] == ("trainer.max_epochs=9", "trainer.precision=bf16-mixed")


async def test_the_form_of_a_finished_run_begins_at_the_field_to_raise(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(home)
    past = read_past_run(RunDir(home / "runs" / "calm-fox-1a2b"))
    monkeypatch.setattr(
        "ltui.app.screens.resume_or_rerun.read_past_run",
        lambda _: replace(past, state=RunState.FINISHED),
    )
    async with form(home, "r") as (pilot, _, screen):
        await filled(pilot, screen)
        await until(pilot, lambda: screen.focused in set(field(screen, EPOCHS).query(Input)))


async def test_a_wrong_change_is_shown_beside_its_field_and_nothing_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(home)
    started = Started(monkeypatch)
    async with form(home, "r") as (pilot, app, screen):
        await filled(pilot, screen)
        field(screen, OTHER_CHANGES).query_one(Input).value = "trainer.max_epoch=9"
        await until(pilot, lambda: field(screen, OTHER_CHANGES).has_class("-wrong"))
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is screen
        assert not started.resumed
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not screen)


async def test_run_again_starts_a_new_run_from_the_beginning_or_a_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, started = a_run(home), Started(monkeypatch)
    async with form(home, "R") as (pilot, app, screen):
        await filled(pilot, screen)
        assert field(screen, START).text == FROM_START
        assert not field(screen, CHECKPOINT).display
        await pilot.press("enter")
        await until(pilot, lambda: started.launched)
        (spec, start_from) = started.launched[0]
        assert spec.id != run_dir.id
        assert spec.config == run_dir.read_spec().config
        assert start_from is None
        await until(pilot, lambda: app.screen is not screen)
        screen = await opened(pilot, app, "R")
        await filled(pilot, screen)
        field(screen, START).query_one(Select).value = FROM_CHECKPOINT
        await until(pilot, lambda: field(screen, CHECKPOINT).display)
        await pilot.press("enter")
        await until(pilot, lambda: len(started.launched) == 2)
        (spec, start_from) = started.launched[1]
        assert start_from.global_step == 40
        assert spec.start_from == f"{run_dir.id}:40"


def test_a_finished_run_is_resumed_once_its_end_is_raised(home: Path) -> None:
    past = replace(read_past_run(a_run(home)), state=RunState.FINISHED)
    choice = Choice(mode=RESUME, texts={})
    (problem,) = check_choice(past, choice, MACHINE).problems
    assert problem.where == EPOCHS
    assert "finished" in problem.what
    checked = check_choice(past, replace(choice, texts={EPOCHS: "9"}), MACHINE)
    assert checked.problems == ()
    assert checked.overrides == ("trainer.max_epochs=9",)
    assert check_choice(past, replace(choice, mode=FROM_START), MACHINE).problems == ()


def test_a_run_whose_preset_is_gone_still_has_fields(home: Path) -> None:
    run_dir = a_run(home)
    run_dir.write_spec(run_dir.read_spec().with_changes(preset="./gone.yaml"))
    knobs = {knob.key: knob.default for knob in read_past_run(run_dir).preset.knobs}
    assert knobs == {"trainer.devices": 2, EPOCHS: 7}


def test_a_run_on_free_gpus_asks_for_free_ones_again(home: Path) -> None:
    run_dir = a_run(home)
    run_dir.write_spec(run_dir.read_spec().with_changes(gpus="free:2"))
    past = read_past_run(run_dir)
    (devices,) = [k.default for k in past.preset.knobs if k.key == "trainer.devices"]
    assert devices == "free:2"
    assert resolve(past.preset.document)[1] == []


def test_a_command_can_be_resumed_and_run_again_without_changes(home: Path) -> None:
    run_dir = a_run(home)
    spec = run_dir.read_spec().with_changes(preset=None, config=None, command=("python", "a.py"))
    run_dir.write_spec(spec)
    past = read_past_run(run_dir)
    assert past.modes == (RESUME, FROM_START)
    assert past.preset.knobs == ()
    assert check_choice(past, Choice(mode=RESUME, texts={}), MACHINE).problems == ()


@pytest.mark.parametrize("size", [(80, 24), (60, 15)])
async def test_the_form_fits_small_terminals(home: Path, size: tuple[int, int]) -> None:
    a_run(home)
    async with form(home, "r", size=size) as (pilot, _, screen):
        await filled(pilot, screen)
        await pilot.pause()
        dialog = screen.query_one(".dialog").content_region
        for selector in ("#launch-line", "#answers"):
            assert dialog.contains_region(screen.query_one(selector).region), selector
        # The right edge of each field is visible.
        for control in screen.query("FormField Input, FormField Select"):
            assert control.region.right <= dialog.right
            assert control.region.height == 1


@pytest.mark.parametrize("size", [(80, 24), (60, 15)])
async def test_the_launch_form_fits_small_terminals(home: Path, size: tuple[int, int]) -> None:
    app = LtuiApp(home)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: bool(app.screen.query("#form FormField Input")))
        await pilot.press("N")
        await pilot.pause()
        right = app.screen.query_one("#form").content_region.right
        assert all(field.region.right <= right for field in app.screen.query("#form Input"))


def test_the_reason_of_a_checkpoint_is_made_safe() -> None:
    hostile = CheckpointInfo(path="/a.ckpt", global_step=15, reason="end\x1b]0;title\x07\x9b2J")
    assert checkpoint_text(hostile, with_path=True) == (
        "step 15, weights not checked, checksum not checked, end: /a.ckpt"
    )


def test_the_checkpoints_of_a_resume_begin_before_the_first_nan(home: Path) -> None:
    past = read_past_run(a_run(home, weights="NaN"))
    assert past.modes[0] == RESUME
    assert [text for text, _ in _checkpoint_options(past)] == [
        "before the NaN: step 12",
        "step 40 (NaN weights)",
    ]
    assert past.badness(past.checkpoints[0]) is None
    late = replace(past, nan_since=12)
    assert late.badness(past.checkpoints[0]) == "is from after the first NaN loss (step 12)"
    none = replace(past, checkpoints=past.checkpoints[1:])
    assert none.modes[0] == FROM_START
    assert _checkpoint_options(none)[0][1].startswith("step-00000040")
    choice = Choice(mode=RESUME, checkpoint=_checkpoint_options(none)[0][1], texts={})
    assert "has NaN weights" in check_choice(none, choice, MACHINE).words


def test_settings_that_a_later_attempt_changed_are_named_with_their_first_values(
    home: Path,
) -> None:
    run_dir = a_run(home)
    store = StoreWriter(run_dir.db_path)
    place: dict[str, Any] = {"boot_id": "b", "resumed_path": None, "resumed_step": None}
    store.begin_attempt(1, started_at=1.0, **place)
    values = {"values": {"learning_rate": 0.002}}
    reported = Event(rank=0, seq=0, t=1.0, kind="hyperparameters", text="", data=values)
    store.commit(1, Batch(events=[reported]))
    change = "model.init_args.learning_rate=0.02"
    store.begin_attempt(2, started_at=2.0, changes=(change,), **place)
    store.close()
    assert _changed_settings(run_dir) == ("learning_rate 0.02 (attempt 2; attempt 1: 0.002)",)
