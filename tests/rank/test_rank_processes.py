"""The process of a rank, and the processes that it starts: signals, claims, sources, its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ltui.training.rank.program.process_role import claim_rank
from tests.rank.runs import RunFolder
from tests.required import required
from tests.tensor_queue.children import run_child

methods = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])


def started(folder: Path, text: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a program in ``folder``."""
    (folder / "program.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "program.py", *arguments],
        cwd=folder, env={**os.environ, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def results(folder: Path, text: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a program in ``folder``. Return its exit code, its output and its errors."""
    with started(folder, text, *arguments, **variables) as program:
        output, errors = program.communicate(timeout=200)
    return program.returncode, output, errors


def printed_by(folder: Path, text: str, *arguments: str, **variables: str) -> str:
    """Run a program that succeeds. Return its output."""
    code, output, errors = results(folder, text, *arguments, **variables)
    assert code == 0, errors
    return output


# ``multiprocessing`` children of a rank: only the rank may end them with a signal.

PARENT = """
import multiprocessing, os, signal, subprocess, sys, time
from ltui.training.rank.coordination.stop_signals import protect_workers
from ltui.training.tensor_queue.control_block import STOP_SIGNALS

def work(pipe):
    pipe.send("started")
    pipe.recv()
    # A program that the worker starts can be terminated as usual.
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    pipe.send(program.wait(timeout=20))
    pipe.recv()

if __name__ == "__main__":
    protect_workers()
    context = multiprocessing.get_context(sys.argv[1])
    own, its = context.Pipe()
    worker = context.Process(target=work, args=(its,), daemon=True)
    worker.start()
    its.close()
    assert own.recv() == "started"
    for number in STOP_SIGNALS:
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    time.sleep(0.3)
    own.send("go on")
    print("program ended with", own.recv(), flush=True)
    if sys.argv[2] == "terminate":
        worker.terminate()
        worker.join()
        print("worker ended with", worker.exitcode, flush=True)
    else:
        print(worker.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@methods
def test_only_the_parent_terminates_a_worker(tmp_path: Path, method: str) -> None:
    assert printed_by(tmp_path, PARENT, method, "terminate").splitlines() == [
        f"program ended with {-signal.SIGTERM}",
        f"worker ended with {-signal.SIGTERM}",
    ]


def test_a_worker_without_its_parent_can_be_terminated(tmp_path: Path) -> None:
    with started(tmp_path, PARENT, "fork", "die") as parent:
        output = required(parent.stdout)
        output.readline()
        worker = os.pidfd_open(int(output.readline()))
        assert parent.wait(timeout=120) == -signal.SIGKILL
        signal.pidfd_send_signal(worker, signal.SIGTERM)
        assert output.read() == "", "the worker holds the other end of this pipe"
    os.close(worker)


NESTED = """
import multiprocessing, os, signal, sys, time
from ltui.training.rank.coordination.stop_signals import protect_workers

BLOCKED = "grep -q 'SigBlk:.*0000$' /proc/self/status"

class Sleeping(multiprocessing.get_context(sys.argv[1]).Process):
    def run(self):
        time.sleep(60)

def end(process):
    process.start()
    time.sleep(0.5)
    process.terminate()
    process.join(20)
    code = process.exitcode
    process.kill()
    return code

def work(pipe):
    nested = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    pipe.send(end(nested))
    pipe.send(os.system(BLOCKED))
    program = os.posix_spawn("/bin/sh", ["sh", "-c", BLOCKED], os.environ)
    pipe.send(os.waitpid(program, 0)[1])
    received = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append("SIGUSR1"))

    def end_with_3(*_):
        received.append("SIGTERM")
        pipe.send(received)
        os._exit(3)

    signal.signal(signal.SIGTERM, end_with_3)
    pipe.send("ready")
    time.sleep(60)

if __name__ == "__main__":
    protect_workers()
    context = multiprocessing.get_context(sys.argv[1])
    own, its = context.Pipe()
    worker = context.Process(target=work, args=(its,), daemon=False)
    worker.start()
    assert "_target" not in vars(worker), "it may refer to the worker itself"
    its.close()
    answers = [own.recv() for _ in range(4)]
    os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(0.3)
    worker.terminate()
    answers.append(own.recv())
    worker.join()
    print(*answers, worker.exitcode, end(Sleeping()))
"""


@methods
def test_what_a_worker_starts_and_its_handlers_have_the_usual_signals(
    tmp_path: Path, method: str
) -> None:
    ended = -int(signal.SIGTERM)
    printed = f"{ended} 0 0 ready ['SIGUSR1', 'SIGTERM'] 3 {ended}\n"
    assert printed_by(tmp_path, NESTED, method) == printed


LOADER_WORKER = """
from torch.utils.data import DataLoader
from ltui.training.rank.coordination.stop_signals import protect_workers

if __name__ == "__main__":
    protect_workers()
    iterator = iter(DataLoader(range(8), num_workers=1))
    next(iterator)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join()
    print(worker.exitcode)
"""


def test_a_terminated_loader_worker_has_not_failed(tmp_path: Path) -> None:
    """Torch raises an exception in the rank if one of its workers fails."""
    assert printed_by(tmp_path, LOADER_WORKER) == "0\n"


RANK_OF_A_RANK = """
import multiprocessing, os, signal
from ltui.training.rank.coordination.stop_signals import StopSignals, protect_workers

def train(pipe):
    received = set()
    assert StopSignals(received.add).install()
    pipe.send("ready")
    while True:
        pipe.recv()
        while len(received) < 2:
            pass
        received.clear()
        pipe.send("received")

if __name__ == "__main__":
    protect_workers()
    context = multiprocessing.get_context("spawn")
    own, its = context.Pipe()
    rank = context.Process(target=train, args=(its,))
    rank.start()
    its.close()
    own.recv()
    for _ in range(50):
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
            os.kill(rank.pid, number)
        own.send("wait")
        assert own.poll(20) and own.recv() == "received"
    rank.kill()
    print("done")
"""


def test_a_child_that_becomes_a_rank_receives_its_signals(tmp_path: Path) -> None:
    """``torch.multiprocessing.spawn`` may start the ranks of a script's second ``fit``."""
    assert printed_by(tmp_path, RANK_OF_A_RANK) == "done\n"


SIGNALS_OF_A_RANK = """
import signal, subprocess
from ltui.training.rank.coordination.stop_signals import StopSignals

signal.signal(signal.SIGUSR2, print)
signals = StopSignals(print)
assert signals.install()
options = {"start_new_session": True, "preexec_fn": lambda: None}
assert subprocess.run(["true"], **options).returncode == 0, "a program may begin a session"
signals.restore_defaults()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGUSR2) is print
"""


def test_the_sigusr2_handler_of_a_script_stays_when_the_coordinator_fails(tmp_path: Path) -> None:
    printed_by(tmp_path, SIGNALS_OF_A_RANK)


# One live process for each rank: the claim of ``process_role.py``.


def _claim_when_asked(queues: Path, pipe: Any) -> None:
    while pipe.recv():
        pipe.send(claim_rank(queues, 0))


@contextmanager
def other_process(queues: Path) -> Iterator[tuple[Any, Any]]:
    """A process that claims rank 0 when it is asked to, and what asks it."""
    asks, answers = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_claim_when_asked, args=(queues, answers))
    process.start()
    try:
        yield process, asks
    finally:
        process.kill()
        process.join()


def test_a_rank_belongs_to_one_process_until_that_dies(tmp_path: Path) -> None:
    with other_process(tmp_path) as (first, pipe):
        pipe.send(True)
        assert pipe.recv()
        assert not claim_rank(tmp_path, 0), "an evaluation that a rank starts is not that rank"
        assert claim_rank(tmp_path, 1)
        first.kill()
        first.join()
    assert claim_rank(tmp_path, 0), "a killed rank keeps nothing"
    assert claim_rank(tmp_path, 0), "the same process may claim its rank again"


def test_a_forked_worker_neither_keeps_nor_ends_the_claim(tmp_path: Path) -> None:
    with other_process(tmp_path) as (_, pipe):
        assert claim_rank(tmp_path, 0)
        run_child(lambda: None)
        pipe.send(True)
        assert not pipe.recv()


# Workers that read sources again that have changed since the rank read them.

CHANGES = """
import multiprocessing, sys, pathlib
from ltui.training.rank.source_changes import watch_sources
import own_module

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    watch_sources(lambda what, remedy: print(what, flush=True))
    for text in ("VALUE = 1", "VALUE = 22", "VALUE = 22"):
        file = pathlib.Path(own_module.__file__)
        if file.read_text() != text:
            file.write_text(text)
        worker = context.Process(target=print, args=("worker",))
        worker.start()
        worker.join()
"""


@methods
def test_changed_sources_are_reported_once_if_workers_read_them(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "own_module.py").write_text("VALUE = 1")
    lines = printed_by(tmp_path, CHANGES, method, PYTHONDONTWRITEBYTECODE="1").split("\n")
    warnings = [line for line in lines if line.startswith("own_module.py changed")]
    assert len(warnings) == (0 if method == "fork" else 1)
    assert lines.count("worker") == 3
    assert all(f"(start method {method})" in line for line in warnings)


UNGUARDED = """
import multiprocessing, sys
from ltui.training.rank.source_changes import watch_sources

watch_sources(lambda what, remedy: print(what, remedy, flush=True))
worker = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("worker",))
worker.start()
worker.join()
"""


@methods
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__": pass'])
def test_a_script_that_its_workers_run_again_is_named_before_they_do(
    tmp_path: Path, method: str, guard: str
) -> None:
    _, output, errors = results(tmp_path, UNGUARDED + guard, method)
    warnings = [line for line in output.splitlines() if line.startswith("program.py has no")]
    assert len(warnings) == (method != "fork" and not guard)
    assert all(f"(start method {method})" in line for line in warnings)
    assert ("bootstrapping phase" in errors) == (method != "fork")


CALLBACKS_AT_IMPORT = """
import multiprocessing, sys, pathlib
from ltui.training.rank import callback_factory

callbacks = callback_factory.callbacks()  # as every Trainer does

if __name__ == "__main__":
    (queue,) = pathlib.Path(sys.argv[1]).glob("*.queue")
    before = queue.stat().st_ino
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("worker",))
    worker.start()
    worker.join()
    print("same queue:", queue.stat().st_ino == before)
"""


def test_a_trainer_that_a_worker_makes_when_it_imports_the_script_is_no_rank(
    run: RunFolder, execute: Callable[..., str]
) -> None:
    printed = execute(CALLBACKS_AT_IMPORT, str(run.queue_dir), RANK="0", WORLD_SIZE="1")
    assert printed.splitlines()[-2:] == ["worker", "same queue: True"]


# The heartbeat thread does not abort a process that exits while the thread calls torch.

HEARTBEAT = """
import os, sys, time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ltui.training.rank import heartbeat_thread

for run in map(Path, "012"):
    if os.fork() == 0:
        break
else:
    sys.exit(any(os.wait()[1] for _ in range(3)))
heartbeat_thread.BEAT_S = 0.0
(run / "queue" / "1").mkdir(parents=True)
place = f"file://{run.absolute()}/rendezvous"
dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
heartbeat = heartbeat_thread.start_heartbeat_thread(run, 1, 0)
assert heartbeat is not None
while not heartbeat._joined:
    time.sleep(0.01)
# From here on the thread is nearly always in a call of torch.
counts = heartbeat._recorder.counts
heartbeat._recorder.counts = lambda: [counts() for _ in range(300)][-1]
time.sleep(0.2)
"""


def test_a_process_with_a_heartbeat_ends_normally(tmp_path: Path) -> None:
    assert results(tmp_path, HEARTBEAT) == (0, "", "")


HELD_FRAME = (
    HEARTBEAT.partition("# From here on")[0]
    + """
import threading
from ltui.training.shared.record_types import Phase

class Channel:
    class pulse:
        mark = (Phase.COMPUTE,)

class Model:
    def __del__(self):
        print(threading.current_thread().name, flush=True)
        is_destroyed.set()
        for _ in range(100_000):
            dist.group.WORLD._get_sequence_number_for_group()

def train():
    model = Model()
    heartbeat_thread.current_channel = lambda: Channel
    time.sleep(0.5)

is_destroyed = threading.Event()
heartbeat_thread._LOOK_S = 0.05
train()
is_destroyed.wait()
"""
)


def test_a_process_ends_normally_while_the_heartbeat_destroys_its_variables(
    tmp_path: Path,
) -> None:
    code, output, errors = results(tmp_path, HELD_FRAME)
    assert (code, errors) == (0, "")
    assert "ltui-heartbeat" in output.split()
