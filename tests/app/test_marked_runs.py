"""The keys of the home screen that act on several marked runs, on real run directories."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.widgets import Input

from ltui.app.keys.footer import KeyFooter
from ltui.app.runs.label_changes import Outcome, change_several, undo, what_changed
from ltui.app.screens.compare import CompareScreen
from ltui.app.screens.run_questions import ExportQuestion, LabelQuestion, label_change
from ltui.training.lifecycle import resume_run
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir, list_runs
from tests.app.home import Home, opened
from tests.app.one_run import answer, later, notices, text_of_screen
from tests.ltui_command import run_ltui
from tests.required import required
from tests.stored_runs import stored_run

IDS = ("brave-owl-5e6f", "calm-fox-1a2b", "old-pine-3c4d")


@pytest.fixture
def home(private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three ended runs. The working directory is empty."""
    for run_id in IDS:
        stored_run(private_home, run_id, state=RunState.FAILED, metrics={"val/loss": 0.5})
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return private_home


@pytest.fixture
def live(home: Path) -> Iterator[str]:
    """The id of a run that is running, beside the others."""
    run_ltui("exec", "--detach", "--name", "live", "--", "sleep", "600", code=0)
    (run_id,) = ids_in(home) - set(IDS)
    yield run_id
    run_ltui("stop", run_id, "--kill")


def ids_in(home: Path) -> set[str]:
    return {run.id for run in list_runs(home)}


def label(home: Path, change: Callable[[RunLabels], RunLabels], *run_ids: str) -> None:
    """Change the labels of some runs, by default of all three, as another process would."""
    for run_id in run_ids or IDS:
        change_labels(RunDir(home / "runs" / run_id), change)


def labels_of(home: Path, run_id: str) -> RunLabels:
    return read_labels(RunDir(home / "runs" / run_id))


def on_a_clock(it: Home) -> list[float]:
    """Give the app a clock that the test sets."""
    now = [it.app.clock() + 100.0]
    it.app.clock = lambda: now[0]
    return now


async def test_marked_runs_are_compared_and_the_first_one_marked_is_the_first(home: Path) -> None:
    async with opened(home, runs=3) as it:
        footer = it.screen.query_one(KeyFooter)

        def hints() -> str:
            return "".join(segment.text for segment in footer.render_line(0))

        await it.press("C")
        assert "Mark at least two runs with Space" in await it.notice("Mark")
        await it.press("space", "C")
        assert len(notices(it.app)) == 1
        assert "C compare" not in hints()
        await it.press("end", "space")
        await it.until(lambda: "C compare" in hints())
        await it.press("C")
        screen = await it.reached(CompareScreen)
        assert [run.id for run in screen._run_dirs] == [it.table.keys[0], it.table.keys[2]]


async def test_marked_runs_are_stopped_or_deleted_after_one_question_and_the_others_named(
    home: Path, live: str
) -> None:
    async with opened(home, runs=4) as it:
        await it.press("a")
        assert len(it.panel.marked) == 4
        await it.press("delete")
        question = await it.question()
        ended = [entry for entry in it.panel.targets() if entry.id != live]
        names = ", ".join(entry.name for entry in ended)
        assert question.startswith(f"Delete 3 runs?\n{names}\nThey can be restored for 7 days")
        assert "1 of the marked runs is live and kept." in question
        assert "Type the number of runs, 3, and Enter" in question
        await answer(it.pilot, "3", "enter")
        command = f"ltui restore {' '.join(entry.id for entry in ended)}"
        assert await it.notice("Deleted") == (
            f"Deleted 3 of 4 runs: not {live} (it is live). u restores them; for a week: {command}"
        )
        await it.until(lambda: set(it.panel.lines) == {live})
        assert not it.panel.marked
        await it.press("delete")
        assert "is running. Stop it first." in await it.notice("Stop it first")
        assert ids_in(home) == {live}
        await it.press("u")
        await it.notice("Restored 3 runs.")
        await it.until(lambda: len(it.panel.lines) == 4)
        await it.press("home", "s")
        assert (await it.question()).startswith("Stop live?")
        await it.press("escape", "a", "s")
        assert (await it.question()).startswith("Stop live?")
        await answer(it.pilot)
        named = ", ".join(sorted(IDS, key=list(it.panel.lines).index))
        assert f"not {named} (it is not running" in await it.notice("Stopping 1 of 4 runs")


async def test_a_sentence_that_was_meant_for_another_window_deletes_nothing(home: Path) -> None:
    async with opened(home, runs=3) as it:
        now = on_a_clock(it)
        await it.press("a")
        now[0] += 5.0
        for key in ("D", *"ay", "space", *"ok", "space", *"yes", "space", *"xyz"):
            await it.press(key)
            now[0] += 0.1
        assert not any("Deleted" in text for text in notices(it.app))
    assert ids_in(home) == set(IDS)


async def test_a_run_that_ends_while_the_question_says_that_it_is_kept_is_kept(home: Path) -> None:
    async with opened(home, runs=3) as it:
        entry = it.panel.lines[IDS[1]]
        it.panel.lines[IDS[1]] = replace(entry, snapshot=resolve_snapshot(entry.run_dir))
        it.screen.action_mark_all()
        it.screen.action_delete()
        assert "1 of the marked runs is live and kept." in await it.question()
        await answer(it.pilot, "2", "enter")
        await it.notice(f"Deleted 2 of 3 runs: not {IDS[1]} (it is live)")
    assert ids_in(home) == {IDS[1]}


async def test_a_damaged_run_among_others_is_left_out_and_named(home: Path) -> None:
    bad = RunDir(home / "runs" / IDS[1])
    bad.db_path.write_bytes(b"no database " * 1000)
    async with opened(home, runs=3) as it:
        await it.press("a", "x")
        assert await it.question(ExportQuestion) == "Export the metrics of 3 runs"
        await it.press("enter")
        sentence = await it.notice("Exported")
        assert f"Exported 2 of 3 runs to {Path.cwd() / 'runs.csv'}: not {bad.id} (" in sentence
        with Path("runs.csv").open() as file:
            assert {row["run"] for row in csv.DictReader(file)} <= {IDS[0], IDS[2]}
        assert not it.panel.marked
        await it.press("a", "delete")
        await answer(it.pilot, "3", "enter")
        await it.notice("Deleted 3 runs. u restores them; for a week: ltui restore")
        await it.until(lambda: not it.panel.lines)


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 15)])
async def test_an_export_asks_before_it_replaces_a_file(home: Path, size: tuple[int, int]) -> None:
    Path("runs.json").write_text("mine")
    async with opened(home, runs=3, size=size) as it:
        await it.press("space", "space", "x")
        await it.question(ExportQuestion)
        field = it.app.screen.query_one(Input)
        await it.until(lambda: it.app.focused is field)
        field.value = "nowhere/runs.json"
        await it.press("enter")
        assert isinstance(it.app.screen, ExportQuestion)
        await it.until(lambda: "there is no folder" in text_of_screen(it.app))
        field.value = "runs.json"
        later(it.app)
        await it.press("enter")
        assert "runs.json exists. Replace it?" in await it.question()
        later(it.app)
        await it.press("enter")
        assert Path("runs.json").read_text() == "mine"
        later(it.app)
        await it.press("enter")
        await answer(it.pilot)
        await it.notice("Exported 2 runs")
        assert Path("runs.json").read_text() != "mine"


async def test_marked_runs_are_tagged_grouped_and_annotated(home: Path) -> None:
    async with opened(home, runs=3) as it:
        marked = it.table.keys[:2]
        await it.press("space", "space", "T", *"+base,v2", "enter")
        assert await it.notice("base") == "Added base, v2 to 2 runs."
        assert not it.panel.marked
        # Another process adds a tag that the list does not know yet.
        label(home, lambda now: replace(now, tags=(*now.tags, "new")), *marked)
        await it.press("home", "space", "space", "T")
        await it.question(LabelQuestion)
        await it.press(*"-new b!d", "enter")
        assert isinstance(it.app.screen, LabelQuestion)
        assert "'b!d' cannot be a tag" in it.text("#problem")
        await it.press(*["backspace"] * 4, "enter")
        assert await it.question() == "Remove these tags of 2 runs?"
        await answer(it.pilot)
        await it.notice("Removed new from 2 runs.")
        for key, text, sentence in (
            ("G", "sweep", "Set the group of 2 runs."),
            ("n", "why not", "Set the note of 2 runs."),
        ):
            later(it.app)
            await it.press("home", "space", "space", key, *text, "enter")
            await it.notice(sentence)
    labels = [labels_of(home, run_id) for run_id in marked]
    assert labels == [RunLabels(tags=("base", "v2"), group="sweep", note="why not")] * 2
    (other,) = set(IDS) - set(marked)
    assert labels_of(home, other) == RunLabels()


@pytest.mark.parametrize(
    ("key", "kind", "removed"),
    [("n", "note", "removed 2 notes."), ("G", "group", "took 2 runs out of their groups.")],
)
async def test_different_notes_and_groups_are_kept_unless_their_removal_is_confirmed(
    home: Path, key: str, kind: str, removed: str
) -> None:
    texts = dict(zip(IDS, ("one", "two", ""), strict=True))

    def stored() -> dict[str, str]:
        return {run_id: getattr(labels_of(home, run_id), kind) for run_id in IDS}

    for run_id, text in texts.items():
        change: Any = {kind: text}
        label(home, partial(replace, **change), run_id)
    async with opened(home, runs=3) as it:
        await it.press("a", key)
        await it.question(LabelQuestion)
        assert it.app.screen.query_one(Input).placeholder == "several values; unchanged"
        await it.press("enter")
        await it.back()
        later(it.app)
        await it.press(key, "-", "enter")
        assert await it.question() == f"Remove the {kind} of 2 of 3 runs?"
        await it.press("enter", "escape", "escape")
        await it.back()
        assert stored() == texts
        later(it.app)
        await it.press(key, "-", "enter")
        await answer(it.pilot)
        await it.notice(f"{removed[0].upper()}{removed[1:]}")
        assert set(stored().values()) == {""}
        await it.press("u")
        assert await it.notice("Undid") == f"Undid: {removed}"
        assert stored() == texts
        later(it.app)
        await it.press("u")
        await it.notice("There is no change of labels and no deletion to undo.")


def test_an_undo_keeps_what_somebody_else_has_changed_since(home: Path) -> None:
    run = RunDir(home / "runs" / IDS[0])
    change_labels(run, lambda now: replace(now, note="old", tags=("a",)))
    _, changes = change_several([run], lambda now: replace(now, note="new", tags=("b",), star=True))
    assert what_changed(changes) == (
        f"added b to {run.id}, removed a from {run.id}, changed the note of {run.id}, "
        f"starred {run.id}"
    )
    change_labels(run, lambda now: replace(now, note="theirs", tags=(*now.tags, "c")))
    undo(changes)
    assert read_labels(run) == RunLabels(note="theirs", tags=("a", "c"))


async def test_a_run_is_renamed_in_the_list(home: Path) -> None:
    async with opened(home, runs=3) as it:
        run_id = it.table.keys[0]
        await it.press("E")
        assert (await it.question(LabelQuestion)).startswith("Name of ")
        await it.press(*"né 2", "enter")
        await it.until(lambda: it.names[0] == "né 2")
        assert labels_of(home, run_id).name == "né 2"
        later(it.app)
        await it.press("end", "E")
        await it.question(LabelQuestion)
        it.app.screen.query_one(Input).value = "né 2"
        await it.press("enter")
        assert await it.notice("Another run has this name too: use the id")
        await it.press("a", "E")
        assert "one run" in await it.notice("Only")


async def test_two_dashboards_that_tag_at_the_same_time_lose_nothing(home: Path) -> None:
    async with opened(home, runs=3) as one, opened(home, runs=3) as two:
        await one.press("a", "T", *"from-one", "enter")
        await two.press("a", "T", *"from-two", "enter")
        both = {("from-one", "from-two")}
        await two.until(lambda: {labels_of(home, run_id).tags for run_id in IDS} == both)


async def test_a_deletion_names_the_runs_and_spares_those_that_the_filter_hides(home: Path) -> None:
    foxes = [f"fox-{number}-1234" for number in range(6)]
    for run_id in foxes:
        stored_run(home, run_id)
    label(home, lambda now: replace(now, star=True), *foxes[1:3])
    async with opened(home, runs=9) as it:
        await it.press("a", "slash", *"fox", "enter")
        await it.until(lambda: len(it.table.keys) == 7)
        await it.press("delete")
        question = await it.question()
        names = [it.panel.lines[key].name for key in it.panel.shown_marks()]
        assert f"Delete 7 runs?\n{', '.join(names[:5])} and 2 more\n" in question
        assert "2 of them with a star." in question
        assert "\n2 marked runs are hidden by the filter and stay." in question
        await it.press("escape")
        await it.back()
        # All marks are hidden: the keys act on the selected run.
        await it.press("a", "end")
        later(it.app)
        await it.press("delete")
        selected = required(it.panel.selected)
        assert (await it.question()).startswith(f"Delete {selected.name}?")
        await answer(it.pilot)
        await it.notice(f"Deleted {selected.id}.")
    assert ids_in(home) == {*IDS, *foxes} - {selected.id}


async def test_several_runs_are_resumed_after_one_question_and_none_without_a_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[str] = []

    def resume(run_dir: RunDir) -> None:
        if run_dir.id == IDS[0]:
            raise ProblemError.of(where=run_dir.id, what="no GPU is free.")
        resumed.append(run_dir.id)

    monkeypatch.setattr(resume_run, "resume", resume)
    async with opened(home, runs=3) as it:
        await it.press("a", "r")
        await it.notice("None of the marked runs")
        for run_id, entry in it.panel.lines.items():
            summary = replace(required(entry.summary), resumable=run_id != IDS[2])
            it.panel.lines[run_id] = replace(entry, summary=summary)
        it.screen.action_resume()
        question = await it.question()
        names = [it.panel.lines[run_id].name for run_id in it.panel.marked if run_id != IDS[2]]
        first = "Resume 2 runs, each from its last checkpoint?"
        assert question.startswith(f"{first}\n{', '.join(names)}\nThey all start now.\n")
        assert question.endswith(f"\nNot resumed: {it.panel.lines[IDS[2]].name} (no checkpoint).")
        await answer(it.pilot)
        sentence = await it.notice("Resumed")
        assert sentence == f"Resumed 2 of 3 runs: not {IDS[0]} (no GPU is free)."
    assert sorted(resumed) == [IDS[1], IDS[2]]


async def test_a_readonly_dashboard_marks_and_compares_but_changes_nothing(home: Path) -> None:
    async with opened(home, runs=3, readonly=True) as it:
        await it.press("a", "delete", "s", "asterisk", "T", "r")
        assert sum("only watches" in text for text in notices(it.app)) == 1
        assert it.app.screen is it.screen
        await it.press("C")
        await it.reached(CompareScreen)
    assert ids_in(home) == set(IDS)


def test_a_report_counts_names_and_groups_the_reasons() -> None:
    failed = tuple((f"run-{i}", "it is busy.") for i in range(5))
    assert Outcome(("a",), ()).sentence("Did {}") == "Did a."
    assert Outcome(("a", "b"), ()).sentence("Did {}") == "Did 2 runs."
    assert Outcome((), (("a", "why."),)).sentence("Did {}") == "Did nothing: not a (why)."
    assert Outcome(("a",), (*failed, ("bad", "it is bad"))).sentence("Did {}") == (
        "Did 1 of 7 runs: not run-0, run-1, run-2 and 2 others (it is busy); not bad (it is bad)."
    )


def test_a_typed_text_is_a_change_of_labels_or_a_problem() -> None:
    change = required(label_change("tags", " c -a, "))
    assert change(RunLabels(tags=("a", "b"))).tags == ("b", "c")
    assert label_change("tags", " ") is None
    with pytest.raises(ProblemError):
        label_change("group", "two words")
