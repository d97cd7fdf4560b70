"""Readings of the machine, and what ranks are given of ltui."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from ltui.training.supervise.alive import ProcessMark, mark_of, start_ticks
from ltui.training.supervise.nvml import GpuSampler
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
        deadline = time.monotonic() + 30
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


class _Refused(Exception):
    pass


def _driver(**functions: object) -> types.ModuleType:
    driver = types.ModuleType("pynvml")
    driver.NVMLError = _Refused
    driver.NVML_TEMPERATURE_GPU = driver.NVML_CLOCK_SM = driver.NVML_CLOCK_MEM = 0

    def refuse(*_: object) -> None:
        raise _Refused("not supported")

    def missing(name: str) -> object:
        return refuse

    driver.__getattr__ = missing
    for name, function in functions.items():
        setattr(driver, name, function)
    return driver


def test_what_the_driver_refuses_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _driver(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPowerUsage=lambda handle: (
            250_000 if handle else (_ for _ in ()).throw(_Refused())
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    sampler = GpuSampler()
    deadline = time.monotonic() + 10
    while not (readings := sampler.latest()).gpus:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sampler.stop()
    first, second = readings.gpus
    assert (first.power_w, second.power_w) == (None, 250.0)
    assert first.error is not None
    assert first.utilisation_percent is None
    assert readings.note is None


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setitem(sys.modules, "pynvml", _driver(nvmlInit=free.wait))
    monkeypatch.setattr("ltui.training.supervise.nvml._HANGING_S", 0.1)
    sampler = GpuSampler()
    time.sleep(0.2)
    assert "has not answered" in (sampler.latest().note or "")
    sampler.stop()
    free.set()


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError_LibraryNotFound(Exception):
        pass

    def absent() -> None:
        raise NVMLError_LibraryNotFound

    monkeypatch.setitem(sys.modules, "pynvml", _driver(nvmlInit=absent))
    sampler = GpuSampler()
    deadline = time.monotonic() + 10
    while sampler.latest().note == "not read yet":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert sampler.latest().note == "no NVIDIA driver on this machine"


def test_the_rank_side_is_copied_once_and_stands_alone(tmp_path: Path) -> None:
    folder = install_rank_side(tmp_path)
    made = folder.stat().st_mtime_ns
    assert install_rank_side(tmp_path) == folder
    assert folder.stat().st_mtime_ns == made
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
