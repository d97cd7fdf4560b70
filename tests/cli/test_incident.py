"""``ltui open`` as a process: what it leaves behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Ltui, OpenTerminal
from tests.ltui_command import LTUI
from tests.runs.hostile_runs import full_run
from tests.waiting import wait_for

IGNORES_HUP = ("sh", "-c", "trap '' HUP; exec \"$@\"", "sh")


@pytest.fixture
def packed(private_home: Path, command: Ltui) -> str:
    """An incident file."""
    path = str(private_home / "hang.ltui")
    (full_run(private_home, "hang-0001").path / "history.json").unlink()
    assert command("incident", "hang-0001", "-o", path, "--yes").returncode == 0
    return path


def test_no_signal_and_no_closed_terminal_leaves_what_was_opened(
    packed: str, tmp_path: Path, terminal: OpenTerminal, ltui: Ltui
) -> None:
    folder = tmp_path / "opened"
    folder.mkdir()
    environment = {"TMPDIR": str(folder)}

    def left() -> list[str]:
        return [path.name for path in folder.glob("*ltui-open-*")]

    # Under nohup, these tests and their children ignore SIGHUP.
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, *hang_up, None, signal.SIGKILL):
        argv = (*IGNORES_HUP, *LTUI) if number is None else LTUI
        shown = terminal("open", packed, argv=argv, env=environment)
        wait_for(left, wanted=lambda names: len(names) == 1)
        shown.wait_for("ValueError: x")
        if number is None:
            shown.hang_up()
        else:
            os.kill(shown.process.pid, number)
        shown.wait()
        assert len(left()) == (number is signal.SIGKILL), number
    # Another process that shows a file keeps its own.
    shown = terminal("open", packed, env=environment)
    shown.wait_for("ValueError: x")
    kept = left()
    assert len(kept) == 1
    assert ltui("open", packed, "--plain", env=environment).returncode == 0
    assert left() == kept
