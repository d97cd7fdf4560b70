"""``multiprocessing`` children of a rank: only the rank may end them with a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PARENT = textwrap.dedent(
    """
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
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_only_the_parent_terminates_a_worker(tmp_path: Path, method: str) -> None:
    with start_parent(tmp_path, method, "terminate") as parent:
        lines, _ = parent.communicate(timeout=120)
    assert lines.splitlines() == [
        f"program ended with {-signal.SIGTERM}",
        f"worker ended with {-signal.SIGTERM}",
    ]


def test_a_worker_without_its_parent_can_be_terminated(tmp_path: Path) -> None:
    with start_parent(tmp_path, "fork", "die") as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        worker = os.pidfd_open(int(parent.stdout.readline()))
        assert parent.wait(timeout=120) == -signal.SIGKILL
        signal.pidfd_send_signal(worker, signal.SIGTERM)
        # The worker holds the other end of this pipe.
        assert parent.stdout.read() == ""
    os.close(worker)


NESTED = textwrap.dedent(
    """
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
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_a_worker_starts_and_its_handlers_have_the_usual_signals(
    tmp_path: Path, method: str
) -> None:
    with start_parent(tmp_path, method, script=NESTED) as parent:
        output, _ = parent.communicate(timeout=120)
    ended = -int(signal.SIGTERM)
    assert output == f"{ended} 0 0 ready ['SIGUSR1', 'SIGTERM'] 3 {ended}\n"


LOADER_WORKER = textwrap.dedent(
    """
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
)


def test_a_terminated_loader_worker_has_not_failed(tmp_path: Path) -> None:
    """Torch raises an exception in the rank if one of its workers fails."""
    with start_parent(tmp_path, script=LOADER_WORKER) as parent:
        assert parent.communicate(timeout=120)[0] == "0\n"


RANK_OF_A_RANK = textwrap.dedent(
    """
    import multiprocessing, os, signal
    from ltui.training.rank.coordination.stop_signals import StopSignals
    from ltui.training.rank.coordination.stop_signals import protect_workers

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
)


def test_a_child_that_becomes_a_rank_receives_its_signals(tmp_path: Path) -> None:
    """``torch.multiprocessing.spawn`` may start the ranks of a script's second ``fit``."""
    with start_parent(tmp_path, script=RANK_OF_A_RANK) as parent:
        assert parent.communicate(timeout=120)[0] == "done\n"


def start_parent(tmp_path: Path, *arguments: str, script: str = PARENT) -> subprocess.Popen[str]:
    path = tmp_path / "parent.py"
    path.write_text(script)
    return subprocess.Popen([sys.executable, path, *arguments], stdout=subprocess.PIPE, text=True)
