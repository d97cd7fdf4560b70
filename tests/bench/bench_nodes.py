"""What a run on 128 machines with 1,024 ranks costs the head, and how fast all agree on a stop.

The run has a real supervisor, real links and messages, and simulated ranks in other processes of
this machine (``tests/nodes/simulated_nodes.py``). The link is also measured alone, with frames
that are not interpreted. Processor time is that of the whole process of the head.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from ltui.training.nodes.link_key import LinkKey
from tests.bench.row import Row, row
from tests.nodes.simulated_agents import ROOT, agent_processes, wait_until_all_report
from tests.nodes.simulated_nodes import simulated_run

AGENTS, PROCESSES, HZ = 128, 2, 4.0
RANKS, STEP_S = 8, 1.0
MEASURED_S = 15.0
SIZES = (8_000, 100_000)
"""Bytes of a report: 8 ranks of 10 steps a second, and the limit for ranks that catch up."""
ORDERS = bytes(2_000)

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
    rows = [row("import of pyzmq, which only runs on several machines do", import_ms, "ms")]
    for size in SIZES:
        measured = _head(size)
        what = f"{AGENTS} agents, {HZ:g} reports a second of {size // 1000} kB"
        # The promise is for the whole head; the link must leave most of it to the rest.
        bound = 10 if size == SIZES[0] else 25
        rows += [
            row(f"{what}: head's link, share of a core", measured["share"], "%", bound),
            row(f"{what}: of this its thread", measured["thread_share"], "%"),
            row(f"{what}: memory of the link", measured["memory_mb"], "MB", 100),
            row(f"{what}: answered", measured["answered"], "%"),
        ]
    return rows + _run()


def _run() -> list[Row]:
    what = f"run of {AGENTS} agents with {RANKS} ranks each, steps of {STEP_S:g} s"
    with (
        tempfile.TemporaryDirectory() as home,
        simulated_run(
            Path(home), agents=AGENTS, ranks_per_agent=RANKS, processes=PROCESSES, step_s=STEP_S
        ) as run,
    ):
        head = psutil.Process(run.supervisor_pid())
        began, cpu_s = time.monotonic(), _cpu_s(head)
        time.sleep(MEASURED_S)
        share = (_cpu_s(head) - cpu_s) / (time.monotonic() - began)
        memory_mb = head.memory_info().rss / 2**20
        stop_s = run.stop()
    return [
        row(f"{what}: supervisor of node 0, share of a core", share * 100, "%", 25),
        row(f"{what}: its memory", memory_mb, "MB", 200),
        # The ranks act at the end of the step in which they are when the request reaches them.
        row(f"{what}: agreement on a stop", stop_s, "s", 2 + STEP_S),
    ]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _head(size: int) -> dict[str, float]:
    """Measure in a new process, and return what it printed."""
    printed = subprocess.check_output(
        [sys.executable, "-m", "tests.bench.bench_nodes", str(size)], cwd=ROOT
    )
    measured: dict[str, float] = json.loads(printed)
    return measured


def _measure_head(size: int) -> dict[str, float]:
    # Imported here because this module's first row measures an import without it.
    from ltui.training.nodes.head_link import HeadLink

    before_mb = _peak_mb()
    key = LinkKey.generate()
    received = 0

    def on_report(_identity: str, report: bytes) -> bytes:
        nonlocal received
        received += 1
        assert len(report) == size
        return ORDERS

    head = HeadLink(
        key, "127.0.0.1", 0, on_report, lambda sentence: print(sentence, file=sys.stderr)
    )
    try:
        with agent_processes(
            key,
            head.address,
            head.port,
            count=AGENTS,
            processes=PROCESSES,
            report_bytes=size,
            hz=HZ,
        ):
            wait_until_all_report(lambda: len(head.peers()), AGENTS)
            time.sleep(1.0)
            began, cpu_s, thread_s, count = (
                time.monotonic(),
                time.process_time(),
                _thread_s(),
                received,
            )
            time.sleep(MEASURED_S)
            wall_s = time.monotonic() - began
            share = (time.process_time() - cpu_s) / wall_s
            thread_share = (_thread_s() - thread_s) / wall_s
            answered = (received - count) / (AGENTS * HZ * wall_s)
    finally:
        head.close()
    return {
        "share": share * 100,
        "thread_share": thread_share * 100,
        "memory_mb": _peak_mb() - before_mb,
        "answered": answered * 100,
    }


def _thread_s() -> float:
    """Processor seconds of the link's thread: the one of Python's that is not this one."""
    ticks = os.sysconf("SC_CLK_TCK")
    own = 0.0
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().rpartition(")")
        if not name.partition("(")[2].startswith("ZMQ"):
            own += sum(map(int, fields.split()[11:13])) / ticks
    return own


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str]) -> None:
    result: dict[str, Any] = _measure_head(int(arguments[0]))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
