"""A dashboard that crashes: the terminal is restored, one sentence names the log, runs go on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Ltui, OpenTerminal
from tests.cli.terminal import Terminal
from tests.ltui_command import LTUI, answer
from tests.stored_runs import stored_run

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


def crash(terminal: OpenTerminal, *words: str, drawn: str = "quickstart") -> Terminal:
    """Open ``ltui WORDS`` on a terminal, and press ``?`` once it is drawn."""
    opened = terminal(*words, argv=(sys.executable, "-c", CRASHES_AT_HELP), columns=80)
    opened.wait_for(drawn)
    assert not opened.echoes
    opened.press("?")
    return opened


def printed_after_the_crash(terminal: OpenTerminal) -> str:
    """Crash without a run, and return what was printed after the screen was left."""
    crashed = crash(terminal)
    assert crashed.wait() == 1
    assert crashed.echoes, "what is typed must be seen again"
    shown, _, printed = crashed.drawn.rpartition(CLOSED[0])
    assert all(sequence in crashed.drawn for sequence in CLOSED), printed
    assert SENTENCE not in shown
    return printed


def test_a_crash_restores_the_terminal_and_is_one_sentence(
    terminal: OpenTerminal, private_home: Path
) -> None:
    private_home.mkdir(exist_ok=True)
    log = private_home / "dashboard.log"
    (line,) = printed_after_the_crash(terminal).splitlines()
    assert SENTENCE in line
    assert line.endswith(f"Training continues. The traceback is in {log}")
    assert "in fail" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("reason", ["No space left on device", "Is a directory"])
def test_a_crash_is_printed_if_the_log_cannot_be_written(
    reason: str, terminal: OpenTerminal, private_home: Path
) -> None:
    private_home.mkdir(exist_ok=True)
    log = private_home / "dashboard.log"
    if reason == "Is a directory":
        log.mkdir()
    else:
        log.symlink_to("/dev/full")
    printed = printed_after_the_crash(terminal)
    assert SENTENCE in printed
    assert f"cannot be written to {log} ({reason}):" in printed
    assert "in fail" in printed


def test_a_run_continues_when_its_dashboard_crashes(
    terminal: OpenTerminal, command: Ltui, ends_its_runs: None
) -> None:
    crashed = crash(terminal, "exec", "--", "sleep", "600", drawn="sleep 600")
    crashed.wait_for(SENTENCE)
    # The command goes on with plain lines.
    crashed.wait_for("closing the terminal leaves it running", seconds=60)
    assert crashed.process.poll() is None
    (head,) = answer(command("runs", "--json").stdout)
    assert head["state"] in ("starting", "running")


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 1, "Standard output cannot be written (No space left on device).\n"),
        (">&-", 0, ""),
        (">&- 2>&- <&-", 0, ""),
    ],
)
def test_standard_output_that_cannot_be_written(
    private_home: Path, redirection: str, code: int, said: str
) -> None:
    stored_run(private_home, "calm-fox-0001")
    for words in ("queue --json", "wait last --json", "wait last"):
        line = f"exec {shlex.join(LTUI)} {words} {redirection}"
        done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, said), words
    assert not (private_home / "crash.log").exists()
