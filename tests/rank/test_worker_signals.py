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
    from ltui.training.rank.coordination.worker_signals import protect_workers
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
        "worker ended with 0",
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


def start_parent(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    return subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)
