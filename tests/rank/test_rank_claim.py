"""One live process for each rank: the claim of ``process_role.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ltui.training.rank.program.process_role import claim_rank

CLAIM = """
import sys
from pathlib import Path
from ltui.training.rank.program.process_role import claim_rank
print(claim_rank(Path(sys.argv[1]), 0), flush=True)
sys.stdin.read()
"""


def other_process(queues: Path) -> subprocess.Popen[str]:
    """Start a process that claims rank 0 and waits for the end of its input."""
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(queues)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_rank_belongs_to_one_process_until_that_dies(tmp_path: Path) -> None:
    queues = tmp_path / "queue"
    with other_process(queues) as first:
        assert answer(first) == "True"
        assert not claim_rank(queues, 0), "an evaluation that a rank starts is not that rank"
        assert claim_rank(queues, 1)
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert claim_rank(queues, 0), "a killed rank keeps nothing"
    assert claim_rank(queues, 0), "the same process may claim its rank again"


def test_a_forked_worker_neither_keeps_nor_ends_the_claim(tmp_path: Path) -> None:
    assert claim_rank(tmp_path, 0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with other_process(tmp_path) as other:
        assert answer(other) == "False"
        other.kill()
