"""Presets and the form for a new run on the home screen, driven by keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widget import Widget
from textual.widgets import Static, TextArea

from ltui.app.launch import local_machine
from ltui.app.panels.form_fields import (
    MOST_WORDS,
    FieldHint,
    FormField,
    KnobField,
    LabelField,
    StartField,
)
from ltui.app.panels.launch_panel import FormPanel
from ltui.app.panels.panel import LaunchLine, Panel
from ltui.app.screens.dialog import ConfirmScreen, ProblemScreen
from ltui.app.screens.yaml_editor import YamlScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.config.device_selection import Machine
from ltui.training.config.presets import build_spec
from ltui.training.config.run_spec import RunSpec
from ltui.training.shared.checkpoint_files import checkpoint_name, partial_path, publish_checkpoint
from ltui.training.state.run_labels import RunLabels, labels_from_document
from ltui.training.store.run_directory import RunDir
from tests.app.home import EPOCHS, LAUNCH, Home, a_run, opened
from tests.app.one_run import later, notices, until
from tests.required import required

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


async def test_a_newcomer_sees_presets_a_form_and_what_to_press(home: Path) -> None:
    async with opened(home) as it:
        assert it.preset == "quickstart"
        assert len(it.screen.query(KnobField)) >= 3
        # No run fills no part of the screen, and a line names the way without a preset.
        assert not it.panel.display
        assert it.screen.query_one("#own-script").display
        assert "ltui exec -- python train.py" in it.text("#own-script")
        options = it.options.options
        ids = [option.id for option in options]
        # Files of the user come first, and the cursor is on the quickstart.
        assert ids[:3] == ["./broken.yaml", "./indent.yaml", "./mine.yaml"]
        assert it.options.highlighted == ids.index("quickstart") == 3
        assert not {"./compose.yaml", "./other.yaml"} & set(ids)
        await it.until(lambda: "class_path" in it.text("#yaml-text"))
        # A tag is separated from the name, or it is not shown.
        assert [str(option.prompt).split()[0] for option in options] == ids


async def test_a_tiny_terminal_says_so_until_it_is_larger(home: Path) -> None:
    async with opened(home, (40, 10)) as it:
        assert it.screen.query_one("#tiny").display
        await it.pilot.resize_terminal(120, 40)
        await it.pilot.pause()
        assert not it.screen.query_one("#tiny").display


async def test_a_mistake_stands_beside_its_field_and_in_the_line_below_and_goes(home: Path) -> None:
    async with opened(home) as it:
        await it.until(lambda: "2 ranks, 30 epochs, on the CPU" in it.text("#launch-line"))
        epochs = it.field(EPOCHS)
        epochs.value = "many"
        await it.until(lambda: "whole number" in it.beside(EPOCHS))
        await it.until(lambda: "✗ epochs: " in it.text("#launch-line"))
        assert it.screen.query_one(".-wrong .field-note").region.height == 1
        epochs.focus()
        hint = it.screen.query_one(FieldHint)
        await it.until(lambda: str(hint.content).startswith("✗ must be a whole number"))
        launch = it.screen.query_one(LaunchLine).region
        assert launch.y - hint.region.bottom < 2, "the launch line follows the form"
        epochs.value = "3"
        await it.until(lambda: "✗" not in it.beside(EPOCHS))
        await it.until(lambda: "3 epochs" in it.text("#launch-line"))
        assert "trainer.max_epochs=3" in required(it.form.result).overrides

        def marked() -> list[str]:
            lines = it.text("#yaml-text").splitlines()
            return [line.split(maxsplit=1)[1] for line in lines if line.startswith("▌")]

        await it.until(lambda: marked() == ["max_epochs: 3"])
        assert it.screen.query_one("#yaml", Panel).summary == "▌ changed"
        await it.press("0")
        await it.until(lambda: marked() == [])


async def test_a_field_keeps_the_keys_typed_into_it_and_has_its_help_once(home: Path) -> None:
    async with opened(home) as it:
        fields = list(it.screen.query(FormField))
        assert all(len(field.meaning.split()) <= MOST_WORDS for field in fields)
        assert all(field.size.height == 1 for field in fields)
        hint = it.screen.query_one(FieldHint)
        it.field("trainer.devices").focus()
        await it.until(lambda: "two ranks on the CPU" in str(hint.content))
        it.field(EPOCHS).focus()
        await it.until(lambda: not str(hint.content))
        await it.press("e", "c", "q", "slash")
        assert it.app.screen is it.screen
        assert it.field(EPOCHS).value.endswith("ecq/")
        await it.press("escape")
        assert it.app.focused is it.options


async def test_a_refused_launch_names_the_mistakes_of_every_field_at_once(home: Path) -> None:
    async with opened(home, (80, 24)) as it:
        it.field(EPOCHS).value = "many"
        it.screen.query_one(StartField).text = "no-such-run:7"
        labels = {label.key: label for label in it.screen.query(LabelField)}
        labels["tags"].text = "two words"
        await it.checked()
        # The sentence is wrapped, not cut.
        line, now = it.screen.query_one(LaunchLine), it.app.clock()
        await it.until(lambda: line.size.height > 1)
        # Enter on a preset only goes to its form, also if it is pressed twice.
        it.app.clock = lambda: now
        await it.press("enter")
        await it.until(lambda: it.app.focused is line)
        await it.press("enter")
        await it.pilot.pause()
        assert it.app.screen is it.screen
        later(it.app)
        await it.press("enter")
        screen = await it.reached(ProblemScreen)
        await it.until(lambda: len(screen.query(".problem")) == 3)
        problems = [str(problem.render()).split() for problem in screen.query(".problem")]
        assert [words[1].rstrip(":") for words in problems] == ["epochs", "tags", "start"]
        assert problems[0][2] == "(trainer.max_epochs):"
        await it.press("escape")
        assert not list((home / "runs").iterdir())


async def test_a_file_of_ones_own_and_a_broken_one(home: Path) -> None:
    async with opened(home) as it:
        form = it.screen.query_one("#launch-form")

        async def message(words: str) -> None:
            await it.until(lambda: any(words in str(s.content) for s in form.query(Static)))

        await it.choose("./mine.yaml")
        # Titles of presets are not markup.
        assert "[bold]mine[/bold]" in it.form._border_title.plain  # type: ignore[union-attr]
        it.options.highlighted = it.options.get_option_index("./broken.yaml")
        await it.until(lambda: it.form.preset is None)
        assert "damaged" in str(it.form.border_title)
        await message("broken.yaml:3")
        await it.press("enter")
        assert it.app.screen is it.screen
        it.options.highlighted = it.options.get_option_index("./indent.yaml")
        await message("indent.yaml:3")


async def test_the_filter_narrows_by_name_and_tag_and_escape_clears_it(home: Path) -> None:
    async with opened(home) as it:
        count = it.options.option_count
        await it.press("slash", *"digits")
        assert [option.id for option in it.options.options] == ["quickstart"]
        await it.press("backspace", *"xxx")
        await it.until(lambda: it.form.preset is None)
        assert it.options.get_option_at_index(0).disabled
        assert "no match" in str(it.options.get_option_at_index(0).prompt)
        it.form.launch()
        await it.pilot.pause()
        assert it.app.screen is it.screen
        assert not list((home / "runs").iterdir())
        await it.press("escape")
        await it.until(lambda: it.options.option_count == count)
        assert it.app.focused is it.options
        await it.until(lambda: it.preset == "quickstart")
        # The palette goes to a preset that the filter hides.
        await it.press("slash", *"digits", "enter")
        it.app.open_preset("gpt-fsdp")
        await it.until(lambda: it.preset == "gpt-fsdp")
        assert it.screen.presets_panel.highlighted_name == "gpt-fsdp"
        assert it.options.has_focus
        assert not it.screen.presets_panel.filter_text


async def test_the_configuration_is_edited_with_its_policies_and_a_question_before_it_is_discarded(
    home: Path, place: Path
) -> None:
    async with opened(home) as it:
        await it.choose("./mine.yaml")
        await it.press("e")
        editor = (await it.reached(YamlScreen)).query_one(TextArea)
        before = editor.text
        assert "every_s: 300.0" in before
        await it.press("ctrl+end")
        assert editor.cursor_location == editor.document.end
        for old, wrong, problem in (
            ("max_epochs: 3", "max_epoch: 3", "max_epochs"),
            ("every_s: 300.0", "every_s: soon", "ltui.checkpoint.every_s"),
        ):
            editor.load_text(before.replace(old, wrong))
            await it.until(lambda problem=problem: problem in it.text("#yaml-problems"))  # type: ignore[misc]
            await it.press("ctrl+s")
            assert isinstance(it.app.screen, YamlScreen)
        good = before.replace("max_epochs: 3", "max_epochs: 5")
        good = good.replace("every_s: 300.0", "every_s: 20").replace("best: null", "best: val/loss")
        editor.load_text(good)
        await it.press("escape")
        await it.reached(ConfirmScreen)
        await it.press("n")
        await it.reached(YamlScreen)
        await it.press("ctrl+s")
        await it.back()
        await it.until(lambda: it.field(EPOCHS).value == "5" and it.form.result is not None)
        # What a launch writes to spec.yaml.
        preset, python = required(it.form.preset), "python3"
        spec = build_spec(preset, (), id="a", name="a", cwd=place, python=python, created_at=0.0)
        assert (spec.checkpoint.best, spec.checkpoint.every_s) == ("val/loss", 20)
        await it.press("e")
        assert "best: val/loss" in (await it.reached(YamlScreen)).query_one(TextArea).text
        await it.press("escape")
        await it.back()


async def test_readonly_launches_and_deletes_nothing(home: Path) -> None:
    run_dir = a_run(home, "calm-fox-1a2b")
    async with opened(home, readonly=True) as it:
        await it.until(lambda: len(it.table.rows) == 1)
        form = required(it.form.form)
        texts = form.texts()
        await it.press("N", "1", "enter", "e", "c", "2", *"99", "3", "delete", "r")
        await it.pilot.pause()
        assert form.texts() == texts
        assert len(texts) > 1
        assert it.app.screen is it.screen
        assert run_dir.path.exists()
        assert any("only watches" in text for text in notices(it.app))
        assert "watching only (--readonly)" in it.text("#launch-line")


async def test_a_page_that_only_watches_names_the_option_of_its_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LtuiApp, "is_web", True)
    async with opened(home, readonly=True) as it:
        words = "watching only (ltui serve --control)"
        await it.until(lambda: words in it.text("#launch-line"))


async def test_what_a_run_would_start_from_is_said_beside_the_field(home: Path) -> None:
    run_dir = a_run(home, "brave-owl-3f2a")
    run_dir.checkpoints_dir.mkdir()
    path = run_dir.checkpoints_dir / checkpoint_name(12, "request")
    partial_path(path).write_bytes(b"weights")
    publish_checkpoint(
        partial_path(path), path, 0, global_step=12, epoch=0, reason="request", attempt=1, fit=1
    )
    async with opened(home) as it:
        start = it.screen.query_one(StartField)
        note = start.query_one(".field-note", Static)
        for text, words, is_wrong in (
            ("", "RUN or RUN:STEP", False),
            ("brave-howl", "Did you mean brave-owl-3f2a?", True),
            ("brave-owl:13", "checkpoints of steps 12", True),
            ("brave-owl", "step 12 of brave-owl-3f2a", False),
            ("", "RUN or RUN:STEP", False),
        ):
            start.text = text
            await it.until(lambda words=words: words in str(note.content))  # type: ignore[misc]
            assert start.has_class("-wrong") == is_wrong
        await it.choose("./mine.yaml")
        assert len(it.screen.query(StartField)) == 1


async def test_labels_are_typed_in_the_form_checked_and_given_to_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Mapping[str, str]] = []

    def launch(spec: RunSpec, home: Path, *_: object, **options: Any) -> RunDir:
        launched.append(options["private_files"])
        return a_run(home, spec.id)

    monkeypatch.setattr(LAUNCH, launch)
    async with opened(home) as it:
        fields = {field.key: field for field in it.screen.query(LabelField)}
        assert list(fields) == ["name", "tags", "group", "note"]
        fields["tags"].text, fields["group"].text = "b!d, v2", "two words"
        fields["note"].text, fields["name"].text = "the first one", "Größe 2"
        await it.checked()
        notes = [str(fields[key].query_one(".field-note", Static).content) for key in fields]
        assert ["cannot be" in note for note in notes] == [False, True, True, False]
        fields["tags"].text, fields["group"].text = "base, v2", ""
        await it.checked()
        it.form.launch()
        await it.until(lambda: launched)
        labels = labels_from_document(json.loads(launched[0]["labels.json"]))
        assert labels == RunLabels(name="Größe 2", tags=("base", "v2"), note="the first one")
        assert [run.name[:-5] for run in (home / "runs").iterdir()] == ["Groe-2"]


async def test_a_click_selects_and_only_a_double_click_on_the_selected_opens_the_form(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(FormPanel, "launch", lambda panel: launched.append(panel.preset.name))
    async with opened(home) as it:
        line = it.screen.query_one(LaunchLine)

        def offset_of(name: str) -> tuple[int, int]:
            return (3, it.options.get_option_index(name))

        await it.pilot.click("#preset-list", offset=offset_of("gpt-fsdp"))
        await it.until(lambda: it.preset == "gpt-fsdp")
        # Two clicks in a row that begin on another preset only select.
        await it.pilot.double_click("#preset-list", offset=offset_of("cifar10-cnn"))
        await it.until(lambda: it.preset == "cifar10-cnn")
        assert it.app.focused is not line
        await it.pilot.double_click("#preset-list", offset=offset_of("cifar10-cnn"))
        await it.until(lambda: it.app.focused is line)
        assert not launched
        await it.pilot.click("#launch-line")
        await it.until(lambda: launched == ["cifar10-cnn"])


async def test_what_was_typed_is_kept_for_each_preset_until_it_is_reset(home: Path) -> None:
    async with opened(home) as it:
        it.field(EPOCHS).value = "40"
        it.screen.query_one(StartField).text = "brave-owl"
        await it.choose("./mine.yaml")
        assert it.field(EPOCHS).value == "3"
        assert it.screen.query_one(StartField).text == ""
        await it.choose("quickstart")
        assert it.field(EPOCHS).value == "40"
        assert it.screen.query_one(StartField).text == "brave-owl"
        # Changed fields say what the preset has.
        assert "was 30" in it.beside(EPOCHS)
        it.options.focus()
        await it.press("slash", *"zzz")
        await it.until(lambda: it.form.preset is None)
        await it.press("escape")
        await it.until(lambda: it.form.preset is not None)
        assert it.field(EPOCHS).value == "40"
        for label in it.screen.query(LabelField):
            label.text = "base"
        # One key empties every field.
        await it.press("0")
        await it.until(lambda: it.field(EPOCHS).value == "30")
        assert it.screen.query_one(StartField).text == ""
        assert {label.text for label in it.screen.query(LabelField)} == {""}


async def test_the_form_does_not_wait_for_the_machine_or_undo_the_first_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = threading.Event(), local_machine.detect_machine

    def slow(environment: Mapping[str, str]) -> Machine:
        asked.wait(60)
        return real(environment)

    monkeypatch.setattr(local_machine, "detect_machine", slow)
    async with LtuiApp(home).run_test(size=(160, 50)) as pilot:
        it = Home(pilot)
        try:
            await it.until(lambda: bool(it.screen.query(KnobField)))
            assert it.form.result is None
            await it.press("down")
            await it.until(lambda: it.form.preset is not None)
            first = it.screen.presets_panel.highlighted_name
            assert first != "quickstart"
            await it.until(lambda: it.preset == first)
        finally:
            asked.set()
        await it.until(lambda: it.form.result is not None)
        assert it.screen.presets_panel.highlighted_name == first


async def test_fields_have_edges_that_need_no_colour(home: Path) -> None:
    async with LtuiApp(home).run_test(size=(120, 40)) as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: bool(screen.query("FormField SelectCurrent")))
        await pilot.press("slash")
        for selector in ("FormField Input", "FormField SelectCurrent", "#filter"):
            edged = screen.query(selector).first()
            screen.set_focus(None)
            await pilot.pause()
            blurred = _edges(edged)
            assert all(blurred)
            nodes = [node for node in edged.ancestors_with_self if isinstance(node, Widget)]
            owner = next(node for node in nodes if node.can_focus)
            owner.focus()
            await until(pilot, lambda owner=owner: owner.has_focus)  # type: ignore[misc]
            assert all(_edges(edged))
            assert _edges(edged) != blurred


def _edges(widget: Widget) -> tuple[str, str]:
    return widget.styles.border_left[0], widget.styles.border_right[0]


async def test_a_form_that_was_reached_by_typed_keys_starts_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[RunSpec] = []
    monkeypatch.setattr(LAUNCH, lambda spec, *_, **__: launched.append(spec))
    a_run(home, "calm-fox-1a2b")
    async with opened(home, notifications=True) as it:
        now = [it.app.clock() + 100.0]
        it.app.clock = lambda: now[0]
        for key in ("N", "enter", "a", "enter"):
            now[0] += 0.1
            await it.press(key)
        await it.notice("keys came in one go")
        assert not launched
