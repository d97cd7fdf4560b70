"""The dispatcher as a process: order, slots, failures, several terminals at once."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from ltui.app.launch import queue_dispatcher
from ltui.training.lifecycle.delete_runs import delete
from ltui.training.lifecycle.run_processes import shim_identity
from ltui.training.lifecycle.run_queue import read_facts, start_queued, take_out
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_queue import STOPPED, QueueEntry
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.find_run import find_run
from ltui.training.store.queue_files import (
    check_asked,
    published,
    read_entry,
    read_queue,
    remove_entry,
    write_entry,
)
from ltui.training.store.run_directory import RunDir, write_json
from tests.ltui_command import LTUI, run_ltui
from tests.required import required
from tests.run_queue.queued_programs import Programs
from tests.waiting import wait_for

FOR_EVER = 600.0


@pytest.mark.usefixtures("two_slots")
def test_two_slots_are_used_at_once_and_given_back(programs: Programs) -> None:
    both = [programs.add(name, "=2", held=True) for name in "ab"]
    last = programs.add("c", held=True, after=("a-0000:ok",))
    programs.release_all()
    waits = "waits for run a-0000 to finish"
    wait_for(lambda: resolve_snapshot(last).detail, wanted=lambda detail: detail == waits)
    programs.wait()
    assert sorted(programs.starts()[:2]) == ["a", "b"]
    times = {(line.word, line.run[0]): line.t for line in programs.lines()}
    assert times["end", "a"] < times["start", "c"]
    assert not any(run.queued_path.exists() or run.environment_path.exists() for run in both)
    wait_for(programs.dispatcher, wanted=lambda pid: pid is None)


def test_run_that_cannot_start_fails_with_a_sentence_and_the_others_go_on(
    programs: Programs, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    bad = programs.add("bad", held=True)
    spec = bad.read_spec().with_changes(cwd=str(folder))
    bad.write_spec(spec)
    good, needs_it = programs.add("good", held=True), programs.add("x", after=("bad-0000:ok",))
    (programs.home / "runs" / "torn-0000").mkdir()
    (programs.home / "runs" / "torn-0000" / "queued.json").write_text('{"priority": "high"')
    programs.release_all()
    programs.wait(bad, good)
    assert programs.state(bad) is RunState.FAILED
    sentence = f"could not be started: working directory: {folder} does not exist."
    listed = run_ltui("queue", code=0).stdout
    assert sentence in listed
    assert "never starts: run bad-0000 had to finish before, and it is failed" in listed
    assert "torn-0000" in listed
    assert "damaged" in listed
    folder.mkdir()
    run_ltui("queue", "retry", "bad", code=0)
    programs.wait(bad, needs_it)
    assert programs.starts() == ["good", "bad", "x"]


def test_stop_takes_a_run_out_and_it_can_be_put_back_or_deleted(programs: Programs) -> None:
    first, second = programs.add("first", held=True), programs.add("second", held=True)
    said = run_ltui("stop", "first", code=0).stdout
    assert "stopped: nothing was trained" in said
    assert "ltui queue retry first-0000" in said
    assert "held" in run_ltui("queue", code=0).stdout
    assert "nothing to save" in run_ltui("checkpoint", "second", code=2).stderr
    for words in (("pause", "second"), ("resume", "second")):
        assert "queue" in run_ltui(*words, code=2).stderr
    with pytest.raises(ProblemError, match="Stop it first"):
        delete(second)
    run_ltui("queue", "remove", "second", code=0)
    delete(second)
    run_ltui("queue", "retry", "first", code=0)
    programs.wait(first)
    assert programs.starts() == ["first"]


def test_wait_for_an_entry_that_can_never_start_ends(programs: Programs) -> None:
    programs.add("a", held=True)
    for name, after in (("b", "a-0000:ok"), ("c", "b-0000"), ("large", None)):
        programs.add(name, after=() if after is None else (after,), slots=1 if after else 9)
    run_ltui("queue", "remove", "a", code=0)
    answer = json.loads(run_ltui("wait", "b", "c", "large", "--json", code=5).stdout)
    assert [run["reason"] for run in answer["data"]["runs"]] == ["never starts"] * 3
    assert "waits for run b-0000, and that never starts" in answer["data"]["runs"][1]["sentence"]
    assert answer["next"][:2] == ["ltui queue edit b-0000 --after none", "ltui queue remove b-0000"]
    assert "ltui queue edit large-0000 --slots 1" in answer["next"]
    run_ltui("queue", "edit", "b", "--after", "none", code=0)
    run_ltui("wait", "b", "c", code=0)
    run_ltui("queue", "remove", "large", code=0)


def test_second_supervisor_does_not_start_the_run_again(programs: Programs) -> None:
    """Two dispatchers may both have seen the mark, if the first was killed after it."""
    run = programs.add("once", held=True)
    held = read_entry(run)
    assert held is not None
    programs.release_all()
    programs.wait(run)
    start_queued(run, replace(held, starting=1))
    assert programs.starts() == ["once"]
    assert read_entry(run) is None


def test_several_terminals_change_the_queue_at_once(programs: Programs) -> None:
    programs.add("blocker", FOR_EVER)
    wait_for(programs.starts)
    runs = [programs.add(name) for name in "abcdef"]
    changes = [
        ("queue", "move", "a", "--to", "6"), ("queue", "move", "f", "--to", "1"),
        ("queue", "hold", "b", "c", "d"), ("queue", "move", "e", "--priority", "3"),
        ("queue", "remove", "c"), ("exec", "--queue", "--name", "g", "--", "true"),
    ]  # fmt: skip
    processes = [subprocess.Popen([*LTUI, *words], stdout=subprocess.DEVNULL) for words in changes]
    codes = [process.wait(120) for process in processes]
    assert codes[:2] + codes[3:] == [0] * 5  # `c` may have been removed before it was to be held
    entries = read_queue(programs.home).entries
    assert len(entries) == 7
    assert entries["e-0000"].priority == 3
    assert entries["c-0000"].ended == "stopped"
    assert entries["b-0000"].held == (codes[2] != 2)  # all that are named, or none
    run_ltui("queue", "remove", "b", "d", "e", code=0)
    run_ltui("stop", "blocker", code=0)
    programs.wait(*runs)
    order = programs.starts()
    assert order[0] == "blocker"
    assert sorted(order[1:]) == ["a", "f"]
    wait_for(lambda: published(programs.home), wanted=lambda places: not places)


@pytest.mark.parametrize(
    ("entry", "begun", "may_start"),
    [
        (QueueEntry(starting=2), None, True),
        (QueueEntry(starting=2), 1, True),
        (QueueEntry(starting=2), 2, False),
        (QueueEntry(starting=1), None, False),
        (QueueEntry(), None, False),
        (QueueEntry(starting=2, ended=STOPPED), None, False),
        (None, None, False),
    ],
)
def test_supervisor_starts_only_the_attempt_that_the_entry_asks_for(
    tmp_path: Path, entry: QueueEntry | None, begun: int | None, may_start: bool
) -> None:
    run = RunDir(tmp_path / "runs" / "a-0000")
    run.shim_path.parent.mkdir(parents=True)
    if entry is not None:
        write_entry(run, entry)
    if begun is not None:
        write_json(run.shim_path, {"attempt": begun})
    with nullcontext() if may_start else pytest.raises(ProblemError, match="does not start it"):
        check_asked(run, 2)


def _kill_supervisor(run: RunDir) -> None:
    """Kill the supervisor of a run, and wait for the one that its shim starts."""
    # Until the supervisor has seen the shim, both end together.
    wait_for(run.queued_path.exists, wanted=lambda waits: not waits)
    before = required(wait_for(lambda: lock_holder(run.lock_path)))
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: lock_holder(run.lock_path), wanted=lambda now: now not in (None, before))


def _kill_dispatcher(programs: Programs) -> None:
    killed = required(wait_for(programs.dispatcher))
    os.kill(killed, signal.SIGKILL)
    wait_for(programs.dispatcher, wanted=lambda pid: pid != killed)  # a live run replaces it soon


def test_killed_dispatcher_is_replaced_by_a_command(programs: Programs) -> None:
    run = programs.add("later", not_before=time.time() + FOR_EVER)
    for words in (("runs",), ("queue",)):
        _kill_dispatcher(programs)
        assert "later-0000" in run_ltui(*words, code=0).stdout
        wait_for(programs.dispatcher)
    _kill_dispatcher(programs)
    run_ltui("queue", "edit", "later", "--not-before", "none", code=0)
    programs.wait(run)  # the new dispatcher may have ended by then


def test_killed_dispatcher_is_replaced_by_a_live_run(programs: Programs) -> None:
    programs.add("blocker", FOR_EVER)
    wait_for(programs.starts)
    programs.add("next")
    wait_for(lambda: published(programs.home))
    _kill_dispatcher(programs)
    wait_for(programs.dispatcher)
    run_ltui("stop", "blocker", code=0)
    programs.wait()
    assert programs.starts() == ["blocker", "next"]


def test_slots_of_a_run_whose_entry_goes_meanwhile_are_not_free(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that replaces a killed one removes the entry while the dispatcher decides."""
    replaced, after = (programs.add(name, held=True) for name in ("replaced", "after"))
    wait_for(programs.dispatcher, wanted=lambda pid: pid is None)
    write_entry(after, replace(required(read_entry(after)), held=False))
    started: list[RunDir] = []

    def read_facts_and_remove(*arguments: Any, **options: Any) -> Any:
        facts = read_facts(*arguments, **options)
        remove_entry(replaced)
        return facts

    monkeypatch.setattr(queue_dispatcher, "read_facts", read_facts_and_remove)
    monkeypatch.setattr(queue_dispatcher, "start_queued", lambda run, _: started.append(run))
    dispatcher = queue_dispatcher.Dispatcher(programs.home, lock=-1)
    assert dispatcher._start_next()
    assert started == []
    assert dispatcher._start_next()
    assert started == [after]
    take_out(after)


@pytest.mark.usefixtures("two_slots")
def test_dispatcher_and_its_runs_do_not_end_with_the_run_that_started_it(
    programs: Programs,
) -> None:
    """The supervisor that starts the dispatcher is itself a child of its run's shim, and so is then
    the shim of a run that loses its supervisor."""
    first = programs.add("first", FOR_EVER)
    wait_for(programs.starts)
    _kill_supervisor(first)
    later = {"not_before": time.time() + FOR_EVER}
    second = programs.add("second", 8.0, **later)
    wait_for(lambda: published(programs.home))
    _kill_dispatcher(programs)
    started = required(wait_for(programs.dispatcher))
    assert psutil.Process(started).ppid() == required(shim_identity(first)).pid
    third = programs.add("third", **later)
    run_ltui("queue", "edit", "second", "--not-before", "none", code=0)
    wait_for(lambda: "second" in programs.starts())
    _kill_supervisor(second)
    run_ltui("stop", "first", code=0)
    programs.wait(first)
    assert programs.dispatcher() == started
    run_ltui("queue", "edit", "third", "--not-before", "none", code=0)
    programs.wait()
    assert programs.state(first) is RunState.STOPPED
    assert [programs.state(run) for run in (second, third)] == [RunState.FINISHED] * 2


@pytest.mark.usefixtures("two_slots")
def test_run_that_a_program_queues_does_not_end_with_it(programs: Programs) -> None:
    inner = [*LTUI, "exec", "--queue", "--name", "inner", "--", "sleep", "3"]
    queued = f"{shlex.join([*LTUI, 'queue'])} | grep -q inner"
    program = f"{shlex.join(inner)} && while {queued}; do sleep 0.2; done"
    run_ltui("exec", "--name", "outer", "--", "sh", "-c", program, code=0)
    run_ltui("wait", "inner", code=0)
    assert programs.state(find_run(programs.home, "inner")) is RunState.FINISHED


def test_held_runs_need_no_dispatcher_and_those_of_other_machines_wait(programs: Programs) -> None:
    held, other = programs.add("held", held=True), programs.add("other", held=True)
    entry = read_entry(other)
    assert entry is not None
    write_entry(other, replace(entry, host="gpu-b", held=False))
    wait_for(programs.dispatcher, wanted=lambda pid: pid is None)
    listed = run_ltui("runs", code=0).stdout
    assert "held" in listed
    assert "in the run queue of gpu-b" in listed
    assert "waits on machine gpu-b" in run_ltui("queue", code=0).stdout
    assert programs.dispatcher() is None
    run_ltui("queue", "retry", "other", code=0)
    programs.wait(other)
    take_out(held)


def test_removed_home_is_not_created_again(programs: Programs) -> None:
    run = programs.add("a", held=False, not_before=time.time() + FOR_EVER)
    wait_for(programs.dispatcher)
    runs = programs.home / "runs"
    runs.rename(programs.home / "elsewhere")
    wait_for(programs.dispatcher, wanted=lambda pid: pid is None)
    assert not runs.exists()
    (programs.home / "elsewhere").rename(runs)
    take_out(RunDir(run.path))


def test_queued_command_trains_with_the_code_of_the_moment_at_which_it_was_queued(
    programs: Programs, tmp_path: Path
) -> None:
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.write_text("print('then')\n")
    programs.add("blocker", FOR_EVER)
    wait_for(programs.starts)
    told = {
        "--json": '"frozen": ["The code is frozen: 1 file of ',
        "--no-freeze": "in the run queue",
    }
    for name, option in (("frozen", "--json"), ("live", "--no-freeze")):
        words = ("--name", name, option, "--", sys.executable, "train.py")
        queued = run_ltui("exec", "--queue", *words, cwd=script.parent, code=0).stdout
        assert told[option] in queued
    script.write_text("print('now')\n")
    run_ltui("stop", "blocker", code=0)
    for name, printed in (("frozen", "then"), ("live", "now")):
        run_ltui("wait", name, code=0)
        assert run_ltui("logs", name, code=0).stdout.split() == [printed]


def test_copied_or_given_run_starts_nothing_until_a_person_wants_it(
    programs: Programs, tmp_path: Path
) -> None:
    run = programs.add("a", not_before=time.time() + FOR_EVER)
    other = tmp_path / "other"
    copy = RunDir(other / "runs" / "b-0000")
    shutil.copytree(run.path, copy.path)
    entry = json.loads(copy.queued_path.read_text())
    copy.queued_path.write_text(json.dumps(entry | {"not_before": None}))
    environment = {**os.environ, "LTUI_HOME": str(other)}
    for words in (("runs",), ("show", "b-0000")):
        listed = run_ltui(*words, environment=environment, code=0).stdout
        assert "stopped" in listed
    assert "its directory is a copy" in listed
    assert "is empty" in run_ltui("queue", environment=environment, code=0).stdout
    assert not list(other.glob("run-queue/dispatcher*"))
    run_ltui("queue", "retry", "b", environment=environment, code=0)
    wait_for(programs.starts, wanted=lambda names: names == ["a"])
    wait_for(lambda: not list(other.glob("runs/*/queued.json")))
    take_out(run)


@pytest.mark.parametrize("damage", ["code/frozen-1", "queue", "environment"])
def test_run_whose_supervisor_cannot_begin_fails_and_the_next_one_starts(
    programs: Programs, tmp_path: Path, damage: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('x')")
    words = ("exec", "--queue", "--not-before", "+1h", "--name", "bad", "--", sys.executable)
    run_ltui(*words, str(script), cwd=tmp_path, code=0)
    bad = next((programs.home / "runs").glob("bad-*"))
    if damage == "environment":
        write_json(RunDir(bad).environment_path, {"A=B": "1"})
    else:
        shutil.rmtree(bad / damage)
    if damage == "queue":
        (bad / "queue").touch()
    good = programs.add("good")
    run_ltui("queue", "edit", "bad", "--not-before", "none", code=0)
    programs.wait(good)
    wait_for(lambda: programs.state(RunDir(bad)), wanted=lambda state: state is RunState.FAILED)
    assert "could not be started" in run_ltui("queue", code=0).stdout
    run_ltui("queue", "remove", "bad", code=0)


def test_time_without_a_date_is_refused_and_one_in_a_file_harms_no_other(
    programs: Programs,
) -> None:
    words = ("exec", "--queue", "--not-before", "+99999999d", "--", "sleep", "1")
    assert "later than any date" in run_ltui(*words, code=2).stderr
    bad, good = programs.add("bad", held=True), programs.add("good", held=True)
    entry = json.loads(bad.queued_path.read_text())
    bad.queued_path.write_text(json.dumps(entry | {"not_before": 1e300}))
    run_ltui("queue", "release", "good", code=0)
    programs.wait(good)
    listed = run_ltui("queue", code=0).stdout
    assert "damaged" in listed


def test_start_that_was_decided_and_not_begun_can_be_taken_back(programs: Programs) -> None:
    run = programs.add("a", held=True)
    entry = read_entry(run)
    assert entry is not None
    wait_for(programs.dispatcher, wanted=lambda pid: pid is None)  # it would begin the start
    write_entry(run, replace(entry, starting=1))
    take_out(run)
    assert programs.state(run) is RunState.STOPPED
    with pytest.raises(ProblemError, match="does not start it"):
        check_asked(run, 1)
