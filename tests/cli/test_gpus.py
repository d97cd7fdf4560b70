"""GPUs on the command line: the demo, and runs that wait for free ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ltui
from tests.cli.terminal import Terminal
from tests.gpu.standin import nvml_stand_in


def test_the_demo_shows_gpus_and_says_that_they_are_simulated(
    private_home: Path, tmp_path: Path
) -> None:
    # Neither a driver nor a compiler is needed.
    env = {**os.environ, "PATH": "/nonexistent", "CC": "none"}
    terminal = Terminal(
        [sys.executable, "-m", "ltui.app", "demo", "gpus"], tmp_path, env, columns=140
    )
    try:
        terminal.wait_for("simulated GPUs and ranks, not those of this machine")
        terminal.wait_for("8 × H100")
        terminal.wait_for("used by another process")
        terminal.press("\r")
        terminal.wait_for("tensor-core activity")
        terminal.drawn = ""
        terminal.press("\x1b")
        terminal.wait_for("used by another process")
        terminal.press("q")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert not list(private_home.glob("runs/*"))


def test_the_demo_of_machines_says_that_they_are_simulated(
    private_home: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ltui.app", "demo", "nodes", "--nodes", "3"]
    terminal = Terminal(command, tmp_path, dict(os.environ), columns=140)
    try:
        terminal.wait_for("simulated machines, ranks and GPUs, not those of this machine")
        terminal.wait_for("3 machines, 24 ranks")
        terminal.press("4")
        terminal.wait_for("sim-c  16-23")
        terminal.press("q")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert not list(private_home.glob("runs/*"))


@pytest.mark.parametrize("demo", ["gpus", "nodes"])
def test_the_demo_without_a_terminal_is_refused(ltui: Ltui, demo: str) -> None:
    done = ltui("demo", demo)
    assert done.returncode == 2
    assert "the demo needs a terminal" in done.stderr


def test_exec_waits_for_a_free_gpu(
    ltui: Ltui, tmp_path: Path, library: Path, runs_left: Callable[[], list[str]]
) -> None:
    script = tmp_path / "gpus.txt"
    script.write_text(f"gpus 2 h100\nset * mem_used 0\nprocess 0 {os.getpid()} 1e9\n")
    env = nvml_stand_in.environment(library.parent, script, {})
    show = "import os; print('given', os.environ['CUDA_VISIBLE_DEVICES'])"
    done = ltui("exec", "--gpus", "free:1", "--", sys.executable, "-c", show, env=env)
    assert done.returncode == 0, done.stderr
    logs = ltui("logs", "last")
    assert "given GPU-5eed0000-0000-4000-8000-000000000001" in logs.stdout


def test_a_queued_run_is_shown_and_stopped(ltui: Ltui, tmp_path: Path, library: Path) -> None:
    script = tmp_path / "gpus.txt"
    script.write_text(f"gpus 1 h100\nprocess 0 {os.getpid()} 1e9\n")
    env = nvml_stand_in.environment(library.parent, script, {})
    started = ltui(
        "exec", "--gpus", "free:1", "--name", "waits", "--detach", "--", "sleep", "60", env=env
    )
    assert started.returncode == 0, started.stderr
    assert "queued" in ltui("runs").stdout
    assert "waiting for GPUs" in ltui("show", "waits").stdout
    stopped = ltui("stop", "waits")
    assert "nothing was trained" in ltui("show", "waits").stdout
    assert stopped.returncode in (0, 1)


@pytest.mark.parametrize("gpus", ["2", "free:0", "all"])
def test_bad_gpus_are_refused(ltui: Ltui, runs_left: Callable[[], list[str]], gpus: str) -> None:
    done = ltui("exec", "--gpus", gpus, "--", "sleep", "1")
    assert done.returncode == 2
    assert "the value must be free:N" in done.stderr
    assert runs_left() == []
