"""Hygiene that every test lives under: a private home, and nothing left running behind it."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.gpu.standin import nvml_stand_in
from tests.live_processes import processes_with

# No example has a time limit: how long one takes depends on the load of the machine.
# In CI the examples are the same each time, so that a change is not judged by chance.
settings.register_profile("ltui", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("ltui")

# Pools that asyncio, torch and the resource tracker keep for the life of the process by design.
_LASTING_THREADS = (
    *("asyncio_", "ThreadPoolExecutor", "pytest_timeout", "QueueFeederThread", "tqdm"),
    "ltui-heartbeat",  # of a rank, here of a training within the test
)
_LASTING_PROCESSES = ("resource_tracker", "forkserver")

_TORCH_FOLDERS = ("data", "faults", "presets", "rank", "system")
"""Folders of tests that train with torch, whose processes take all cores of a small machine."""
_TORCH_MODULES = ("test_one_run.py", "test_exact_resume.py", "test_ways_to_start.py")
"""Such tests in other folders."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make one group of the tests that train with torch, of which one worker runs all."""
    folders = tuple(Path(__file__).parent / name for name in _TORCH_FOLDERS)
    for item in items:
        trains = item.path.name in _TORCH_MODULES
        if trains or any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker(pytest.mark.xdist_group("torch"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU where torch sees none."""
    if item.get_closest_marker("gpu"):
        import torch  # Takes seconds, and few tests need it.

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what the imports of all tests made, torch above all."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free at its end what it froze: libraries report leaks otherwise."""
    gc.unfreeze()


def _wait_until_empty(left: Callable[[], list[str]], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (remaining := left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def _note_start(event: str, _arguments: object) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _starts.append(event)


_starts: list[str] = []
"""How this test has started processes. Looking for what is left of them takes 20 ms and more."""
sys.addaudithook(_note_start)


def _descendants(pid: int) -> set[int]:
    """Return the children of a process and theirs, those that C code or multiprocessing started
    included. A kernel without ``CONFIG_PROC_CHILDREN`` names none."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process, or a thread of it, has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (thread / "children").read_text().split()))
    return found.union(*map(_descendants, found))


def _processes_of(home: Path) -> list[str]:
    """Our own children, and processes whose environment names this test's home."""
    own = psutil.Process().children(recursive=True)
    found = {process.pid: process for process in (*processes_with("LTUI_HOME", home), *own)}
    found.pop(os.getpid(), None)
    described = []
    for process in found.values():
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(
                name in command for name in _LASTING_PROCESSES
            ):
                described.append(f"{process.pid} {command[:160]}")
        except psutil.Error:
            continue
    return described


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before
        and thread.is_alive()
        and not thread.name.startswith(_LASTING_THREADS)
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's driver, built once for each worker."""
    if nvml_stand_in.compiler() is None:
        pytest.skip("no C compiler to build the stand-in driver with")
    return nvml_stand_in.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session", autouse=True)
def session_tmpdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``$TMPDIR`` of fixtures that several tests share.

    Its path is short, because that of a socket may have 107 bytes. What ltui has left in the
    machine's own temporary folder is not seen.
    """
    tmp_path_factory.getbasetemp()  # stays where pytest keeps it for the next sessions
    folder = Path(tempfile.mkdtemp(prefix="lt-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        patch.delenv("SLURM_TMPDIR", raising=False)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def private_tmpdir(session_tmpdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``$TMPDIR`` of this test, empty."""
    folder = Path(tempfile.mkdtemp(prefix="", dir=session_tmpdir))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture(autouse=True)
def private_home(
    leaves_nothing_behind: None,
    private_tmpdir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """``$LTUI_HOME`` of this test; no run or configuration of the person's own is touched."""
    home = tmp_path / "home"
    monkeypatch.setenv("LTUI_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [n for n in os.environ if n.startswith("LTUI_") and n != "LTUI_HOME"]:
        monkeypatch.delenv(name)
    return home


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once a module of the current folder, which has all names, was imported."""
    folder, imported = tmp_path / "project", tmp_path / "imported"
    folder.mkdir()
    for name in (*sys.stdlib_module_names, "ltui", "textual", "rich", "yaml", "platformdirs"):
        (folder / f"{name}.py").write_text(f"open({str(imported)!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(folder)
    return imported


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path: Path) -> Iterator[None]:
    """Fails a test after which a thread, a process or a changed environment remains.

    Set up before ``monkeypatch``, so that what a test patched is undone when this looks.
    """
    home = tmp_path / "home"
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    children, _starts[:] = _descendants(os.getpid()), []
    yield
    if _starts or _descendants(os.getpid()) - children:
        processes = _wait_until_empty(
            lambda: [p for p in _processes_of(home) if int(p.split()[0]) not in children], 60.0
        )
        assert not processes, f"the test left processes running: {processes}"
    left = _wait_until_empty(lambda: _new_threads(threads), 60.0)
    assert not left, f"the test left threads running: {left}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
    }
    assert not changed, f"the test changed the environment: {sorted(changed)}"
