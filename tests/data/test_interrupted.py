"""An interrupted build leaves no file that looks whole, and none under a temporary name; what a
SIGKILL leaves is removed by the next build. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ltui.training.data.data_files import atomic_write
from tests.data.conftest import everything, ltui, needs_ffcv
from tests.ltui_command import LTUI
from tests.waiting import wait_for

DATASET = """
import time

class Slow:
    def __init__(self, seconds=0.2):
        self.seconds = seconds
    def __len__(self):
        return 300
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index, float(index)
"""
HOLD = """
import sys, time
from pathlib import Path
from ltui.training.data.data_files import atomic_write
with atomic_write(Path(sys.argv[1])) as part:
    part.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""


def others(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(".") or "beton" in p.name)


def _interrupted(path: Path) -> None:
    with atomic_write(path) as part:
        part.write_bytes(b"half")
        raise KeyboardInterrupt


def test_it_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.beton"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        _interrupted(path)
    assert path.read_bytes() == b"before"
    with atomic_write(path) as part:
        part.write_bytes(b"whole")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"whole"
    assert others(tmp_path) == ["x.beton"]


def test_what_a_killed_writer_left_is_told_from_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "x.beton"
    command = [sys.executable, "-c", HOLD, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer, writer.stdout:
        try:
            assert writer.stdout.readline() == "writing\n"
            (others_part,) = others(tmp_path)
            with atomic_write(path) as part:
                part.write_bytes(b"mine")
                assert others(tmp_path) == sorted([others_part, part.name])
        finally:
            writer.kill()
            writer.wait()
    assert others(tmp_path) == sorted([others_part, "x.beton"])
    with atomic_write(path) as part:
        assert others(tmp_path) == sorted([part.name, "x.beton"])


def building(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """``ltui data build`` in the middle of it, and the process that builds."""
    (folder / "home").mkdir()
    (folder / "slow_numbers.py").write_text(DATASET)
    command = [*LTUI, "data", "build", "slow_numbers.Slow"]
    process = subprocess.Popen(
        [*command, "-o", "x.beton", "--page-size", "2", "--workers", "2"],
        cwd=folder,
        env={**os.environ, "LTUI_HOME": str(folder / "home")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        # A shell that runs tests in the background has SIGINT ignored, and who inherits that obeys.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: others(folder), process)
    (builder,) = psutil.Process(process.pid).children()
    wait_for(builder.children, process)
    return process, builder


def wait_until_gone(process: subprocess.Popen[str], builder: psutil.Process) -> None:
    process.wait(120)
    wait_for(lambda: not builder.is_running() or builder.status() == psutil.STATUS_ZOMBIE)


@needs_ffcv
@everything
@pytest.mark.timeout(400)
@pytest.mark.parametrize("whom", ["ltui", "builder"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, whom: str, number: int) -> None:
    process, builder = building(tmp_path)
    os.kill(process.pid if whom == "ltui" else builder.pid, number)
    wait_until_gone(process, builder)
    assert process.returncode != 0
    assert others(tmp_path) == []


@needs_ffcv
@everything
@pytest.mark.timeout(400)
def test_the_next_build_removes_what_a_kill_left(tmp_path: Path) -> None:
    process, builder = building(tmp_path)
    builder.kill()
    wait_until_gone(process, builder)
    assert process.returncode == 2
    (left,) = others(tmp_path)
    assert left.startswith(".x.beton.")
    source = "slow_numbers.Slow?seconds=0"
    done = ltui("data", "build", source, "-o", "x.beton", "--page-size", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert others(tmp_path) == ["x.beton"]


WRITE = """
import multiprocessing, os, signal, sys, time
from multiprocessing.synchronize import Event
from pathlib import Path
from torch.utils.data._utils import signal_handling
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.beton_writer import WriteOptions, write

folder = Path(sys.argv[1])

class Numbers:
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.002)
        with reads.get_lock():
            reads.value += 1
        return index

def is_set(event, of_event=Event.is_set):
    with event._cond:  # a lock that a killed process keeps
        time.sleep(0.3)
    return of_event(event)

def set_worker_pids(iterator, pids, of_torch=signal_handling._set_worker_pids):
    of_torch(iterator, pids)
    iterators.add(iterator)

iterators = set()
signal_handling._set_worker_pids, set_of_torch = set_worker_pids, signal_handling._set_worker_pids

def progress(done, samples):
    if case == "killed":
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        time.sleep(5)  # the signal of its end interrupts this process here
    elif case == "ahead":
        time.sleep(1)
    raise SystemExit(f"{reads.value - done}")

write([(1, 0.5), (2, 1.5)], folder / "numbers", WriteOptions(), lambda *_: None)
print(BetonFile(folder / "numbers").metadata["f0"].tolist())
for case, page_bytes in (("killed", 2 << 20), ("ahead", 64 << 20), ("locked", 2 << 20)):
    reads = multiprocessing.Value("i")  # a killed process may keep the lock of an earlier one
    if case == "locked":
        Event.is_set = is_set
    options = WriteOptions(workers=2, page_bytes=page_bytes)
    try:
        write(Numbers(), folder / "x.beton", options, progress)
    except (BetonError, SystemExit) as error:
        print(error)
for iterator in iterators:
    set_of_torch(iterator, ())  # raises ValueError if torch has kept the earlier processes
print(len(iterators))
"""


@needs_ffcv
def test_a_build_that_is_broken_off_ends_whatever_its_workers_do(tmp_path: Path) -> None:
    """A worker is killed while this process writes, few samples are large, workers hold a lock."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    numbers, killed, ahead, _, iterators = done.stdout.splitlines()
    assert numbers == "[1, 2]", "samples without contents in pages can be read"
    assert "it ended before it was finished (killed by signal 9)" in killed
    assert int(ahead) < 8, "few large samples are read ahead"
    assert int(iterators) > 0
    assert others(tmp_path) == []
