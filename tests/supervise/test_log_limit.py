"""A log that grows without end keeps its beginning and its end."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.supervise.run_folder import log_limit
from tests.ltui_command import run_ltui
from tests.required import required
from tests.supervise.conftest import Runs, stored_events

LINES = 200_000
PRINTING = f"""
import time
for number in range({LINES}):
    print("line", number, "x" * 100)
print("all printed", flush=True)
while True:
    time.sleep(0.05)
    print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("text", "limit"),
    [(None, 1 << 30), ("500M", 500 << 20), ("2g", 2 << 30), ("4096", 4096), ("1GiB", 1 << 30),
     ("none", None), ("0", None), ("much", 1 << 30)],
)  # fmt: skip
def test_a_limit(text: str | None, limit: int | None) -> None:
    assert log_limit(text) == limit


def test_a_long_log_is_shortened_in_the_middle(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTUI_LOG_LIMIT", "4M")
    run = runs.start(sys.executable, "-c", PRINTING)
    log = run.engine_log_path(1)

    runs.until(run, lambda _: stored_events(run, "disk"))
    texts = [event.text for event in stored_events(run, "disk")]
    assert any("engine.log has passed 4 MB (LTUI_LOG_LIMIT)" in text for text in texts)
    # What is printed between two checks is kept until the second: the last check counts.
    runs.until(run, lambda _: log.read_bytes().endswith(b"alive\n"))
    runs.until(run, lambda _: log.stat().st_blocks * 512 < 4 << 20)
    printed = run_ltui("logs", run.id, code=0).stdout
    assert len(printed) < 6e6
    assert "\0" not in printed
    lines = printed.splitlines()
    assert lines[0] == f"line 0 {'x' * 100}"
    assert [line for line in lines if "MB were removed here, LTUI_LOG_LIMIT" in line]
    assert {"all printed", f"line {LINES - 1} {'x' * 100}", "alive"} < set(lines)
    runs.end(run, "kill")


def test_the_log_of_the_supervisor_is_cut(runs: Runs) -> None:
    run = runs.training()
    pid = required(resolve_snapshot(run).supervisor_pid)
    os.kill(pid, signal.SIGSTOP)  # it cuts what it has written itself, not what others are writing
    with run.supervisor_log_path.open("a") as log:
        log.writelines(f"error {number}\n" for number in range(500_000))
    os.kill(pid, signal.SIGCONT)
    runs.until(run, lambda _: 0 < run.supervisor_log_path.stat().st_size < 2e6)
    # For a moment it is empty: its end is written back.
    runs.until(run, lambda _: run.supervisor_log_path.read_text().endswith("error 499999\n"))
    runs.end(run, "kill")
