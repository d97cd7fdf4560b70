"""SIGKILL to each process of a run: what is shown is true, nothing is left, no step is missing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_processes import engine_identity, shim_identity
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import NotSupervisedError
from ltui.training.process.identity import ProcessIdentity
from ltui.training.state.run_snapshot import LIVE, RankState, RunState
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.store.histories import stored_rows
from tests.supervise.conftest import Runs
from tests.waiting import wait_for


def test_the_supervisor(runs: Runs) -> None:
    run = runs.training()
    before = resolve_snapshot(run)
    os.kill(required(before.supervisor_pid), signal.SIGKILL)
    assert resolve_snapshot(run).state is RunState.RUNNING
    after = runs.until(run, lambda s: s.supervisor_pid not in (None, before.supervisor_pid))
    assert after.state is RunState.RUNNING
    assert [r.pid for r in after.ranks] == [r.pid for r in before.ranks]
    moved = runs.more_steps(run)
    assert [r.host for r in moved.ranks] == ["here", "here"]
    assert moved.max_steps == before.max_steps
    ended = runs.end(run, "stop")
    assert (ended.state, ended.history_note) == (RunState.STOPPED, None)
    assert runs.has_all_steps(run, ended.global_step)


def queue_names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.queue_dir(1).glob("*.queue"))


def test_the_supervisor_when_it_removes_the_queue_files(runs: Runs) -> None:
    """Whether it was killed before or after: the history is whole, and a resume removes them."""
    run = runs.training()
    assert queue_names(run) == ["rank-00000.queue", "rank-00001.queue"]
    pid = required(resolve_snapshot(run).supervisor_pid)
    runs.order(run, "stop")
    wait_for(run.engine_final_path(1).exists, seconds=60, period_s=0.0005)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    ended = runs.ended(run)
    assert (ended.state, ended.history_note) == (RunState.STOPPED, None)
    assert runs.has_all_steps(run, ended.global_step)
    resume(run)
    last = required(ended.global_step)
    runs.until(run, lambda s: s.attempt == 2 and (s.global_step or 0) > last)
    assert runs.end(run, "stop").state is RunState.STOPPED
    assert not queue_names(run)
    assert not list(run.queue_dir(2).glob("*.queue"))


@pytest.mark.parametrize("killed", [False, True], ids=["hangs", "killed"])
def test_a_supervisor_that_saw_no_step(runs: Runs, tmp_path: Path, killed: bool) -> None:
    """The stored state is starting, but the pulses of the ranks show that they train."""
    begin = tmp_path / "begin"
    run = runs.fake("--gate", str(begin))
    pid = required(runs.until(run, lambda s: len(s.ranks) == 2).supervisor_pid)
    shim = required(shim_identity(run)).pid
    os.kill(shim, signal.SIGSTOP)  # lest it starts another supervisor
    os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)
    assert runs.until(run, lambda s: s.detail).state is RunState.STARTING
    begin.touch()
    assert runs.until(run, lambda s: (s.global_step or 0) > 0).state is RunState.RUNNING
    os.kill(shim, signal.SIGCONT)
    if not killed:
        os.kill(pid, signal.SIGCONT)
    runs.until(run, lambda s: s.supervisor_pid is not None and s.detail is None)
    assert runs.end(run, "stop").state is RunState.STOPPED


def test_a_stopped_supervisor_is_not_taken_for_dead_and_carries_out_no_withdrawn_request(
    runs: Runs,
) -> None:
    run = runs.training()
    pid = required(resolve_snapshot(run).supervisor_pid)
    os.kill(pid, signal.SIGSTOP)
    hanging = runs.until(run, lambda s: s.detail is not None)
    assert hanging.state in LIVE
    assert hanging.detail == f"the supervisor (pid {pid}) does not answer"
    with pytest.raises(NotSupervisedError, match="withdrawn; nothing is changed"):
        runs.order(run, "stop")
    os.kill(pid, signal.SIGCONT)
    runs.until(run, lambda s: s.detail is None)
    # An order that is answered now was read after the one that was withdrawn.
    runs.order(run, "pause")
    runs.until(run, lambda s: s.state is RunState.PAUSED)
    runs.order(run, "continue")
    runs.more_steps(run, 10)
    runs.end(run, "kill")
    words = [row["state"] for row in stored_rows(run, "states")]
    assert words[: words.index("paused")].count("stopping") == 0


def test_the_supervisor_while_the_run_ends(runs: Runs) -> None:
    """The shim stays until a supervisor has recorded how the run ended."""
    gate = runs.cwd / "gate"
    run = runs.training("--steps", "40", "--gate", str(gate), "--gate-at", "20")
    stopped = required(resolve_snapshot(run).supervisor_pid)
    os.kill(stopped, signal.SIGSTOP)
    gate.touch()
    runs.until(run, lambda s: (s.global_step or 0) >= 40)
    os.kill(stopped, signal.SIGKILL)
    ended = runs.ended(run)
    assert ended.state is RunState.FINISHED
    assert runs.steps(run) == list(range(1, 41))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank(runs: Runs, rank: int) -> None:
    run = runs.training()
    os.kill(required(resolve_snapshot(run).ranks[rank].pid), signal.SIGKILL)
    ended = runs.ended(run)
    assert ended.state in (RunState.CRASHED, RunState.FAILED)
    assert ended.ranks[rank].state is RankState.DEAD
    # The engine kills the other rank in the same moment, so that both may be named.
    assert re.match(r"ranks? (0 and )?[01] (was|were) killed by SIGKILL", ended.detail or "")
    (verdict, *_) = ended.verdicts
    assert verdict.remedy is not None
    assert runs.steps(run) == list(range(1, required(ended.ranks[0].global_step) + 1))


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (engine_identity, "the command was killed by SIGKILL"),
        (shim_identity, "shim process was killed"),
    ],
)
def test_the_engine_or_the_shim(
    runs: Runs, process: Callable[[RunDir], ProcessIdentity | None], words: str
) -> None:
    run = runs.training()
    os.kill(required(process(run)).pid, signal.SIGKILL)
    ended = runs.ended(run)
    assert ended.state is RunState.CRASHED
    assert words in required(ended.detail)


def test_a_lapped_queue_is_a_gap_on_record(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("LTUI_QUEUE_BYTES", "16384")
        run = runs.training("--pause", "0.002")
    pid = required(resolve_snapshot(run).supervisor_pid)
    os.kill(pid, signal.SIGSTOP)
    runs.more_steps(run, 400)
    os.kill(pid, signal.SIGCONT)
    noted = runs.until(run, lambda s: s.history_note is not None and s.supervisor_pid == pid)
    assert required(noted.history_note).startswith("records lost: ")
    ended = runs.end(run, "stop")
    missed = sum(gap["missed"] for gap in stored_rows(run, "gaps") if gap["rank"] == 0)
    unseen = required(ended.ranks[0].global_step) - len(runs.steps(run))
    # Not every record is of a step: two introduce the rank, two tell of its stop.
    assert 0 < unseen <= missed <= unseen + 4
