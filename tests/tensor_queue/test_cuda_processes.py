"""Processes whose GPU fails, or that fork, while copies off the GPU wait in the queue.

Each is compared with the same process without ltui's copies: how such a process ends is torch's
matter, and must stay the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.tensor_queue.queue_reader import QueueReader

PROGRAM = """
import os, sys
from pathlib import Path
import torch
from ltui.training.tensor_queue.queue_writer import QueueWriter

path, device, event, copies = sys.argv[1:]
writer = QueueWriter.create(Path(path))
source = torch.ones(1000, device=device)
if device == "cuda":
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
for _ in range(int(copies)):
    writer.put(source, 2)
if event == "fork":
    child = os.fork()
    if child == 0:
        writer.put(source.cpu() if device == "cpu" else None, 2)
        sys.exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if device == "cuda":
        torch.cuda.synchronize()
else:
    try:
        source[torch.tensor([5000], device=device)]
        torch.cuda.synchronize()
    except (RuntimeError, IndexError) as error:
        print("error", type(error).__name__)
writer.put(None, 3, b"exception")
writer.close()
"""


def run(folder: Path, event: str, copies: int, device: str) -> tuple[int, str, list[int], int]:
    """Return the exit code, what was printed, the kinds of the records, and how many are missed."""
    path = folder / f"{event}-{copies}.queue"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), device, event, str(copies)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    reader = QueueReader(path, from_seq=0)
    poll = reader.poll()
    reader.close()
    return done.returncode, done.stdout, [record.kind for record in poll.records], poll.missed


@pytest.mark.slow
def test_on_the_cpu_nothing_is_missed(tmp_path: Path) -> None:
    """The program itself, where it can run everywhere."""
    assert run(tmp_path, "fork", 2, "cpu") == (0, "child 7\n", [2, 2, 3], 0)
    assert run(tmp_path, "fail", 1, "cpu") == (0, "error IndexError\n", [2, 3], 0)


@pytest.mark.gpu
def test_a_forked_child_ends_as_without_copies(tmp_path: Path) -> None:
    code, printed, kinds, _ = run(tmp_path, "fork", 0, "cuda")
    assert run(tmp_path, "fork", 2, "cuda") == (code, printed, [2, 2, *kinds], 0)


@pytest.mark.gpu
def test_a_failed_kernel_ends_the_program_as_without_copies(tmp_path: Path) -> None:
    code, printed, kinds, missed = run(tmp_path, "fail", 0, "cuda")
    assert (kinds, missed) == ([3], 0)
    assert run(tmp_path, "fail", 2, "cuda") == (code, printed, [3], 2)
