"""The list of runs on the home screen, driven by keys and the mouse."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual import events
from textual.widgets import Input, OptionList, Static

from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.runs_table import RunsTable
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_list import RunList
from ltui.app.runs.run_rows import DEFAULT_COLUMNS, DEFAULT_LAYOUT
from ltui.app.screens.choosers import ColumnChooser
from ltui.app.screens.dialog import ConfirmScreen
from ltui.app.screens.help import HelpScreen
from ltui.app.screens.home_layout import FORM, PANELS, PRESETS, RUNS, YAML, HomeLayout
from ltui.app.screens.run import RunScreen
from ltui.app.settings import write_preference
from ltui.app.textual_app import LtuiApp
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import CheckpointInfo, RunState
from ltui.training.store.run_directory import disk_use
from ltui.widgets import formats
from tests.app.frames import snapshot
from tests.app.home import EPOCHS, LAUNCH, Home, opened
from tests.app.one_run import answer, later
from tests.stored_runs import stored_run

IDS = ("calm-fox-1a2b", "brave-owl-3f2a", "old-pine-77cc")


@pytest.fixture
def home(private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without runs. The working directory has no presets."""
    monkeypatch.chdir(tmp_path)
    return private_home


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The runs that were launched in a test; none is started."""
    specs: list[RunSpec] = []
    monkeypatch.setattr(LAUNCH, lambda spec, *_, **__: specs.append(spec))
    return specs


async def test_sweeps_are_offered_as_soon_as_there_is_one(home: Path) -> None:
    stored_run(home, IDS[0])
    async with opened(home, runs=1) as it:
        assert {"C", "W"} & it.footer() == {"C"}
        (home / "sweeps" / "a").mkdir(parents=True)
        await it.until(lambda: "W" in it.footer())


async def test_a_run_is_opened_and_deleted_after_a_question_that_enter_does_not_answer(
    home: Path,
) -> None:
    run_dir = stored_run(home, IDS[0])
    async with opened(home, runs=1) as it:
        assert it.names == ["calm-fox"]
        await it.press("enter")
        await it.reached(RunScreen)
        await it.press("q")
        await it.back()
        await it.press("delete")
        await it.question()
        answers = it.text("#answers")
        assert "y delete it" in answers
        assert "n or Esc keep it" in answers
        await it.press("enter")
        await it.back()
        assert run_dir.path.exists()
        later(it.app)
        await it.press("delete")
        await answer(it.pilot)
        await it.until(lambda: not it.table.rows)
        assert not run_dir.path.exists()


async def test_the_footer_offers_no_letter_while_a_field_has_the_focus(home: Path) -> None:
    stored_run(home, IDS[0])
    async with opened(home, runs=1) as it:
        await it.until(lambda: it.form.result is not None)
        assert {"N", "r", "o"} <= it.footer()
        await it.press("N")
        await it.until(lambda: {"⏎", "e", "q"} <= it.footer())
        it.field(EPOCHS).focus()
        await it.until(lambda: "ctrl+q" in it.footer())
        assert not [key for key in it.footer() if len(key) == 1 and key != "⏎"]
        await it.press("escape")
        later(it.app)
        await it.press("escape")
        await it.until(lambda: {"N", "r", "o"} <= it.footer())


async def test_a_click_selects_a_run_a_double_click_opens_it_and_leaving_it_focuses_its_row(
    home: Path,
) -> None:
    for run_id in IDS:
        stored_run(home, run_id)
    async with opened(home, (120, 40), runs=3) as it:
        await it.pilot.click(it.table, offset=(8, 3))
        await it.until(lambda: it.table.cursor == 2)
        assert it.app.screen is it.screen
        await it.pilot.double_click(it.table, offset=(8, 2))
        assert (await it.reached(RunScreen)).run_dir.id == it.table.keys[1]
        await it.press("q")
        await it.back()
        last = it.table.keys[2]
        it.options.focus()
        it.screen._open(it.panel.lines[last].run_dir)
        await it.reached(RunScreen)
        later(it.app)  # a second q at once would be that of a key that is held
        await it.press("q")
        await it.until(lambda: it.app.focused is it.table and it.table.cursor_key == last)


async def test_escape_in_the_list_of_runs_never_leads_to_a_launch(
    home: Path, launched: list[RunSpec]
) -> None:
    """Someone who leaves a run with one Escape too many, and then presses Enter, opens it again."""
    stored_run(home, IDS[0])
    async with opened(home, runs=1) as it:
        await it.press("enter")
        await it.reached(RunScreen)
        await it.press("escape", "escape", "escape")
        await it.back()
        assert it.app.focused is it.table
        # With a filter, the first Escape clears it.
        await it.press("slash", *"calm", "enter", "escape")
        assert it.panel.filter_text == ""
        await it.press("escape")
        assert it.app.focused is it.table
        await it.press("enter")
        await it.reached(RunScreen)
        assert not launched


async def test_runs_are_filtered_and_sorted(home: Path) -> None:
    for run_id in IDS:
        stored_run(home, run_id)
    async with opened(home, runs=3) as it:
        await it.press("o")
        await it.until(lambda: "by name, A to Z" in it.subtitle)
        assert it.names == ["brave-owl", "calm-fox", "old-pine"]
        await it.press("slash", *"fox")
        await it.until(lambda: it.names == ["calm-fox"])
        assert "1 of 3 runs" in it.subtitle
        await it.press("x")
        await it.until(lambda: "Esc clears it" in str(it.table.note))
        await it.press("escape")
        await it.until(lambda: len(it.table.rows) == 3)
        assert it.app.focused is it.table


async def test_the_footer_offers_the_keys_of_the_run_that_a_cleared_filter_shows(
    home: Path,
) -> None:
    saved = CheckpointInfo(path="9.ckpt", global_step=9, ok=True)
    stored_run(home, IDS[0], state=RunState.STOPPED, checkpoints=(saved,))
    async with opened(home, runs=1) as it:
        footer = it.screen.query_one(KeyFooter)
        await it.press("slash", *"zz", "enter")
        await it.until(lambda: "resume" not in footer.render_line(0).text)
        await it.press("escape")
        await it.until(lambda: "resume" in footer.render_line(0).text)


async def test_the_columns_to_choose_are_described_in_full_at_80_columns(home: Path) -> None:
    name = "config.model.init_args.learning_rate"
    async with opened(home, (80, 24)) as it:
        it.app.push_screen(ColumnChooser(DEFAULT_LAYOUT, [name]))
        listed = (await it.reached(ColumnChooser)).query_one(OptionList)
        await it.pilot.resize_terminal(80, 60)
        await it.pilot.pause()
        lines = [listed.render_line(y).text for y in range(listed.size.height)]
        assert any("main metric" in line for line in lines)
        assert any(f"{name} setting" in line for line in lines)
        assert it.app.screen.query_one("#answers").size.height == 1


async def test_columns_and_order_are_chosen_and_remembered(home: Path) -> None:
    for epochs, run_id in enumerate(IDS, 7):
        config = {"trainer": {"max_epochs": epochs}}
        stored_run(home, run_id, metrics={"val/acc": 0.1 * epochs}, config=config)
    chosen = ("config.trainer.max_epochs", "val/acc", "detail")
    async with opened(home, runs=3) as it:
        await it.until(lambda: "3 runs, none running, " in it.subtitle)
        total = sum(disk_use(run.run_dir.path) for run in it.panel.lines.values())
        await it.until(lambda: formats.size(float(total)) in it.subtitle)
        await it.press("m")
        chooser = await it.reached(ColumnChooser)
        await it.until(lambda: chosen[0] in chooser._listed)
        for _ in range(6):
            await it.press("space", "down")
        # Enter in the filter goes to the first match, and closes nothing.
        await it.press("slash", *"val/a", "enter", "space", "s", "s")
        assert it.app.screen is chooser
        await it.press("slash", *["backspace"] * 5, *"epochs", "down", "space", "left", "enter")
        await it.back()
        assert it.panel.list_layout == (chosen, "val/acc")
    async with opened(home, runs=3) as it:
        await it.until(lambda: bool(it.table.rows[0].texts["val/acc"]))
        assert it.panel.list_layout.columns == chosen
        assert "by val/acc, lowest first" in it.subtitle
        await it.until(
            lambda: [row.texts.get(chosen[0]) for row in it.table.rows] == ["7", "8", "9"]
        )
        # No run has a detail, so that it has no column.
        titles = [c.title for c in it.table.columns_of(it.table.rows)]
        assert titles == ["name", chosen[0], "val/acc ↑"]
        await it.press("O")
        await it.until(lambda: it.names[0] == "old-pine")
        (title,) = [placed for placed in it.table._placed if "val/acc" in placed.column.key]
        await it.pilot.click(it.table, offset=(title.x + 4, 0))
        await it.until(lambda: it.names[0] == "calm-fox")
        await it.pilot.click(it.table, offset=(3, 0))
        await it.until(lambda: it.panel.list_layout.order == "name")
        await it.press("m", "d")
        await it.until(lambda: it.panel.list_layout == (DEFAULT_COLUMNS, ""))


async def test_hidden_columns_are_counted_and_scrolled_to(home: Path) -> None:
    metrics = {f"val/metric_{n}": float(n) for n in range(6)}
    stored_run(home, IDS[0], metrics=metrics)
    write_preference(home, "runs.columns", ["state", *metrics])
    async with opened(home, (80, 24), runs=1) as it:

        def titles() -> list[str]:
            return [placed.column.title for placed in it.table._placed]

        await it.until(lambda: "+3 columns →" in it.subtitle)
        first = titles()
        assert first[:2] == ["name", "state"]
        await it.press("right", "right")
        await it.until(lambda: "← +2 columns" in it.subtitle)
        assert titles()[:2] == ["name", "val/metric_1"]
        await it.press(*["right"] * 9)
        assert titles()[-1] == "val/metric_5"
        assert "→" not in it.subtitle
        for _ in range(9):
            up = events.MouseScrollUp(it.table, 5, 5, 0, -1, 0, shift=True, meta=False, ctrl=False)
            it.table.post_message(up)
        await it.until(lambda: titles() == first)


async def test_live_runs_stay_on_top_in_every_order(home: Path) -> None:
    for run_id in IDS:
        stored_run(home, run_id)
    async with opened(home, runs=3) as it:
        entry = it.panel.lines[IDS[2]]
        live = RunEntry(run_dir=entry.run_dir, summary=entry.summary, snapshot=snapshot())
        it.panel.lines = {**it.panel.lines, IDS[2]: live}
        for order, names in (("name", [2, 1, 0]), ("-name", [2, 0, 1])):
            it.panel.use_layout(it.panel.list_layout._replace(order=order))
            assert list(it.table.keys) == [IDS[n] for n in names]


async def test_keys_that_are_typed_while_the_runs_are_read_go_to_the_list(
    home: Path, monkeypatch: pytest.MonkeyPatch, launched: list[RunSpec]
) -> None:
    stored_run(home, IDS[0])
    may_read = threading.Event()
    poll = RunList.poll

    def slow_poll(runs: RunList, limit_s: float | None = None) -> tuple[RunEntry, ...]:
        may_read.wait(30)
        return poll(runs, limit_s)

    monkeypatch.setattr(RunList, "poll", slow_poll)
    async with LtuiApp(home).run_test(size=(160, 50)) as pilot:
        it = Home(pilot)
        await it.press("3", "delete", "?")
        assert it.app.screen is it.screen
        may_read.set()
        await it.reached(HelpScreen)
        assert isinstance(it.app.screen_stack[-2], ConfirmScreen)
        await it.press("escape", "escape")
        await it.back()
        assert it.app.focused is it.table
    assert not launched


@pytest.mark.parametrize(
    ("size", "shown"), [((120, 40), {"runs", "presets"}), ((60, 15), {"runs"})]
)
async def test_runs_come_first_and_a_new_run_is_one_key_away(
    home: Path, size: tuple[int, int], shown: set[str]
) -> None:
    stored_run(home, IDS[0])
    async with opened(home, size) as it:

        def visible() -> set[str]:
            return {name for name in PANELS if it.screen.query_one(f"#{name}").display}

        await it.until(lambda: isinstance(it.app.focused, RunsTable))
        assert visible() == shown
        runs = it.panel.region
        assert runs.width * runs.height > 0.6 * size[0] * size[1]
        await it.press("N")
        assert {"presets", "form"} <= visible()
        assert "runs" not in visible()
        assert it.app.focused is it.options
        await it.press("2", "escape")
        later(it.app)
        await it.press("escape")
        await it.until(lambda: it.app.focused is it.table)
        assert visible() == shown


async def test_a_maximised_panel_is_restored_and_the_list_is_remembered(home: Path) -> None:
    stored_run(home, IDS[0])
    for beside in (True, False):
        async with opened(home) as it:
            presets = it.screen.query_one("#presets")
            assert presets.display == beside
            await it.press("z")
            assert presets.display != beside
            await it.press("N", "enter", "z")
            assert not presets.display
            assert it.form.display
            await it.press("z")
            assert presets.display
            if not beside:
                await it.press("escape")
                later(it.app)
                await it.press("escape", "0")
                assert presets.display


async def test_the_palette_shows_a_metric_as_a_column(home: Path) -> None:
    stored_run(home, IDS[0], metrics={"val/acc": 0.5})
    async with opened(home, runs=1) as it:

        def commands() -> dict[str, Any]:
            return {c.title: c.callback for c in it.app.get_system_commands(it.screen)}

        commands()["Show metric val/acc"]()
        await it.until(lambda: it.table.rows[0].texts.get("val/acc") == "0.5000")
        columns = it.panel.list_layout.columns
        assert columns == (*DEFAULT_COLUMNS[:3], "val/acc", *DEFAULT_COLUMNS[3:])
        assert "Show metric val/acc" not in commands()


async def test_marked_runs_get_a_star_and_are_found_by_it(home: Path) -> None:
    for run_id in IDS:
        stored_run(home, run_id)
    async with opened(home, (80, 24), runs=3) as it:
        await it.press("space", "space")
        marked = set(it.table.keys[:2])
        assert it.panel.marked.keys() == marked
        await it.press("asterisk")
        await it.until(lambda: {e.id for e in it.panel.lines.values() if e.labels.star} == marked)
        await it.press("slash", *"has:star")
        await it.until(lambda: set(it.table.keys) == marked)
        # A wrong filter is explained in full, and the one before it stays in use.
        it.screen.query_one("#runs-filter", Input).value = "has:star and"
        error = it.screen.query_one("#runs-filter-error", Static)
        await it.until(lambda: error.display and "column 13" in str(error.content))
        await it.until(lambda: len(str(error.content)) <= error.size.width * error.size.height)
        it.panel.lines[it.table.keys[0]].run_dir.labels_path.write_text("{}")
        it.panel.refresh_runs()
        await it.until(lambda: len(it.table.keys) == 1)
        await it.press("escape")
        await it.until(lambda: not error.display and len(it.table.keys) == 3)


@pytest.mark.parametrize(("width", "height"), [(200, 60), (160, 50), (120, 40), (80, 24), (60, 15)])
def test_runs_come_first_if_there_are_any(width: int, height: int) -> None:
    none = HomeLayout(width=width, height=height)
    assert none.visible() >= {PRESETS, FORM}
    assert RUNS not in none.visible()
    some = replace(none, has_runs=True)
    assert some.visible() == ({RUNS, PRESETS} if width >= 120 else {RUNS})
    assert replace(some, side_presets=False).visible() == {RUNS}
    form = some.showing(FORM)
    assert form.visible() == none.visible()
    assert form.showing(RUNS) == some
    assert form.maximised(FORM).visible() == {FORM}
    assert form.maximised(FORM).maximised(FORM) == form


def test_the_presets_beside_the_runs_are_shown_without_a_form() -> None:
    wide = HomeLayout(width=160, height=50, has_runs=True)
    assert wide.showing(PRESETS) == wide
    assert replace(wide, width=80).showing(PRESETS).visible() == {PRESETS, FORM}
    assert YAML in wide.showing(FORM).visible()
    assert HomeLayout(width=40, height=10, has_runs=True).visible() == frozenset()
