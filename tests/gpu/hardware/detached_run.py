"""A run that a section starts, watches and ends."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.database_schema import StoreError
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir
from tests.system.conftest import Ltui
from tests.waiting import wait_for

_POLL_S = 0.1


class DetachedRun:
    """A run in the background, and its snapshots."""

    def __init__(self, ltui: Ltui, command: str, name: str, *words: str) -> None:
        """Start ``ltui COMMAND --detach --name NAME WORDS``."""
        self.ltui, self.name = ltui, name
        ltui(command, "--detach", "--name", name, *words, timeout=120)
        self.run_dir: RunDir = find_run(ltui.home, name)

    def until(self, condition: Callable[[RunSnapshot], object], seconds: float) -> RunSnapshot:
        """Return the first snapshot for which ``condition`` is true.

        Raise ``AssertionError`` with the state of the run after ``seconds``.
        """

        def is_wanted(snapshot: RunSnapshot | None) -> object:
            return snapshot is not None and condition(snapshot)

        try:
            found = wait_for(self._read, wanted=is_wanted, seconds=seconds, period_s=_POLL_S)
        except AssertionError as error:
            last = self._read()
            state = "without a state" if last is None else f"{last.state.value}: {last.detail}"
            raise AssertionError(f"{self.name} is {state} after {seconds:.0f} s") from error
        assert found is not None
        return found

    def ended(self, seconds: float = 150) -> RunSnapshot:
        """Wait for the end."""
        return self.until(lambda snapshot: snapshot.state not in LIVE, seconds)

    def watch(self, seconds: float, period_s: float = 1.0) -> list[RunSnapshot]:
        """Return a snapshot every ``period_s``, the first one at once, until the run ends."""
        snapshots, ends = [self.until(bool, 10)], time.monotonic() + seconds
        while time.monotonic() < ends and snapshots[-1].state in LIVE:
            time.sleep(period_s)
            snapshots.append(self.until(bool, 10))
        return snapshots

    def kill(self) -> None:
        """Kill the run if it still runs, and wait until it has ended."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            if self.until(bool, 10).state in LIVE:
                self.ltui("stop", self.name, "--kill", timeout=60)
                self.ended(60)

    def _read(self) -> RunSnapshot | None:
        """Return the current snapshot; None while it cannot be read."""
        with contextlib.suppress(StoreError, ProblemError, OSError):
            return current_snapshot(self.run_dir)
        return None
