"""Tests of evidence collection with real processes that hang, without ptrace and without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ltui.app.diagnosis.request_diagnosis import request_diagnosis
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, ThreadStack
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.process.identity import ExitWatch, lock_holder
from ltui.training.process.stack_dumps import dump_by_signal, parse_stacks
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.gather_evidence import (
    CollectorCache,
    EvidenceRequest,
    RankTarget,
    collect_evidence,
)
from ltui.training.supervise.health_monitor import write_diagnosis
from tests.required import required
from tests.supervise.conftest import Runs, read_diagnoses
from tests.waiting import wait_for

SCRIPT = Path(__file__).with_name("stuck_rank.py")


class Stuck:
    """Processes of one run that hang."""

    def __init__(self, home: Path) -> None:
        self.run_dir = RunDir(home / "runs" / "r")
        (self.run_dir.path / "queue" / "1").mkdir(parents=True)
        self.side = install_rank_package(home)
        self.processes: list[subprocess.Popen[str]] = []
        self.cache = CollectorCache()

    def start(self, how: str, *more: str, **extra: str) -> int:
        rank = len(self.processes)
        env = {
            **os.environ, "PYTHONPATH": str(self.side), "LTUI_RUN_DIR": str(self.run_dir.path),
            "LTUI_RUN_ID": "r", "LTUI_ATTEMPT": "1", "RANK": str(rank), "WORLD_SIZE": "3", **extra,
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), how, str(rank), *more],
            env=env, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        assert required(process.stdout).readline() == "ready\n"
        return process.pid

    def collect(self) -> Evidence:
        targets = [RankTarget(rank=r, pid=p.pid) for r, p in enumerate(self.processes)]
        question = EvidenceRequest(
            run_dir=self.run_dir, attempt=1, targets=targets, cache=self.cache
        )
        return collect_evidence(question)

    def dumps(self, pid: int) -> int:
        """How often the process was made to write its stacks."""
        path = self.run_dir.path / "evidence" / "1" / f"stacks-{pid}.txt"
        return path.read_text().count("Stack (most recent call first)")

    def until(self, wanted: Callable[[Evidence], object], seconds: float = 120) -> Evidence:
        return wait_for(self.collect, wanted=wanted, seconds=seconds, period_s=0)

    def read_by_signal(self, rank: int) -> ThreadStack:
        """Collect until a stack of the rank's only worker, or else its own, is read by signal.

        py-spy reads a process that a loaded machine gives no CPU time.
        """

        def stacks(evidence: Evidence) -> list[ThreadStack]:
            own = evidence.ranks[rank]
            read = own.workers[0].stacks if own.workers else own.stacks
            return [stack for stack in read if stack.source == "signal"]

        return stacks(self.until(stacks))[0]

    def end(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            required(process.stdout).close()


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    made = Stuck(tmp_path)
    yield made
    made.end()


def functions(stack: ThreadStack | None) -> list[str]:
    return [f.function for f in stack.frames] if stack is not None else []


def test_the_stack_of_every_kind_of_hang_is_read(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for how in ("locked", "gil", "asleep", "worker"):
        stuck.start(how)
    seen = stuck.until(
        lambda e: (
            all(e.ranks[r].main_stack for r in range(4))
            and (e.ranks[1].beat_age_s or 0) > 1.5
            and all(required(e.ranks[r].process).frozen for r in (0, 1))
            and any(w.loader and w.stacks for w in e.ranks[3].workers)
        )
    )
    assert "locked" in functions(seen.ranks[0].main_stack)
    assert required(seen.ranks[0].main_stack).source == "thread"
    assert "gil" in functions(seen.ranks[1].main_stack)
    assert required(seen.ranks[1].main_stack).source == "signal"
    assert "asleep" in functions(seen.ranks[2].main_stack)
    assert seen.ranks[2].beat_age_s is None
    (worker,) = seen.ranks[3].workers
    assert worker.loader
    assert "in_the_worker" in functions(worker.stacks[0])
    assert all(p.poll() is None for p in stuck.processes)

    os.kill(worker.process.pid, signal.SIGSTOP)
    stuck.until(lambda e: e.ranks[3].workers[0].process.state == "T")


def test_the_signal_for_stacks_does_not_make_a_frozen_rank_appear_alive(stuck: Stuck) -> None:
    for how in ("asleep", "gil", "worker"):
        stuck.start(how)
    pids = [p.pid for p in stuck.processes[:2]]

    def watched(seen: Evidence) -> bool:
        """All seen frozen, over more than one round."""
        if not seen.ranks[2].workers:
            return False
        (worker,) = seen.ranks[2].workers
        processes = (seen.ranks[0].process, seen.ranks[1].process, worker.process)
        return all(p is not None and p.frozen and (p.interval_s or 0) > 1.5 for p in processes)

    seen = stuck.until(watched)
    assert "asleep" in functions(seen.ranks[0].main_stack)
    assert "gil" in functions(seen.ranks[1].main_stack)
    before = [stuck.dumps(pid) for pid in pids]
    again = stuck.collect()
    assert [stuck.dumps(pid) for pid in pids] == before
    assert "asleep" in functions(again.ranks[0].main_stack)


def test_a_signal_that_the_user_handles_is_not_sent(stuck: Stuck, tmp_path: Path) -> None:
    handled = tmp_path / "handled"
    stuck.start("own_handler", str(handled))
    os.kill(stuck.processes[0].pid, signal.SIGSTOP)  # its heartbeat thread cannot answer
    stuck.collect()
    os.kill(stuck.processes[0].pid, signal.SIGCONT)
    seen = stuck.until(lambda e: e.ranks[0].main_stack)
    assert "own_handler" in functions(seen.ranks[0].main_stack)
    assert not handled.exists()


def test_the_users_own_sitecustomize_still_runs(stuck: Stuck, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.flag = __name__\n")
    env = {**os.environ, "PYTHONPATH": f"{stuck.side}{os.pathsep}{own}"}
    for extra in ({}, {"LTUI_RUN_DIR": "/proc/nowhere", "LTUI_ATTEMPT": "1", "RANK": "0"}):
        done = subprocess.run(
            [sys.executable, "-c", "import sys, sitecustomize; print(sys.flag, sitecustomize.sys)"],
            env={**env, **extra}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith("sitecustomize <module 'sys'")
        assert done.stderr == ""


def test_the_exit_of_a_process_with_another_parent_is_observed(tmp_path: Path) -> None:
    woken: list[int] = []
    watch = ExitWatch(lambda: woken.append(1))
    parent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    try:
        pid = int(required(parent.stdout).readline())
        watch.add(pid)
        os.kill(pid, signal.SIGTERM)
        assert wait_for(lambda: watch.status(pid)) == signal.SIGTERM
        assert woken
    finally:
        watch.close()
        parent.wait()
        required(parent.stdout).close()


def test_a_dump_of_faulthandler_is_parsed() -> None:
    stacks = parse_stacks(
        'Thread 0x00007f1 (most recent call first):\n  File "/a.py", line 3 in wait\n\n'
        "Current thread 0x00007f2 [main] (most recent call first):\n"
        '  File "/b.py", line 7 in <lambda>\n  File "/b.py", line ??? in run\n'
    )
    assert [(s.main, [(f.line, f.function) for f in s.frames]) for s in stacks] == [
        (False, [(3, "wait")]),
        (True, [(7, "<lambda>"), (0, "run")]),
    ]
    (alone,) = parse_stacks('Stack (most recent call first):\n  File "/a.py", line 3 in wait\n')
    assert (alone.main, alone.frames[0].function) == (True, "wait")


def test_reading_stacks_does_no_harm_to_a_thread_that_runs(stuck: Stuck) -> None:
    """The main thread waits while another runs Python: faulthandler, asked for the stacks of all
    threads, walks frames that come and go meanwhile, and about one time in ten crashes."""
    pid = stuck.start("another_runs")
    folder = stuck.run_dir.path / "evidence" / "1"

    def main_functions() -> list[str]:
        stacks = dump_by_signal(pid, folder, python_stands=True)
        assert not isinstance(stacks, str), stacks
        (main,) = (stack for stack in stacks if stack.main)
        return functions(main)

    # The script prints that it is ready just before it enters the function.
    wait_for(lambda: "another_runs" in main_functions(), seconds=30, period_s=0)
    for _ in range(80):
        assert "another_runs" in main_functions()
    assert stuck.processes[0].poll() is None


def test_python_itself_writes_the_stack_of_a_thread_that_it_runs(
    stuck: Stuck, tmp_path: Path
) -> None:
    """faulthandler crashes about one of 2,000 such threads. The child is a rank that its parent has
    started and that has no heartbeat yet."""
    by_faulthandler = tmp_path / "faulthandler.txt"
    for how in ("computes", "child_computes"):
        stuck.start(how, str(by_faulthandler))
    assert functions(stuck.read_by_signal(0))[0] == "computes"
    assert functions(stuck.read_by_signal(1))[0] == "computes"
    assert by_faulthandler.read_bytes() == b""


def test_the_stack_of_a_long_call_in_c_is_read(stuck: Stuck) -> None:
    stuck.start("computes_in_c")
    assert functions(stuck.read_by_signal(0))[0] == "computes_in_c"
    assert stuck.processes[0].poll() is None


def test_no_signal_is_sent_while_the_heartbeat_thread_runs(stuck: Stuck) -> None:
    """One that is late to answer, as where another thread computes."""
    pid = stuck.start("late")
    seen = stuck.until(lambda e: (e.ranks[0].beat_age_s or 9) < 1)
    assert seen.ranks[0].stacks == ()
    assert seen.ranks[0].missing == ("its telemetry thread has not answered yet",)
    assert stuck.dumps(pid) == 0


def test_a_diagnosis_is_answered_and_stored_while_status_is_answered(runs: Runs) -> None:
    run = runs.training()
    client = ControlClient(run)
    answer = client.request({"cmd": "diagnose"}, timeout_s=90)
    diagnosis = Diagnosis.from_document(answer["diagnosis"])
    assert diagnosis.headline.startswith("Healthy")
    ranks = required(diagnosis.evidence).ranks
    assert sorted(ranks) == [0, 1]
    assert all(required(rank.process).state for rank in ranks.values())
    assert client.status() is not None
    assert write_diagnosis(run, diagnosis) is not None
    assert read_diagnoses(run, diagnosis.attempt)[-1] == diagnosis
    runs.end(run, "kill")


@pytest.mark.slow
def test_a_run_can_be_diagnosed_at_any_time(runs: Runs) -> None:
    run = runs.training()
    supervisor = required(lock_holder(run.lock_path))
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        hung = request_diagnosis(run).diagnosis
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert any("does not answer" in text for text in hung.missing)

    os.kill(supervisor.pid, signal.SIGKILL)
    answer = request_diagnosis(run)
    assert answer.snapshot.state in LIVE
    assert answer.diagnosis.headline.startswith("Healthy")

    os.kill(required(runs.until(run, lambda s: len(s.ranks) == 2).ranks[1].pid), signal.SIGKILL)
    runs.ended(run)
    ended = request_diagnosis(run).diagnosis
    # The engine kills the other in the same moment, so that it may be named too.
    assert all(1 in v.culprits for v in ended.verdicts)
    assert {v.level for v in ended.verdicts} == {"dead"}
    assert re.search(r"ranks? (0 and )?1\b.*(SIGKILL|gone|killed)", ended.headline)
