"""Readings of the machine, and what ranks are given of ltui."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity, ProcessTable, identify, start_ticks
from ltui.training.process.proc_files import entry_of
from ltui.training.process.process_activity import UsageMeter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.evidence_collector import EvidenceCollector
from tests.required import required
from tests.waiting import wait_for

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(CODE)`` runs Python code. It is killed with its children when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


def test_a_reused_pid_or_a_zombie_is_not_taken_for_a_process() -> None:
    me = required(identify(os.getpid()))
    assert me.alive()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).alive()
    assert required(entry_of(me.pid)).exiting is False
    child = subprocess.Popen(["sleep", "60"])
    mark = required(identify(child.pid))
    child.kill()
    zombie = wait_for(lambda: required(entry_of(child.pid)), wanted=lambda entry: not entry.living)
    assert (zombie.exiting, zombie.exit_status) == (True, 9)
    assert not mark.alive(), "a zombie counts as gone"
    child.wait()
    assert start_ticks(child.pid) is None
    assert entry_of(child.pid) is None


def test_a_rank_costs_what_its_children_cost(start: Start) -> None:
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process, meter = start(burn), UsageMeter()
    ranks = {0: required(identify(process.pid))}

    def busy() -> bool:
        table = ProcessTable()
        usage = meter.sample(table, ranks, time.monotonic())[0]
        is_busy = (usage.cpu_percent or 0) > 20 and len(table.tree(process.pid)) == 2
        return is_busy and usage.rss_bytes > 5_000_000

    wait_for(busy, seconds=90, period_s=0.2)


_CROWDED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    os.nice(-5) if os.geteuid() == 0 else None
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1000))
"""


def test_how_long_a_rank_waits_for_a_processor(start: Start) -> None:
    crowded, idle, meter = start(_CROWDED), start("input()"), UsageMeter()
    ranks = {rank: required(identify(p.pid)) for rank, p in enumerate((crowded, idle))}
    assert meter.sample(ProcessTable(), ranks, 0.0)[0].delay_share is None

    def shares() -> list[float]:
        usage = meter.sample(ProcessTable(), ranks, time.monotonic())
        return [usage[rank].delay_share or 0.0 for rank in ranks]

    wait_for(shares, wanted=lambda s: s[0] > 0.3 and s[1] < 0.1, seconds=90, period_s=0.3)


_WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
_RANK_0 = f"""
import subprocess, sys
rank_1 = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], stdin=subprocess.PIPE)
print(rank_1.pid, flush=True)
{_WORKER}
"""


def test_a_rank_does_not_cost_what_the_ranks_that_it_started_cost(
    start: Start, tmp_path: Path
) -> None:
    rank_0 = start(_RANK_0)
    pids = [rank_0.pid, int(required(rank_0.stdout).readline())]
    table = wait_for(ProcessTable, wanted=lambda t: len(t.tree(rank_0.pid)) == 4, seconds=90)
    marks = {rank: required(identify(pid)) for rank, pid in enumerate(pids)}
    assert [len(table.tree(pid, pids)) for pid in pids] == [2, 2], "each with its own worker"
    readings = UsageMeter().sample(table, marks, time.monotonic())
    together = UsageMeter().sample(table, {0: marks[0]}, time.monotonic())[0]
    assert readings[0].rss_bytes + readings[1].rss_bytes == together.rss_bytes
    assert readings[0].rss_bytes > readings[1].rss_bytes / 2

    collector = EvidenceCollector(RunDir(tmp_path / "runs" / "r"), 1, lambda: None)
    collector.update_processes(table, marks)
    assert [len(collector._ranks[rank].children) for rank in marks] == [1, 1]
    collector.close()


def test_nobody_else_can_change_what_the_ranks_import(tmp_path: Path) -> None:
    side = tmp_path / "rank-side"
    side.mkdir()
    side.chmod(0o777)
    install_rank_package(tmp_path)
    assert side.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:
        os.chown(side, 65534, 65534)
        with pytest.raises(ProblemError, match="belongs to another user"):
            install_rank_package(tmp_path)


def test_the_rank_package_is_copied_once_and_is_complete(tmp_path: Path) -> None:
    folder = install_rank_package(tmp_path)
    made = folder.stat().st_mtime_ns
    assert install_rank_package(tmp_path) == folder
    assert folder.stat().st_mtime_ns == made
    assert [p.name for p in (tmp_path / "rank-side").iterdir()] == [folder.name]
    (folder / "ltui/training/tensor_queue/ring_writer.py").write_bytes(
        b""
    )  # as a power cut may leave it
    assert install_rank_package(tmp_path) == folder
    assert [p.name for p in (tmp_path / "rank-side").iterdir()] == [folder.name]
    code = (
        "import importlib.metadata as m, sys\n"
        "import ltui.training.rank.callback_factory as entry\n"
        "import ltui.training.tensor_queue.ring_writer\n"
        "assert entry.callbacks() == []\n"
        "found = m.entry_points(group='lightning.pytorch.callbacks_factory')\n"
        "print([e.value for e in found], entry.__file__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ltui.training.rank.callback_factory:callbacks" in done.stdout
    assert str(folder) in done.stdout
    assert done.stdout.rstrip().endswith("False")
