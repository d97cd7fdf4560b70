"""Readings of the machine, and what ranks are given of ltui."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity, ProcessTable, identify, start_ticks
from ltui.training.process.process_activity import UsageMeter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.evidence_collector import EvidenceCollector


def test_a_reused_pid_is_not_taken_for_its_former_owner() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.alive()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).alive()
    child = subprocess.Popen(["sleep", "60"])
    mark = identify(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark is not None
    assert not mark.alive(), "a zombie counts as gone"
    child.wait()
    assert start_ticks(child.pid) is None


def test_a_rank_costs_what_its_children_cost() -> None:
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True)
    try:
        mark = identify(process.pid)
        assert mark is not None
        readings = UsageMeter()
        deadline = time.monotonic() + 90
        while True:
            table = ProcessTable()
            reading = readings.sample(table, {0: mark}, time.monotonic())[0]
            if (reading.cpu_percent or 0) > 20 and len(table.tree(process.pid)) == 2:
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert reading.rss_bytes > 5_000_000
    finally:
        os.killpg(process.pid, 9)
        process.wait()


_CROWDED = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    os.nice(-5) if os.geteuid() == 0 else None
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1000))
"""


def test_how_long_a_rank_waits_for_a_processor() -> None:
    crowded = subprocess.Popen([sys.executable, "-c", _CROWDED], start_new_session=True)
    idle = subprocess.Popen(["sleep", "600"])
    try:
        marks = {r: m for r, p in enumerate((crowded, idle)) if (m := identify(p.pid)) is not None}
        readings = UsageMeter()
        assert readings.sample(ProcessTable(), marks, 0.0)[0].delay_share is None
        deadline = time.monotonic() + 90
        while True:
            time.sleep(0.3)
            found = readings.sample(ProcessTable(), marks, time.monotonic())
            crowded_share, idle_share = (found[r].delay_share or 0.0 for r in marks)
            if crowded_share > 0.3 and idle_share < 0.1:
                break
            assert time.monotonic() < deadline, found
    finally:
        os.killpg(crowded.pid, 9)
        for process in (crowded, idle):
            process.kill()
            process.wait()


_WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
_RANK_0 = f"""
import subprocess, sys
rank_1 = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], stdin=subprocess.PIPE)
print(rank_1.pid, flush=True)
{_WORKER}
"""


def test_a_rank_does_not_cost_what_the_ranks_that_it_started_cost(tmp_path: Path) -> None:
    rank_0 = subprocess.Popen(
        [sys.executable, "-c", _RANK_0],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert rank_0.stdout is not None
        pids = [rank_0.pid, int(rank_0.stdout.readline())]
        deadline = time.monotonic() + 90
        while len((table := ProcessTable()).tree(rank_0.pid)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        marks = {rank: mark for rank, pid in enumerate(pids) if (mark := identify(pid))}
        assert [len(table.tree(pid, pids)) for pid in pids] == [2, 2], "each with its own worker"
        readings = UsageMeter().sample(table, marks, time.monotonic())
        together = UsageMeter().sample(table, {0: marks[0]}, time.monotonic())[0]
        assert readings[0].rss_bytes + readings[1].rss_bytes == together.rss_bytes
        assert readings[0].rss_bytes > readings[1].rss_bytes / 2

        desk = EvidenceCollector(RunDir(tmp_path / "runs" / "r"), 1, lambda: None)
        desk.update_processes(table, marks)
        assert [len(desk._ranks[rank].children) for rank in marks] == [1, 1]
        desk.close()
    finally:
        os.killpg(rank_0.pid, 9)
        rank_0.wait()


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
