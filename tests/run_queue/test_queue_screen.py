"""The run queue in the dashboard, driven by keys, on real entries."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from textual.widgets import OptionList

from ltui.app.screens.queue import QueueScreen
from ltui.app.screens.run import RunScreen
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.run_queue import take_out
from ltui.training.state.run_queue import QueueEntry
from ltui.training.store.queue_files import read_entry
from ltui.training.store.run_directory import RunDir
from tests.app.home import Home, a_run, opened
from tests.app.one_run import answer
from tests.run_queue.queued_programs import Programs

LATER = time.time() + 3600


def rows(it: Home) -> list[str]:
    """Return the lines of the dialog, each entry as one."""
    shown = it.app.screen.query_one(OptionList)
    texts = [str(shown.get_option_at_index(n).prompt) for n in range(shown.option_count)]
    return [" ".join(text.split()) for text in texts]


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_queue_is_reordered_held_and_taken_out_by_keys(
    programs: Programs, size: tuple[int, int]
) -> None:
    for name in "ab":
        programs.add(name, not_before=LATER)
    async with opened(programs.home, size, runs=2) as it:
        assert "2 queued" in it.subtitle
        assert "Q" in it.footer()
        await it.press("Q")
        await it.reached(QueueScreen)
        await it.until(lambda: [row[:8] for row in rows(it)] == ["1 a-0000", "2 b-0000"])
        assert "not before" in rows(it)[0]
        await it.press("J")
        await it.until(lambda: [row[:8] for row in rows(it)] == ["1 b-0000", "2 a-0000"])
        await it.press("h")
        await it.until(lambda: rows(it)[1].startswith("2 a-0000 held, not before "))
        await it.press("D")
        assert "Take a-0000 out of the run queue?" in await it.question()
        await answer(it.pilot, "y")
        await it.until(lambda: len(rows(it)) == 1)
        entry = read_entry(programs.runs[0])
        assert entry is not None
        assert entry.ended == "stopped"
        await it.press("enter")
        await it.reached(RunScreen)
    take_out(programs.runs[1])


async def test_key_is_offered_only_while_runs_wait_and_watchers_change_nothing(
    programs: Programs,
) -> None:
    run = programs.add("a", held=True)
    async with opened(programs.home, runs=1, readonly=True) as it:
        await it.press("Q")
        await it.reached(QueueScreen)
        await it.until(lambda: rows(it) == ["1 a-0000 held"])
        await it.press("h", "D")
        await it.notice("only watches")
        take_out(run)
        await it.until(lambda: rows(it) == ["Nothing waits any more."])
        await it.press("escape")
        await it.back()
        await it.until(lambda: "queued" not in it.subtitle)
        await it.press("Q")
        await it.notice("No run waits in the run queue.")


async def test_form_queues_a_run(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[QueueEntry] = []

    def enqueue(spec: RunSpec, home: Path, *_: object, entry: QueueEntry, **__: object) -> RunDir:
        asked.append(entry)
        return a_run(home, spec.id)

    monkeypatch.setattr("ltui.app.launch.build_spec.enqueue", enqueue)
    monkeypatch.chdir(tmp_path)
    async with opened(private_home, notifications=True) as it:
        await it.choose("quickstart")
        await it.press("ctrl+o")
        await it.press("enter")
        await it.pilot.pause(0.6)
        await it.press("ctrl+o")
        await it.notice("is in the run queue. Q shows it.")
        await it.until(lambda: len(it.table.rows) == 1)
    assert asked == [QueueEntry()]
