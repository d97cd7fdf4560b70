"""Changes of the run queue by commands and by ``ltui.api``: all runs or none, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ltui import api
from ltui.app.cli import main
from ltui.app.launch import queue_changes
from ltui.training.problem import ProblemError
from ltui.training.store.queue_files import read_queue
from ltui.training.store.run_directory import RunDir
from tests.run_queue.queued_programs import Programs
from tests.stored_runs import stored_run


@pytest.fixture
def queue(programs: Programs) -> Programs:
    """Two held runs; a run that is not in the queue."""
    for name in ("good", "next"):
        programs.add(name, held=True)
    stored_run(programs.home, "ended-0000")
    return programs


@pytest.mark.parametrize("verb", ["hold", "release", "retry", "remove"])
def test_a_change_of_several_runs_changes_all_or_none(
    queue: Programs, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_queue(queue.home)
    assert main(["queue", verb, "good", "ended", "next"]) == 2
    assert read_queue(queue.home) == before
    assert "ended-0000: the run is not in the run queue." in capsys.readouterr().err


def test_what_was_done_is_said_if_a_change_fails_in_between(
    queue: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = queue_changes.hold

    def started_meanwhile(run_dir: RunDir, *, held: bool) -> None:
        if run_dir.id == "next-0000":
            raise ProblemError.of(where=run_dir.id, what="the run is just being started.")
        change(run_dir, held=held)

    monkeypatch.setattr(queue_changes, "hold", started_meanwhile)
    assert main(["queue", "hold", "good", "next", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["data"]["changes"] == [
        {"run": "good-0000", "done": True, "detail": "held"},
        {"run": "next-0000", "done": False, "detail": "the run is just being started."},
    ]
    assert main(["queue", "hold", "next"]) == 2, "nothing was changed"


def test_commands_and_the_api_make_the_same_changes(
    queue: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (api.move_queued("next", 1), api.edit_queued("good", priority=-1, after="next:ok"))
    assert [(change.run, change.done) for change in changes] == [
        ("next-0000", True),
        ("good-0000", True),
    ]
    assert api.edit_queued("next", not_before="+2h").done
    assert main(["queue", "--json"]) == main(["queue", "--json", "remove", "next"]) == 0
    listed, removed = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(one["run"], one["after"]) for one in listed["data"]["entries"]] == [
        ("next-0000", []),
        ("good-0000", ["next-0000:ok"]),
    ]
    gone = "it is not in the run queue any more"
    assert removed["data"]["changes"] == [{"run": "next-0000", "done": True, "detail": gone}]
    assert api.retry_queued(["next"])[0].done
    assert api.queue().entries["next-0000"].ended is None
    for change in (api.hold_queued, api.remove_queued):
        assert [one.done for one in change(["good", "next", "good"])] == [True, True]


def test_what_keeps_a_held_run_besides_is_shown(
    queue: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "edit", "next", "--after", "good:ok", "--slots", "3"]) == 0
    assert main(["queue"]) == 0
    edited, *listed = capsys.readouterr().out.splitlines()
    assert edited == "next-0000: held, after good-0000:ok, 3 slots"
    assert listed[-1].endswith("  held, after good-0000:ok, 3 slots")


@pytest.mark.parametrize("text", ["queue: {slots: 0}", "queue: {slots: 2"])
def test_a_faulty_configuration_file_is_named_with_the_slots(
    private_home: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config" / "ltui" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(text)
    assert main(["queue", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith('{"schema"')
    assert str(config) in shown.err
    assert shown.err.endswith("Until that is corrected, queue.slots is 1.\n")


def test_an_entry_that_is_too_large_is_named_with_the_limit(
    queue: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.runs[0].queued_path.write_text(" " * (1 << 17))
    assert main(["queue"]) == 0
    assert "it has more than 64 kB" in capsys.readouterr().out
