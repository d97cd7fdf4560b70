"""What a run on 128 machines with 1,024 ranks costs the head, and how fast all agree on a stop.

The run has a real supervisor, real links and messages, and simulated ranks in other processes of
this machine (``tests/nodes/simulated_nodes.py``). Processor time is that of the whole process of
the head.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench.row import Row, cpu_s, row
from tests.nodes.simulated_nodes import simulated_run

AGENTS, PROCESSES, RANKS, STEP_S = 128, 2, 8, 1.0
MEASURED_S = 15.0

_IMPORT = """
import time
began = time.thread_time()
import zmq
print((time.thread_time() - began) * 1e3)
"""


def measure() -> list[Row]:
    import_ms = min(
        float(subprocess.check_output([sys.executable, "-c", _IMPORT])) for _ in range(5)
    )
    what = f"run of {AGENTS} agents with {RANKS} ranks each, steps of {STEP_S:g} s"
    with (
        tempfile.TemporaryDirectory() as home,
        simulated_run(
            Path(home), agents=AGENTS, ranks_per_agent=RANKS, processes=PROCESSES, step_s=STEP_S
        ) as run,
    ):
        head = psutil.Process(run.supervisor_pid())
        began, before_s = time.monotonic(), cpu_s(head)
        time.sleep(MEASURED_S)
        share = (cpu_s(head) - before_s) / (time.monotonic() - began)
        memory_mb = head.memory_info().rss / 2**20
        stop_s = run.stop()
    return [
        row("import of pyzmq, which only runs on several machines do", import_ms, "ms"),
        row(f"{what}: supervisor of node 0, share of a core", share * 100, "%", 25),
        row(f"{what}: its memory", memory_mb, "MB", 200),
        # The ranks act at the end of the step in which they are when the request reaches them.
        row(f"{what}: agreement on a stop", stop_s, "s", 2 + STEP_S),
    ]
