"""Resuming a run with changes, and running it again, in the form that is filled in from the run."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.widgets import Input, Select

from ltui.app.launch.past_run import (
    FROM_CHECKPOINT,
    FROM_START,
    NEWEST,
    OTHER_CHANGES,
    RESUME,
    Choice,
    PastRun,
    _as_preset,
    _changed_settings,
    check_choice,
    read_past_run,
)
from ltui.app.panels.form_fields import FormField
from ltui.app.presentation.run_report import checkpoint_rows, show_lines
from ltui.app.presentation.snapshot_text import checkpoint_text, newest_checkpoint_text
from ltui.app.runs.run_entry import run_document
from ltui.app.screens.resume_or_run_again import (
    CHECKPOINT,
    START,
    RunAgainScreen,
    _checkpoint_options,
)
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import build_spec, load_preset
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import resolve
from ltui.training.lifecycle import launch_run, resume_run
from ltui.training.shared.checkpoint_files import checkpoint_name, partial_path, publish_checkpoint
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import CheckpointInfo, Event, RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.labels_file import change_labels, files_at_launch
from ltui.training.store.recorded_environment import record_environment
from ltui.training.store.run_directory import RunDir
from tests.app.frames import NOW, rank, snapshot
from tests.app.home import EPOCHS, Home, opened
from tests.app.one_run import later, reached, until
from tests.required import required

MACHINE = Machine(gpus=0, cores=8)


@pytest.fixture
def home(private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (private_home / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return private_home


def a_run(home: Path, **facts: Any) -> RunDir:
    """A run of the quickstart that ended, with checkpoints of steps 12 and 40.

    ``facts`` stand in the manifest of the last one.
    """
    run_dir = RunDir(home / "runs" / "calm-fox-1a2b")
    for folder in (run_dir.logs_dir(1), run_dir.path / "engine", run_dir.checkpoints_dir):
        folder.mkdir(parents=True)
    spec = build_spec(
        load_preset("quickstart"),
        ("trainer.max_epochs=7",),
        id=run_dir.id,
        name="calm-fox",
        cwd=Path.cwd(),
        python="python3",
        created_at=time.time(),
        machine=MACHINE,
    )
    run_dir.write_spec(spec)
    for step in (12, 40):
        path = run_dir.checkpoints_dir / checkpoint_name(step, "request")
        partial_path(path).write_bytes(b"weights")
        manifest: dict[str, Any] = {
            "global_step": step,
            "epoch": 0,
            "reason": "request",
            "attempt": 1,
            "fit": 1,
        }
        manifest |= facts if step == 40 else {}
        publish_checkpoint(partial_path(path), path, 0, **manifest)
    return run_dir


class Started:
    """Record the requests to start runs; nothing is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed: list[tuple[RunDir, RunSpec | None, Path | None]] = []
        self.launched: list[tuple[RunSpec, Any]] = []
        self.files: list[Mapping[str, str]] = []
        self.environments: list[Mapping[str, str]] = []
        monkeypatch.setattr(resume_run, "resume", self._resume)
        monkeypatch.setattr(launch_run, "launch", self._launch)

    def _resume(self, run_dir: RunDir, *, spec: RunSpec | None, checkpoint: Path | None) -> None:
        self.resumed.append((run_dir, spec, checkpoint))

    def _launch(
        self,
        spec: RunSpec,
        home: Path,
        start_from: Any = None,
        *,
        private_files: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> RunDir:
        self.launched.append((spec, start_from))
        self.files.append(private_files)
        self.environments.append(environment)
        return RunDir(home / "runs" / spec.id)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


class Form:
    """The form that a key has opened at home."""

    def __init__(self, it: Home, screen: RunAgainScreen) -> None:
        self.it, self.screen = it, screen
        self.press, self.until = it.press, it.until

    def field(self, key: str) -> FormField:
        (found,) = [f for f in self.screen.query(FormField) if f.key == key]
        return found

    def fill(self, key: str, text: str) -> None:
        self.field(key).query_one(Input).value = text

    async def filled(self) -> None:
        await self.until(lambda: self.screen.checked is not None)

    async def closed(self) -> None:
        await self.until(lambda: self.it.app.screen is not self.screen)


async def open_form(it: Home, key: str) -> Form:
    # The form is opened over the run's line; the run itself is not shown here.
    it.screen._open = lambda run_dir: None  # type: ignore[method-assign]
    await it.press("3", key)
    form = Form(it, await it.reached(RunAgainScreen))
    # What is typed at once starts nothing.
    later(it.app)
    return form


@asynccontextmanager
async def opened_form(
    home: Path, key: str, *, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[Form]:
    async with opened(home, size, runs=1) as it:
        yield await open_form(it, key)


async def test_r_and_enter_resume_as_the_run_was(home: Path, started: Started) -> None:
    run_dir = a_run(home)
    async with opened_form(home, "r") as form:
        # Enter is kept, should it come before the run is read.
        await form.press("enter")
        await form.until(lambda: started.resumed)
        assert started.resumed == [(run_dir, None, None)]
        await form.closed()


async def test_a_line_that_was_meant_for_a_shell_starts_nothing(
    home: Path, started: Started
) -> None:
    a_run(home)
    async with opened(home, (120, 40), runs=1, notifications=True) as it:
        now = [it.app.clock() + 100.0]
        it.app.clock = lambda: now[0]
        await it.press("3", "r")
        form = Form(it, await it.reached(RunAgainScreen))
        assert it.text("#question") == "Resume: calm-fox"
        await form.filled()
        for key in ("tab", "enter"):
            now[0] += 0.15
            await it.press(key)
        await it.notice("keys came in one go")
        assert it.app.screen is form.screen
        assert not started.resumed
        # A short pause, and Enter counts.
        now[0] += 0.75
        await it.press("enter")
        await it.until(lambda: started.resumed)


async def test_a_key_does_not_hide_that_the_run_is_being_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, may_start = a_run(home), threading.Event()

    def start(*_: object) -> RunDir:
        may_start.wait(60)
        return run_dir

    monkeypatch.setattr("ltui.app.screens.resume_or_run_again.start_choice", start)
    async with opened_form(home, "r") as form:
        await form.filled()
        await form.press("enter")
        form.fill(EPOCHS, "9")
        await form.until(lambda: form.screen.checked is None)
        form.screen._check()
        assert form.it.text("#launch-line") == " ⏎ Resume   starting …"
        may_start.set()
        await form.closed()


async def test_a_resume_with_changes_from_an_earlier_checkpoint_once_they_are_right(
    home: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    run_dir = a_run(home)
    monkeypatch.setattr("ltui.app.launch.build_spec._interpreter_problems", lambda *_: [])
    async with opened_form(home, "r") as form:
        await form.filled()
        assert form.field(EPOCHS).text == "7"
        form.fill(OTHER_CHANGES, "trainer.max_epoch=9")
        await form.until(lambda: form.field(OTHER_CHANGES).has_class("-wrong"))
        await form.press("enter")
        await form.it.pilot.pause()
        assert form.it.app.screen is form.screen
        assert not started.resumed
        form.fill(EPOCHS, "9")
        form.fill(OTHER_CHANGES, "trainer.precision=bf16-mixed")
        earlier = checkpoint_name(12, "request")
        form.field(CHECKPOINT).query_one(Select).value = earlier
        await form.until(lambda: "from step 12: 2 ranks, 9 epochs" in form.it.text("#launch-line"))
        assert form.field(EPOCHS).has_class("-changed")
        later(form.it.app)
        await form.press("enter")
        await form.until(lambda: started.resumed)
        ((resumed, spec, checkpoint),) = started.resumed
        assert resumed == run_dir
        assert checkpoint == run_dir.checkpoints_dir / earlier
        assert required(required(spec).config)["trainer"]["max_epochs"] == 9
        overrides = required(spec).overrides
        assert overrides[-2:] == ("trainer.max_epochs=9", "trainer.precision=bf16-mixed")


async def test_the_form_of_a_finished_run_begins_at_the_field_to_raise(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = replace(read_past_run(a_run(home)), state=RunState.FINISHED)
    monkeypatch.setattr("ltui.app.screens.resume_or_run_again.read_past_run", lambda _: past)
    async with opened_form(home, "r") as form:
        await form.filled()
        await form.until(lambda: form.screen.focused in set(form.field(EPOCHS).query(Input)))


async def test_run_again_starts_a_new_run_from_the_beginning_or_a_checkpoint(
    home: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(home)
    run_dir.engine_start_path(1).write_text("{}")
    monkeypatch.setenv("STEPS", "3000")
    record_environment(run_dir, 1)
    monkeypatch.delenv("STEPS")
    kept = RunLabels(tags=("base",), group="seeds")
    change_labels(run_dir, lambda _: replace(kept, name="the best", star=True))
    async with opened_form(home, "R") as form:
        await form.filled()
        assert form.field(START).text == FROM_START
        assert not form.field(CHECKPOINT).display
        await form.press("enter")
        await form.until(lambda: started.launched)
        (spec, start_from) = started.launched[0]
        assert spec.id != run_dir.id
        assert spec.config == run_dir.read_spec().config
        assert start_from is None
        await form.closed()
        form = await open_form(form.it, "R")
        await form.filled()
        form.field(START).query_one(Select).value = FROM_CHECKPOINT
        await form.until(lambda: form.field(CHECKPOINT).display)
        await form.press("enter")
        await form.until(lambda: len(started.launched) == 2)
        (spec, start_from) = started.launched[1]
        assert start_from.global_step == 40
        assert spec.start_from == f"{run_dir.id}:40"
        assert started.files == [files_at_launch(kept)] * 2
        assert [environment["STEPS"] for environment in started.environments] == ["3000"] * 2


async def test_a_run_is_run_again_from_its_own_dashboard(home: Path, started: Started) -> None:
    app = LtuiApp(home, run=a_run(home))
    async with app.run_test(size=(120, 40)) as pilot:
        first = await reached(pilot, RunScreen)
        await until(pilot, lambda: first.snapshot is not None)  # before, the key is refused
        await pilot.press("R")
        form = await reached(pilot, RunAgainScreen)
        later(app)
        await pilot.press("enter")
        await until(pilot, lambda: form not in app.screen_stack)
        screen = await reached(pilot, RunScreen)
        (new, _), *_ = started.launched
        assert screen.run_dir.id == new.id
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)


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
    async with opened_form(home, "r", size=size) as form:
        await form.filled()
        await form.it.pilot.pause()
        dialog = form.screen.query_one(".dialog").content_region
        for selector in ("#launch-line", "#answers"):
            assert dialog.contains_region(form.screen.query_one(selector).region), selector
        # The right edge of each field is visible.
        for control in form.screen.query("FormField Input, FormField Select"):
            assert control.region.right <= dialog.right
            assert control.region.height == 1


@pytest.mark.parametrize("size", [(80, 24), (60, 15)])
async def test_the_launch_form_fits_small_terminals(home: Path, size: tuple[int, int]) -> None:
    async with opened(home, size) as it:
        await it.press("N")
        await it.pilot.pause()
        right = it.form.content_region.right
        assert all(field.region.right <= right for field in it.screen.query("#form Input"))


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


# -- checkpoints of an older step -----------------------------------------------------------------

CHECKPOINTS = (
    CheckpointInfo(path="/c/step-50.ckpt", global_step=50, attempt=1, fit=1),
    CheckpointInfo(path="/c/step-92.ckpt", global_step=92, attempt=2, fit=1),
    CheckpointInfo(
        path="/c/step-242.ckpt", global_step=242, attempt=1, fit=1, superseded=True, saved_at=9e9
    ),
)


def past_run(folder: Path) -> PastRun:
    spec = RunSpec(
        id="a", name="a", created_at=1.0, cwd="/", python="python3", nproc=1, command=("train",)
    )
    older, newest, left = CHECKPOINTS
    return PastRun(
        run_dir=RunDir(folder),
        spec=spec,
        preset=_as_preset(spec),
        checkpoints=(newest, left, older),
        replaced={older.path: "Steps 51 to 92 are gone."},
        state=RunState.STOPPED,
        attempt=2,
    )


@pytest.mark.parametrize(("checkpoint", "sentence"), [(NEWEST, False), ("step-50.ckpt", True)])
def test_the_form_names_the_steps_that_a_resume_replaces(
    tmp_path: Path, checkpoint: str, sentence: bool
) -> None:
    choice = Choice(mode=RESUME, checkpoint=checkpoint, texts={})
    words = check_choice(past_run(tmp_path), choice, Machine()).words
    assert words.endswith(". Steps 51 to 92 are gone.") == sentence


def test_the_form_marks_a_checkpoint_that_the_run_has_left(tmp_path: Path) -> None:
    newest, *others = _checkpoint_options(past_run(tmp_path))
    assert newest == ("newest: step 92", NEWEST)
    assert [text for text, _ in others] == ["step 242 (no longer part of the run)", "step 50"]


def test_every_text_names_the_checkpoint_that_a_resume_takes() -> None:
    stopped = snapshot(state=RunState.STOPPED, checkpoints=CHECKPOINTS)
    assert newest_checkpoint_text(stopped).startswith("newest checkpoint: step 92,")
    assert checkpoint_rows(stopped)[0][1].startswith("step 92,")
    (left,) = (line for line in show_lines(stopped, NOW) if "step 242," in line)
    assert "no longer part of the run" in left


def test_epochs_of_ranks_count_from_1_in_json() -> None:
    document = run_document(snapshot(epoch=2, ranks=(rank(0, epoch=2), rank(1, epoch=None))))
    assert document["epoch"] == 3
    assert [r["epoch"] for r in document["ranks"]] == [3, None]
