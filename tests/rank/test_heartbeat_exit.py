"""The heartbeat thread does not abort a process that exits while the thread calls torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch.distributed as dist
from ltui.training.rank import heartbeat_thread

heartbeat_thread.BEAT_S = 0.0
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1
)
run = Path(sys.argv[1])
(run / "queue" / "1").mkdir(parents=True)
heartbeat = heartbeat_thread.start_heartbeat_thread(run, 1, 0)
assert heartbeat is not None
while not heartbeat._joined:
    time.sleep(0.01)
# From here on the thread is nearly always in a call of torch.
counts = heartbeat._recorder.counts
heartbeat._recorder.counts = lambda: [counts() for _ in range(300)][-1]
time.sleep(0.2)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_the_process_ends_normally(tmp_path: Path, attempt: int) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert (result.returncode, result.stderr) == (0, "")
