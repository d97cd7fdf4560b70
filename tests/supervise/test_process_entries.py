"""What ``/proc`` shows of a process that has ended."""

from __future__ import annotations

import os
import subprocess

from ltui.training.process.proc_files import entry_of
from tests.required import required
from tests.waiting import wait_for


def test_a_process_that_has_ended_is_exiting_until_it_is_gone() -> None:
    assert required(entry_of(os.getpid())).exiting is False
    child = subprocess.Popen(["true"])
    zombie = wait_for(lambda: required(entry_of(child.pid)), wanted=lambda entry: not entry.living)
    assert (zombie.exiting, zombie.exit_status) == (True, 0)
    child.wait()
    assert entry_of(child.pid) is None
