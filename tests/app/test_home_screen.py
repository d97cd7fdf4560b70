"""Home driven by keys, on real presets and real run directories."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static, TextArea

from ltui.app.keys.footer import KeyFooter
from ltui.app.launch import local_machine
from ltui.app.panels.form_fields import (
    MOST_WORDS,
    FieldHint,
    FormField,
    KnobField,
    LabelField,
    LaunchForm,
    StartField,
)
from ltui.app.panels.launch_panel import FormPanel
from ltui.app.panels.panel import LaunchLine, Panel
from ltui.app.panels.runs_table import RunsTable
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.app.runs.run_rows import DEFAULT_COLUMNS, DEFAULT_LAYOUT
from ltui.app.screens.choosers import ColumnChooser
from ltui.app.screens.dialog import ConfirmScreen, ProblemScreen
from ltui.app.screens.help import HelpScreen
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.home_layout import PANELS
from ltui.app.screens.run import RunScreen
from ltui.app.screens.yaml_editor import YamlScreen
from ltui.app.settings import write_preference
from ltui.app.textual_app import LtuiApp
from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import build_spec
from ltui.training.config.run_spec import RunSpec
from ltui.training.shared.checkpoint_files import checkpoint_name, partial_path, publish_checkpoint
from ltui.training.state.run_labels import RunLabels, labels_from_document
from ltui.training.store.run_directory import RunDir, disk_use
from ltui.widgets import formats
from tests.app.frames import snapshot
from tests.app.one_run import answer, later, until
from tests.required import required
from tests.stored_runs import stored_run

LAUNCH = "ltui.app.launch.build_spec.launch"
LOCAL = """\
trainer: {max_epochs: 3}
model: {class_path: my.Model}
ltui:
  title: "[bold]mine[/bold]"
  knobs: [{key: trainer.max_epochs, label: epochs, type: int, min: 1, max: 9}]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one configuration that is fine and one that is not."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine.yaml").write_text(LOCAL)
    (folder / "broken.yaml").write_text("trainer: {\nmodel:\n")
    (folder / "other.yaml").write_text("something: else\n")
    (folder / "indent.yaml").write_text("trainer:\n  max_epochs: 3\n model:\n  class_path: a.B\n")
    (folder / "compose.yaml").write_text("services:\n  model: {image: a}\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def home(private_home: Path, place: Path) -> Path:
    """The home directory of ltui. The working directory is ``place``."""
    (private_home / "runs").mkdir(parents=True)
    return private_home


def a_run(home: Path, run_id: str) -> RunDir:
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


async def ready(pilot: Pilot[Any], app: LtuiApp) -> HomeScreen:
    screen = app.screen
    assert isinstance(screen, HomeScreen)
    await until(
        pilot, lambda: screen.form_panel.result is not None and bool(screen.query(RunsTable))
    )
    return screen


@asynccontextmanager
async def opened(
    home: Path,
    size: tuple[int, int] = (160, 50),
    *,
    readonly: bool = False,
    notifications: bool = False,
) -> AsyncIterator[tuple[Pilot[Any], LtuiApp, HomeScreen]]:
    """Yield pilot, app and home screen, once its runs and its form are shown."""
    app = LtuiApp(home, readonly=readonly)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        yield pilot, app, await ready(pilot, app)


def preset_name(screen: HomeScreen) -> str | None:
    preset = screen.form_panel.preset
    return None if preset is None else preset.name


async def choose(pilot: Pilot[Any], screen: HomeScreen, name: str) -> None:
    options = screen.query_one("#preset-list", OptionList)
    options.highlighted = options.get_option_index(name)
    await until(
        pilot,
        lambda: preset_name(screen) == name,
    )
    await until(pilot, lambda: screen.form_panel.result is not None)


def field(screen: HomeScreen, key: str) -> Input:
    (matching_field,) = [f for f in screen.query(KnobField) if f.knob.key == key]
    return matching_field.query_one(Input)


def beside(screen: HomeScreen, key: str) -> str:
    (matching_field,) = [f for f in screen.query(KnobField) if f.knob.key == key]
    return str(matching_field.query_one(".field-note", Static).content)


async def test_a_newcomer_sees_presets_a_form_and_what_to_press(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        assert screen.form_panel.preset is not None
        assert screen.form_panel.preset.name == "quickstart"
        assert len(screen.query(KnobField)) >= 3
        # No run fills no part of the screen, and a line names the way without a preset.
        assert not screen.runs_panel.display
        own = screen.query_one("#own-script", Static)
        assert own.display
        assert "ltui exec -- python train.py" in str(own.content)
        options = screen.query_one("#preset-list", OptionList)
        ids = [options.get_option_at_index(i).id for i in range(options.option_count)]
        # Files of the user come first, and the cursor is on the quickstart.
        assert ids[:3] == ["./broken.yaml", "./indent.yaml", "./mine.yaml"]
        assert options.highlighted == ids.index("quickstart") == 3
        assert "./compose.yaml" not in ids
        assert "./other.yaml" not in ids
        shown = screen.query_one("#yaml-text", Static)
        await until(pilot, lambda: "class_path" in str(shown.content))
        # A tag is separated from the name, or it is not shown.
        for i in range(options.option_count):
            option = options.get_option_at_index(i)
            words = str(option.prompt).split()
            assert words[0] == option.id


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 50), (40, 10)])
async def test_every_size_is_drawn(home: Path, size: tuple[int, int]) -> None:
    async with opened(home, size) as (pilot, _, screen):
        assert screen.query_one("#tiny").display == (size == (40, 10))
        assert screen.query_one("#yaml").display == (size == (160, 50))
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert not screen.query_one("#tiny").display


async def test_a_mistake_stands_beside_its_field_and_goes(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        epochs = field(screen, "trainer.max_epochs")
        epochs.value = "many"
        await until(pilot, lambda: "whole number" in beside(screen, "trainer.max_epochs"))
        assert screen.query_one(".-wrong .field-note").region.height == 1
        epochs.focus()
        hint = screen.query_one(FieldHint)
        await until(pilot, lambda: str(hint.content).startswith("✗ must be a whole number"))
        launch = screen.query_one(LaunchLine).region
        assert launch.y - hint.region.bottom < 2, "the launch line follows the form"
        epochs.value = "3"
        await until(pilot, lambda: "✗" not in beside(screen, "trainer.max_epochs"))
        assert screen.form_panel.result is not None
        assert "trainer.max_epochs=3" in screen.form_panel.result.overrides

        def marked() -> list[str]:
            lines = str(screen.query_one("#yaml-text", Static).content).splitlines()
            return [line.split(maxsplit=1)[1] for line in lines if line.startswith("▌")]

        await until(pilot, lambda: marked() == ["max_epochs: 3"])
        assert screen.query_one("#yaml", Panel).summary == "▌ changed"
        await pilot.press("0")
        await until(pilot, lambda: marked() == [])


async def test_keys_typed_into_a_field_stay_there(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        field(screen, "trainer.max_epochs").focus()
        await pilot.press("e", "c", "q", "slash")
        assert app.screen is screen
        assert field(screen, "trainer.max_epochs").value.endswith("ecq/")
        await pilot.press("escape")
        assert app.focused is screen.query_one("#preset-list")


async def test_a_launch_with_a_mistake_is_refused_with_its_place(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        field(screen, "trainer.max_epochs").value = "0"
        # Enter on a preset only goes to its form, also if it is pressed twice.
        line, now = screen.query_one(LaunchLine), app.clock()
        app.clock = lambda: now
        await pilot.press("enter")
        await until(pilot, lambda: app.focused is line)
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is screen
        later(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ProblemScreen))
        assert any("trainer.max_epochs" in line for line in app.screen._lines)  # type: ignore[attr-defined]
        await pilot.press("escape")
        assert not list((home / "runs").iterdir())


async def test_a_file_of_ones_own_and_a_broken_one(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        await choose(pilot, screen, "./mine.yaml")
        assert "mine" in str(screen.query_one("#form").border_title)
        options = screen.query_one("#preset-list", OptionList)
        options.highlighted = options.get_option_index("./broken.yaml")
        await until(pilot, lambda: screen.form_panel.preset is None)
        assert "damaged" in str(screen.query_one("#form").border_title)
        form = screen.query_one("#launch-form")
        await until(
            pilot, lambda: any("broken.yaml:3" in str(s.content) for s in form.query(Static))
        )
        await pilot.press("enter")
        assert app.screen is screen
        options.highlighted = options.get_option_index("./indent.yaml")
        await until(
            pilot, lambda: any("indent.yaml:3" in str(s.content) for s in form.query(Static))
        )


async def test_the_filter_narrows_by_name_and_tag(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        options = screen.query_one("#preset-list", OptionList)
        await pilot.press("slash", *"digits")
        assert options.option_count == 1
        assert options.get_option_at_index(0).id == "quickstart"
        await pilot.press("backspace", "x", "x", "x")
        assert options.get_option_at_index(0).disabled


async def test_the_configuration_can_be_edited(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        await choose(pilot, screen, "./mine.yaml")
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, YamlScreen))
        editor = app.screen.query_one(TextArea)
        good = editor.text
        editor.load_text(good.replace("max_epochs: 3", "max_epoch: 3"))
        problems = app.screen.query_one("#yaml-problems", Static)
        await until(pilot, lambda: "max_epochs" in str(problems.content))
        await pilot.press("ctrl+s")
        assert isinstance(app.screen, YamlScreen)
        editor.load_text(good.replace("max_epochs: 3", "max_epochs: 5"))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.screen is screen)
        await until(pilot, lambda: field(screen, "trainer.max_epochs").value == "5")


async def test_runs_are_listed_opened_and_deleted_with_a_question(home: Path) -> None:
    run_dir = a_run(home, "calm-fox-1a2b")
    async with opened(home) as (pilot, app, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 1)
        assert table.rows[0].name == "calm-fox"
        await pilot.press("3", "enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await pilot.press("q")
        await until(pilot, lambda: app.screen is screen)
        if not screen.runs_panel.lines["calm-fox-1a2b"].live:
            await pilot.press("delete")
            await answer(pilot)
            await until(pilot, lambda: not table.rows)
            assert not run_dir.path.exists()


async def test_a_damaged_run_is_a_line_and_hides_no_other(home: Path) -> None:
    a_run(home, "calm-fox-1a2b")
    a_run(home, "bad-bear-ffff").spec_path.write_text("version: 99\n")
    async with opened(home) as (pilot, _, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 2)
        (bad,) = [row for row in table.rows if row.id == "bad-bear-ffff"]
        assert bad.state.text == "damaged"
        assert "newer" in bad.note.text


async def test_readonly_launches_and_deletes_nothing(home: Path) -> None:
    run_dir = a_run(home, "calm-fox-1a2b")
    async with opened(home, readonly=True) as (pilot, app, screen):
        await until(pilot, lambda: len(screen.query_one(RunsTable).rows) == 1)
        form = required(screen.form_panel.form)
        texts = form.texts()
        await pilot.press("N", "1", "enter", "e", "c", "2", *"99", "3", "delete", "r")
        await pilot.pause()
        assert form.texts() == texts
        assert len(texts) > 1
        assert app.screen is screen
        assert run_dir.path.exists()
        assert any("only watches" in n.message for n in app._notifications)
        line = screen.query_one(LaunchLine)
        assert "watching only (--readonly)" in str(line.content)


async def test_a_page_that_only_watches_names_the_option_of_its_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LtuiApp, "is_web", True)
    async with opened(home, readonly=True) as (pilot, _, screen):
        line = screen.query_one(LaunchLine)
        await until(pilot, lambda: "watching only (ltui serve --control)" in str(line.content))


async def test_what_a_run_would_start_from_is_said_beside_the_field(home: Path) -> None:
    run_dir = a_run(home, "brave-owl-3f2a")
    run_dir.checkpoints_dir.mkdir()
    path = run_dir.checkpoints_dir / checkpoint_name(12, "request")
    partial_path(path).write_bytes(b"weights")
    publish_checkpoint(
        partial_path(path), path, 0, global_step=12, epoch=0, reason="request", attempt=1, fit=1
    )
    async with opened(home) as (pilot, _, screen):
        start = screen.query_one(StartField)
        note = start.query_one(".field-note", Static)
        assert "RUN or RUN:STEP" in str(note.content)
        start.query_one(Input).value = "brave-howl"
        await until(pilot, lambda: "Did you mean brave-owl-3f2a?" in str(note.content))
        start.query_one(Input).value = "brave-owl:13"
        await until(pilot, lambda: "checkpoints of steps 12" in str(note.content))
        assert start.has_class("-wrong")
        start.query_one(Input).value = "brave-owl"
        await until(pilot, lambda: str(note.content) == "step 12 of brave-owl-3f2a")
        assert not start.has_class("-wrong")
        start.query_one(Input).value = ""
        await until(pilot, lambda: "RUN or RUN:STEP" in str(note.content))
        await choose(pilot, screen, "./mine.yaml")
        assert len(screen.query(StartField)) == 1


async def test_a_run_that_can_not_start_from_there_is_not_launched(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        screen.query_one(StartField).query_one(Input).value = "nobody"
        screen.form_panel.launch()
        await until(pilot, lambda: isinstance(app.screen, ProblemScreen))
        assert not list((home / "runs").iterdir())


async def test_labels_are_typed_in_the_form_checked_and_given_to_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Mapping[str, str]] = []

    def launch(spec: RunSpec, home: Path, *_: object, **options: Any) -> RunDir:
        launched.append(options["private_files"])
        return a_run(home, spec.id)

    monkeypatch.setattr(LAUNCH, launch)
    async with opened(home) as (pilot, _, screen):
        fields = {field.key: field for field in screen.query(LabelField)}
        assert list(fields) == ["name", "tags", "group", "note"]
        fields["tags"].text, fields["group"].text = "b!d, v2", "two words"
        fields["note"].text, fields["name"].text = "the first one", "Größe 2"
        await until(pilot, lambda: screen.form_panel.result is None)
        await until(pilot, lambda: screen.form_panel.result is not None)
        notes = [str(fields[key].query_one(".field-note", Static).content) for key in fields]
        assert ["cannot be" in note for note in notes] == [False, True, True, False]
        fields["tags"].text, fields["group"].text = "base, v2", ""
        await until(pilot, lambda: screen.form_panel.result is None)
        await until(pilot, lambda: screen.form_panel.result is not None)
        screen.form_panel.launch()
        await until(pilot, lambda: launched)
        labels = labels_from_document(json.loads(launched[0]["labels.json"]))
        assert labels == RunLabels(name="Größe 2", tags=("base", "v2"), note="the first one")
        assert [run.name[:-5] for run in (home / "runs").iterdir()] == ["Groe-2"]


async def test_titles_of_presets_are_not_markup(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        await choose(pilot, screen, "./mine.yaml")
        assert "[bold]mine[/bold]" in screen.query_one("#form")._border_title.plain  # type: ignore[union-attr]
        assert isinstance(screen.query_one("#launch-form"), LaunchForm)


def offset_of(screen: HomeScreen, name: str) -> tuple[int, int]:
    """Return the offset of a preset's line from the top left of the list."""
    options = screen.query_one("#preset-list", OptionList)
    return (3, options.get_option_index(name))


async def test_a_click_selects_and_only_a_double_click_on_the_selected_opens_the_form(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(home) as (pilot, app, screen):
        launched: list[str] = []
        monkeypatch.setattr(FormPanel, "launch", lambda panel: launched.append(panel.preset.name))
        line = screen.query_one(LaunchLine)
        where = offset_of(screen, "gpt-fsdp")
        await pilot.click("#preset-list", offset=where)
        await until(pilot, lambda: preset_name(screen) == "gpt-fsdp")
        # Two clicks in a row that begin on another preset only select.
        await pilot.double_click("#preset-list", offset=offset_of(screen, "cifar10-cnn"))
        await until(pilot, lambda: preset_name(screen) == "cifar10-cnn")
        assert app.focused is not line
        await pilot.double_click("#preset-list", offset=offset_of(screen, "cifar10-cnn"))
        await until(pilot, lambda: app.focused is line)
        assert not launched
        await pilot.click("#launch-line")
        await until(pilot, lambda: launched == ["cifar10-cnn"])


async def test_a_line_says_what_a_launch_would_start(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        line = screen.query_one(LaunchLine)
        await until(pilot, lambda: "2 ranks, 30 epochs, on the CPU" in str(line.content))
        field(screen, "trainer.max_epochs").value = "3"
        await until(pilot, lambda: "3 epochs" in str(line.content))
        field(screen, "trainer.max_epochs").value = "three"
        await until(pilot, lambda: "✗ epochs: " in str(line.content))


async def test_the_help_of_a_field_stands_once_below_the_form(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        fields = list(screen.query(FormField))
        assert all(len(field.meaning.split()) <= MOST_WORDS for field in fields)
        assert all(field.size.height == 1 for field in fields)
        hint = screen.query_one(FieldHint)
        field(screen, "trainer.devices").focus()
        await until(pilot, lambda: "two ranks on the CPU" in str(hint.content))
        field(screen, "trainer.max_epochs").focus()
        await until(pilot, lambda: not str(hint.content))


async def test_what_was_typed_is_kept_for_each_preset(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        field(screen, "trainer.max_epochs").value = "40"
        screen.query_one(StartField).query_one(Input).value = "brave-owl"
        await choose(pilot, screen, "./mine.yaml")
        assert field(screen, "trainer.max_epochs").value == "3"
        assert screen.query_one(StartField).text == ""
        await choose(pilot, screen, "quickstart")
        assert field(screen, "trainer.max_epochs").value == "40"
        assert screen.query_one(StartField).text == "brave-owl"
        # Changed fields say what the preset has; one key sets all back.
        assert "was 30" in beside(screen, "trainer.max_epochs")
        screen.query_one("#preset-list").focus()
        await pilot.press("slash", *"zzz")
        await until(pilot, lambda: screen.form_panel.preset is None)
        await pilot.press("escape")
        await until(pilot, lambda: screen.form_panel.preset is not None)
        assert field(screen, "trainer.max_epochs").value == "40"
        await pilot.press("0")
        await until(pilot, lambda: field(screen, "trainer.max_epochs").value == "30")


async def test_escape_clears_the_filter_and_no_match_leaves_no_preset(home: Path) -> None:
    async with opened(home) as (pilot, app, screen):
        options = screen.query_one("#preset-list", OptionList)
        count = options.option_count
        await pilot.press("slash", *"zzz")
        await until(pilot, lambda: screen.form_panel.preset is None)
        assert "no match" in str(options.get_option_at_index(0).prompt)
        screen.form_panel.launch()
        await pilot.pause()
        assert app.screen is screen
        assert not list((home / "runs").iterdir())
        await pilot.press("escape")
        await until(pilot, lambda: options.option_count == count)
        assert app.focused is options
        await until(pilot, lambda: screen.form_panel.preset is not None)
        assert screen.form_panel.preset is not None
        assert screen.form_panel.preset.name == "quickstart"


async def test_the_footer_offers_no_letter_while_a_field_has_the_focus(home: Path) -> None:
    a_run(home, "calm-fox-1a2b")
    async with opened(home) as (pilot, app, screen):
        await until(pilot, lambda: len(screen.query_one(RunsTable).rows) == 1)
        footer = screen.query_one(KeyFooter)

        def keys() -> set[str]:
            return {hint.key for hint in footer._hints}

        assert {"N", "r", "o"} <= keys()
        await pilot.press("N")
        await until(pilot, lambda: {"⏎", "e", "q"} <= keys())
        field(screen, "trainer.max_epochs").focus()
        await until(pilot, lambda: "ctrl+q" in keys())
        assert not [key for key in keys() if len(key) == 1 and key != "⏎"]
        await pilot.press("escape")
        later(app)
        await pilot.press("escape")
        await until(pilot, lambda: {"N", "r", "o"} <= keys())


async def test_leaving_a_run_puts_the_focus_on_its_row(home: Path) -> None:
    for run_id in ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc"):
        a_run(home, run_id)
    async with opened(home) as (pilot, app, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 3)
        last = table.rows[2].id
        field(screen, "trainer.max_epochs").focus()
        screen._open(screen.runs_panel.lines[last].run_dir)
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await pilot.press("q")
        await until(pilot, lambda: app.screen is screen)
        await until(pilot, lambda: app.focused is table and table.cursor_key == last)


async def test_escape_in_the_list_of_runs_never_leads_to_a_launch(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone who leaves a run with one Escape too many, and then presses Enter, opens it again."""
    launched: list[RunSpec] = []
    monkeypatch.setattr(LAUNCH, lambda spec, *_, **__: launched.append(spec))
    a_run(home, "calm-fox-1a2b")
    async with opened(home) as (pilot, app, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 1)
        await pilot.press("3", "enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        await pilot.press("escape", "escape", "escape")
        await until(pilot, lambda: app.screen is screen)
        assert app.focused is table
        # With a filter, the first Escape clears it.
        await pilot.press("slash", *"calm", "enter", "escape")
        assert screen.runs_panel.filter_text == ""
        await pilot.press("escape")
        assert app.focused is table
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert not launched


async def test_a_refused_launch_names_the_mistakes_of_every_field_at_once(home: Path) -> None:
    async with opened(home, (80, 24)) as (pilot, app, screen):
        field(screen, "trainer.max_epochs").value = "many"
        screen.query_one(StartField).text = "no-such-run:7"
        labels = {label.key: label for label in screen.query(LabelField)}
        labels["tags"].text = "two words"
        await until(pilot, lambda: screen.form_panel.result is None)
        await until(pilot, lambda: screen.form_panel.result is not None)
        line = screen.query_one(LaunchLine)
        # The sentence is wrapped, not cut.
        await until(pilot, lambda: line.size.height > 1)
        screen.form_panel.launch()
        await until(pilot, lambda: isinstance(app.screen, ProblemScreen))
        problems = [str(line.render()) for line in app.screen.query(".problem")]
        assert len(problems) == 3
        assert [text.split()[1].rstrip(":") for text in problems] == ["epochs", "tags", "start"]


async def test_the_reset_of_the_form_empties_every_field(home: Path) -> None:
    async with opened(home) as (pilot, _, screen):
        field(screen, "trainer.max_epochs").value = "3"
        screen.query_one(StartField).text = "no-such-run:7"
        for label in screen.query(LabelField):
            label.text = "base"
        await pilot.press("0")
        await until(pilot, lambda: field(screen, "trainer.max_epochs").value == "30")
        assert screen.query_one(StartField).text == ""
        assert {label.text for label in screen.query(LabelField)} == {""}


async def test_runs_are_filtered_and_sorted(home: Path) -> None:
    for run_id in ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc"):
        a_run(home, run_id)
    async with opened(home) as (pilot, app, screen):
        table, panel = screen.query_one(RunsTable), screen.query_one("#runs")
        await until(pilot, lambda: len(table.rows) == 3)
        await pilot.press("3", "o")
        await until(pilot, lambda: "by name, A to Z" in str(panel.border_subtitle))
        assert [row.name for row in table.rows] == ["brave-owl", "calm-fox", "old-pine"]
        await pilot.press("slash", *"fox")
        await until(pilot, lambda: [row.name for row in table.rows] == ["calm-fox"])
        assert "1 of 3 runs" in str(panel.border_subtitle)
        await pilot.press("x")
        await until(pilot, lambda: "Esc clears it" in str(table.note))
        await pilot.press("escape")
        await until(pilot, lambda: len(table.rows) == 3)
        assert app.focused is table


async def test_the_columns_to_choose_are_described_in_full_at_80_columns(home: Path) -> None:
    names = ["config.model.init_args.learning_rate"]
    async with opened(home, (80, 24)) as (pilot, app, _):
        app.push_screen(ColumnChooser(DEFAULT_LAYOUT, names))
        await until(pilot, lambda: isinstance(app.screen, ColumnChooser))
        await pilot.resize_terminal(80, 60)
        await pilot.pause()
        listed = app.screen.query_one(OptionList)
        lines = [listed.render_line(y).text for y in range(listed.size.height)]
        assert any("main metric" in line for line in lines)
        assert any(f"{names[0]} setting" in line for line in lines)
        assert app.screen.query_one("#answers").size.height == 1


async def test_columns_and_order_are_chosen_and_remembered(home: Path) -> None:
    for epochs, run_id in enumerate(("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc"), 7):
        stored_run(
            home,
            run_id,
            metrics={"val/acc": 0.1 * epochs},
            config={"trainer": {"max_epochs": epochs}},
        )
    async with opened(home) as (pilot, app, screen):
        table, panel = screen.query_one(RunsTable), screen.query_one("#runs")
        await until(pilot, lambda: len(table.rows) == 3)
        await until(pilot, lambda: "3 runs, none running, " in str(panel.border_subtitle))
        total = sum(disk_use(run.run_dir.path) for run in screen.runs_panel.lines.values())
        await until(pilot, lambda: formats.size(float(total)) in str(panel.border_subtitle))
        await pilot.press("3", "m")
        await until(pilot, lambda: isinstance(app.screen, ColumnChooser))
        chooser = app.screen
        assert isinstance(chooser, ColumnChooser)
        await until(pilot, lambda: "config.trainer.max_epochs" in chooser._listed)
        for _ in range(6):
            await pilot.press("space", "down")
        # Enter in the filter goes to the first match, and closes nothing.
        await pilot.press("slash", *"val/a", "enter", "space", "s", "s")
        assert app.screen is chooser
        await pilot.press("slash", *["backspace"] * 5, *"epochs", "down", "space", "left")
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen)
        chosen = ("config.trainer.max_epochs", "val/acc", "detail")
        assert screen.runs_panel.list_layout == (chosen, "val/acc")
    async with opened(home) as (pilot, _, screen):
        table, panel = screen.query_one(RunsTable), screen.query_one("#runs")
        await until(pilot, lambda: len(table.rows) == 3 and table.rows[0].texts["val/acc"])
        assert screen.runs_panel.list_layout.columns == chosen
        assert "by val/acc, lowest first" in str(panel.border_subtitle)
        await until(
            pilot,
            lambda: (
                [row.texts.get("config.trainer.max_epochs") for row in table.rows]
                == ["7", "8", "9"]
            ),
        )
        # No run has a detail, so that it has no column.
        titles = [c.title for c in table.columns_of(table.rows)]
        assert titles == ["name", "config.trainer.max_epochs", "val/acc ↑"]
        await pilot.press("3", "O")
        await until(pilot, lambda: table.rows[0].name == "old-pine")
        (title,) = [placed for placed in table._placed if "val/acc" in placed.column.key]
        await pilot.click(table, offset=(title.x + 4, 0))
        await until(pilot, lambda: table.rows[0].name == "calm-fox")
        await pilot.click(table, offset=(3, 0))
        await until(pilot, lambda: screen.runs_panel.list_layout.order == "name")
        await pilot.press("m", "d")
        await until(pilot, lambda: screen.runs_panel.list_layout == (DEFAULT_COLUMNS, ""))


async def test_a_click_selects_a_run_and_a_double_click_opens_it(home: Path) -> None:
    for run_id in ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc"):
        stored_run(home, run_id)
    async with opened(home, (120, 40)) as (pilot, app, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 3)
        await pilot.click(table, offset=(8, 3))
        await until(pilot, lambda: table.cursor == 2)
        assert app.screen is screen
        await pilot.double_click(table, offset=(8, 2))
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert app.screen.run_dir.id == table.keys[1]  # type: ignore[attr-defined]


async def test_hidden_columns_are_counted_and_scrolled_to(home: Path) -> None:
    metrics = {f"val/metric_{n}": float(n) for n in range(6)}
    stored_run(home, "calm-fox-1a2b", metrics=metrics)
    write_preference(home, "runs.columns", ["state", *metrics])
    async with opened(home, (80, 24)) as (pilot, _, screen):
        table, panel = screen.query_one(RunsTable), screen.query_one("#runs")
        await until(pilot, lambda: "+3 columns →" in str(panel.border_subtitle))
        first = [placed.column.title for placed in table._placed]
        assert first[:2] == ["name", "state"]
        await pilot.press("right", "right")
        await until(pilot, lambda: "← +2 columns" in str(panel.border_subtitle))
        assert [placed.column.title for placed in table._placed][:2] == ["name", "val/metric_1"]
        await pilot.press(*["right"] * 9)
        assert table._placed[-1].column.title == "val/metric_5"
        assert "→" not in str(panel.border_subtitle)
        for _ in range(9):
            up = events.MouseScrollUp(table, 5, 5, 0, -1, 0, shift=True, meta=False, ctrl=False)
            table.post_message(up)
        await until(pilot, lambda: [placed.column.title for placed in table._placed] == first)


async def test_live_runs_stay_on_top_in_every_order(home: Path) -> None:
    ids = ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc")
    for run_id in ids:
        stored_run(home, run_id)
    async with opened(home) as (pilot, _, screen):
        panel = screen.runs_panel
        await until(pilot, lambda: len(panel.lines) == 3)
        entry = panel.lines[ids[2]]
        live = RunEntry(run_dir=entry.run_dir, summary=entry.summary, snapshot=snapshot())
        panel.lines = {**panel.lines, ids[2]: live}
        for order, names in (("name", [2, 1, 0]), ("-name", [2, 0, 1])):
            panel.use_layout(panel.list_layout._replace(order=order))
            assert list(screen.query_one(RunsTable).keys) == [ids[n] for n in names]


async def test_keys_that_are_typed_while_the_runs_are_read_go_to_the_list(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[RunSpec] = []
    monkeypatch.setattr(LAUNCH, lambda spec, *_, **__: launched.append(spec))
    stored_run(home, "calm-fox-1a2b")
    may_read = threading.Event()
    poll = RunList.poll

    def slow_poll(runs: RunList, limit_s: float | None = None) -> tuple[RunEntry, ...]:
        may_read.wait(30)
        return poll(runs, limit_s)

    monkeypatch.setattr(RunList, "poll", slow_poll)
    app = LtuiApp(home)
    async with app.run_test(size=(160, 50)) as pilot:
        screen = app.screen
        assert isinstance(screen, HomeScreen)
        await pilot.press("3", "delete", "?")
        assert app.screen is screen
        may_read.set()
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert isinstance(app.screen_stack[-2], ConfirmScreen)
        await pilot.press("escape", "escape")
        await until(pilot, lambda: app.screen is screen)
        assert app.focused is screen.query_one(RunsTable)
    assert not launched


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((200, 60), {"runs", "presets"}),
        ((120, 40), {"runs", "presets"}),
        ((80, 24), {"runs"}),
        ((60, 15), {"runs"}),
    ],
)
async def test_runs_come_first_and_a_new_run_is_one_key_away(
    home: Path, size: tuple[int, int], shown: set[str]
) -> None:
    stored_run(home, "calm-fox-1a2b")
    async with opened(home, size) as (pilot, app, screen):

        def visible() -> set[str]:
            return {name for name in PANELS if screen.query_one(f"#{name}").display}

        table = screen.query_one(RunsTable)
        await until(pilot, lambda: app.focused is table)
        assert visible() == shown
        runs = screen.runs_panel.region
        assert runs.width * runs.height > 0.6 * size[0] * size[1]
        await pilot.press("N")
        assert {"presets", "form"} <= visible()
        assert "runs" not in visible()
        assert app.focused is screen.query_one("#preset-list")
        await pilot.press("2", "escape")
        later(app)
        await pilot.press("escape")
        await until(pilot, lambda: app.focused is table)
        assert visible() == shown


async def test_a_maximised_panel_is_restored_and_the_list_is_remembered(home: Path) -> None:
    stored_run(home, "calm-fox-1a2b")
    for beside in (True, False):
        async with opened(home) as (pilot, app, screen):
            presets = screen.query_one("#presets")
            assert presets.display == beside
            await pilot.press("z")
            assert presets.display != beside
            await pilot.press("N", "enter", "z")
            assert not presets.display
            assert screen.query_one("#form").display
            await pilot.press("z")
            assert presets.display
            if not beside:
                await pilot.press("escape")
                later(app)
                await pilot.press("escape", "0")
                assert presets.display


async def test_the_palette_shows_a_metric_as_a_column(home: Path) -> None:
    stored_run(home, "calm-fox-1a2b", metrics={"val/acc": 0.5})
    async with opened(home) as (pilot, app, screen):
        table = screen.query_one(RunsTable)
        await until(pilot, lambda: len(table.rows) == 1)

        def commands() -> dict[str, Any]:
            return {c.title: c.callback for c in app.get_system_commands(screen)}

        commands()["Show metric val/acc"]()
        await until(pilot, lambda: table.rows[0].texts.get("val/acc") == "0.5000")
        columns = screen.runs_panel.list_layout.columns
        assert columns == (*DEFAULT_COLUMNS[:3], "val/acc", *DEFAULT_COLUMNS[3:])
        assert "Show metric val/acc" not in commands()


async def test_marked_runs_get_a_star_and_are_found_by_it(home: Path) -> None:
    for run_id in ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc"):
        a_run(home, run_id)
    async with opened(home, (80, 24)) as (pilot, app, screen):
        table, panel = screen.query_one(RunsTable), screen.runs_panel
        await until(pilot, lambda: len(table.rows) == 3)
        await pilot.press("3", "home", "space", "space")
        marked = set(table.keys[:2])
        assert panel.marked.keys() == marked
        await pilot.press("asterisk")
        await until(pilot, lambda: {e.id for e in panel.lines.values() if e.labels.star} == marked)
        await pilot.press("slash", *"has:star")
        await until(pilot, lambda: set(table.keys) == marked)
        # A wrong filter is explained in full, and the one before it stays in use.
        screen.query_one("#runs-filter", Input).value = "has:star and"
        error = screen.query_one("#runs-filter-error", Static)
        await until(pilot, lambda: error.display and "column 13" in str(error.content))
        await until(pilot, lambda: len(str(error.content)) <= error.size.width * error.size.height)
        app.home.joinpath("runs", table.keys[0], "labels.json").write_text("{}")
        panel.refresh_runs()
        await until(pilot, lambda: len(table.keys) == 1)
        await pilot.press("escape")
        await until(pilot, lambda: not error.display and len(table.keys) == 3)


async def test_enter_answers_no_question_that_destroys(home: Path) -> None:
    run_dir = a_run(home, "calm-fox-1a2b")
    async with opened(home) as (pilot, app, screen):
        await until(pilot, lambda: len(screen.query_one(RunsTable).rows) == 1)
        screen.runs_panel.lines["calm-fox-1a2b"] = RunEntry(run_dir=run_dir, problem="damaged")
        await pilot.press("3")
        screen.action_delete()
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await until(pilot, lambda: bool(app.screen.query("#answers")))
        shown = str(app.screen.query_one("#answers", Static).content)
        assert "y delete it" in shown
        assert "n or Esc keep it" in shown
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen)
        assert run_dir.path.exists()


async def test_the_editor_keeps_the_policies_and_asks_before_it_discards(
    home: Path, place: Path
) -> None:
    async with opened(home) as (pilot, app, screen):
        await choose(pilot, screen, "./mine.yaml")
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, YamlScreen))
        editor = app.screen.query_one(TextArea)
        before = editor.text
        assert "every_s: 300.0" in before
        await pilot.press("ctrl+end")
        assert editor.cursor_location == editor.document.end
        editor.load_text(before.replace("every_s: 300.0", "every_s: soon"))
        problems = app.screen.query_one("#yaml-problems", Static)
        await until(pilot, lambda: "ltui.checkpoint.every_s" in str(problems.content))
        editor.load_text(
            before.replace("every_s: 300.0", "every_s: 20").replace("best: null", "best: val/loss")
        )
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, YamlScreen))
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.screen is screen)
        await until(
            pilot,
            lambda: screen.form_panel.preset is not None and screen.form_panel.result is not None,
        )
        assert screen.form_panel.preset is not None
        assert screen.form_panel.preset.checkpoint.best == "val/loss"
        # What a launch writes to spec.yaml.
        spec = build_spec(
            screen.form_panel.preset,
            (),
            id="a",
            name="a",
            cwd=place,
            python="python3",
            created_at=0.0,
        )
        assert (spec.checkpoint.best, spec.checkpoint.every_s) == ("val/loss", 20)
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, YamlScreen))
        assert "best: val/loss" in app.screen.query_one(TextArea).text
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)


async def test_the_form_does_not_wait_for_the_machine_or_undo_the_first_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = threading.Event(), local_machine.detect_machine

    def slow(environment: Mapping[str, str]) -> Machine:
        asked.wait(60)
        return real(environment)

    monkeypatch.setattr(local_machine, "detect_machine", slow)
    app = LtuiApp(home)
    async with app.run_test(size=(160, 50)) as pilot:
        screen = app.screen
        assert isinstance(screen, HomeScreen)
        try:
            await until(pilot, lambda: bool(screen.query(KnobField)))
            assert screen.form_panel.result is None
            await pilot.press("down")
            await until(pilot, lambda: screen.form_panel.preset is not None)
            first = screen.presets_panel.highlighted_name
            assert first != "quickstart"
            await until(
                pilot,
                lambda: preset_name(screen) == first,
            )
        finally:
            asked.set()
        await ready(pilot, app)
        assert screen.presets_panel.highlighted_name == first


async def test_fields_have_edges_that_need_no_colour(home: Path) -> None:
    async with LtuiApp(home).run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: bool(pilot.app.screen.query("FormField SelectCurrent")))
        screen = pilot.app.screen
        await pilot.press("slash")
        for edged in (
            screen.query("FormField Input").first(),
            screen.query("FormField SelectCurrent").first(),
            screen.query_one("#filter"),
        ):
            screen.set_focus(None)
            await pilot.pause()
            blurred = _edges(edged)
            assert all(blurred)
            owner = next(
                node
                for node in edged.ancestors_with_self
                if isinstance(node, Widget) and node.can_focus
            )
            owner.focus()
            await until(pilot, lambda owner=owner: owner.has_focus)  # type: ignore[misc]
            assert all(_edges(edged))
            assert _edges(edged) != blurred


def _edges(widget: Widget) -> tuple[str, str]:
    return widget.styles.border_left[0], widget.styles.border_right[0]


async def test_the_palette_goes_to_a_preset_that_the_filter_hides(home: Path) -> None:
    async with opened(home, (120, 40)) as (pilot, app, screen):
        await pilot.press("slash", *"digits", "enter")
        app.open_preset("gpt-fsdp")
        await until(
            pilot,
            lambda: preset_name(screen) == "gpt-fsdp",
        )
        assert screen.presets_panel.highlighted_name == "gpt-fsdp"
        assert screen.query_one("#preset-list").has_focus
        assert not screen.presets_panel.filter_text


async def test_a_form_that_was_reached_by_typed_keys_starts_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[RunSpec] = []
    monkeypatch.setattr(LAUNCH, lambda spec, *_, **__: launched.append(spec))
    a_run(home, "calm-fox-1a2b")
    async with opened(home, notifications=True) as (pilot, app, _):
        now = [app.clock() + 100.0]
        app.clock = lambda: now[0]
        for key in ("N", "enter", "a", "enter"):
            now[0] += 0.1
            await pilot.press(key)
        await until(
            pilot, lambda: any("keys came in one go" in n.message for n in app._notifications)
        )
        assert not launched
