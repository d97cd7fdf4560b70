"""A dashboard that crashes: the terminal is restored, one sentence names the log, runs go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Ltui
from tests.cli.terminal import Terminal

CRASHES_AT_HELP = """
import sys
from ltui.app import cli, textual_app

def fail(app):
    raise RuntimeError("injected \\udcff error")

textual_app.LtuiApp.action_help = fail
sys.exit(cli.main(sys.argv[1:]))
"""
SENTENCE = "The dashboard has crashed (RuntimeError: injected"
CLOSED = ("\x1b[?1049l", "\x1b[?1000l", "\x1b[?25h")
"""What a terminal receives to leave the alternate screen, without the mouse, with a cursor."""


@pytest.fixture
def crashed(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """``crashed(*words)`` opens ``ltui WORDS`` on a terminal and presses ``?`` once it is drawn."""
    opened: list[Terminal] = []

    def crash(*words: str, drawn: str = "quickstart") -> Terminal:
        argv = [sys.executable, "-c", CRASHES_AT_HELP, *words]
        opened.append(Terminal(argv, tmp_path, os.environ, columns=80))
        opened[-1].wait_for(drawn)
        assert not opened[-1].echoes
        opened[-1].press("?")
        return opened[-1]

    yield crash
    for each in opened:
        each.close()


def after(terminal: Terminal) -> str:
    """What was printed after the screen was left."""
    assert terminal.echoes, "what is typed must be seen again"
    shown, _, printed = terminal.drawn.rpartition(CLOSED[0])
    assert all(sequence in terminal.drawn for sequence in CLOSED), printed
    assert SENTENCE not in shown
    return printed


def test_a_crash_restores_the_terminal_and_is_one_sentence(
    crashed: Callable[..., Terminal], private_home: Path
) -> None:
    private_home.mkdir(exist_ok=True)
    log = private_home / "dashboard.log"
    terminal = crashed()
    assert terminal.wait() == 1
    lines = after(terminal).splitlines()
    assert len(lines) == 1
    assert SENTENCE in lines[0]
    assert lines[0].endswith(f"Training continues. The traceback is in {log}")
    assert "in fail" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("reason", ["No space left on device", "Is a directory"])
def test_a_crash_is_printed_if_the_log_cannot_be_written(
    reason: str, crashed: Callable[..., Terminal], private_home: Path
) -> None:
    private_home.mkdir(exist_ok=True)
    log = private_home / "dashboard.log"
    if reason == "Is a directory":
        log.mkdir()
    else:
        log.symlink_to("/dev/full")
    terminal = crashed()
    assert terminal.wait() == 1
    printed = after(terminal)
    assert SENTENCE in printed
    assert f"cannot be written to {log} ({reason}):" in printed
    assert "in fail" in printed


def test_a_run_continues_when_its_dashboard_crashes(
    crashed: Callable[..., Terminal], ltui: Ltui, ends_its_runs: None
) -> None:
    terminal = crashed("exec", "--", "sleep", "600", drawn="sleep 600")
    terminal.wait_for(SENTENCE)
    # The command goes on with plain lines.
    terminal.wait_for("closing the terminal leaves it running", seconds=60)
    assert terminal.process.poll() is None
    (head,) = json.loads(ltui("runs", "--json").stdout)
    assert head["state"] in ("starting", "running")
