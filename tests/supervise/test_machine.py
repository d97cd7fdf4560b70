"""Readings of the machine, and what ranks are given of ltui."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ltui.training.supervise.alive import ProcessMark, mark_of, start_ticks
from ltui.training.supervise.procs import ProcessReadings, ProcessTable
from ltui.training.supervise.rankside import install_rank_side


def test_a_reused_pid_is_not_taken_for_its_former_owner() -> None:
    me = mark_of(os.getpid())
    assert me is not None
    assert me.alive()
    assert not ProcessMark(me.pid, me.start_ticks + 1).alive()
    child = subprocess.Popen(["sleep", "60"])
    mark = mark_of(child.pid)
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
        mark = mark_of(process.pid)
        assert mark is not None
        readings = ProcessReadings()
        deadline = time.monotonic() + 90
        while True:
            table = ProcessTable()
            reading = readings.look(table, {0: mark}, time.monotonic())[0]
            if (reading.cpu_percent or 0) > 20 and len(table.tree(process.pid)) == 2:
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert reading.rss_bytes > 5_000_000
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_the_rank_side_is_copied_once_and_stands_alone(tmp_path: Path) -> None:
    folder = install_rank_side(tmp_path)
    made = folder.stat().st_mtime_ns
    assert install_rank_side(tmp_path) == folder
    assert folder.stat().st_mtime_ns == made
    assert [p.name for p in (tmp_path / "rank-side").iterdir()] == [folder.name]
    (folder / "ltui/training/queue/ring.py").write_bytes(b"")  # as a power cut may leave it
    assert install_rank_side(tmp_path) == folder
    assert [p.name for p in (tmp_path / "rank-side").iterdir()] == [folder.name]
    code = (
        "import importlib.metadata as m, sys\n"
        "import ltui.training.rank.entry as entry, ltui.training.queue.ring\n"
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
    assert "ltui.training.rank.entry:callbacks" in done.stdout
    assert str(folder) in done.stdout
    assert done.stdout.rstrip().endswith("False")
