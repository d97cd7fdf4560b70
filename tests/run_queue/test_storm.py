"""Ten runs over two slots, while processes are killed at random and the machine restarts."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_queue import ENDED_WELL, split_dependency
from ltui.training.state.run_snapshot import LIVE, RunState
from tests.live_processes import processes_with
from tests.ltui_command import run_ltui
from tests.run_queue.queued_programs import Programs

ASKED: dict[str, dict[str, Any]] = {
    "a": {}, "b": {"priority": 1}, "c": {"priority": 2}, "d": {"after": ("c:ok",)},
    "e": {"priority": 1, "after": ("b",)}, "f": {"priority": -1}, "g": {"priority": 2},
    "h": {"slots": 2}, "i": {"after": ("a", "g:ok")}, "j": {"priority": -1, "after": ("h:ok",)},
}  # fmt: skip
"""Ten runs in the order in which they are queued."""


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _supervisors(programs: Programs) -> list[int]:
    holders = [lock_holder(run.lock_path) for run in programs.runs]
    return [holder.pid for holder in holders if holder is not None]


def _restart_the_machine(programs: Programs) -> None:
    """Kill every process of the home at once."""
    while left := processes_with("LTUI_HOME", programs.home, word=str(programs.home)):
        others = [process for process in left if process.pid != os.getpid()]
        if not others:
            return
        for process in others:
            _kill(process.pid)


def _queue_ten(programs: Programs) -> None:
    for name, asked in ASKED.items():
        after = tuple(
            f"{split_dependency(text)[0]}-0000{ENDED_WELL * text.endswith(ENDED_WELL)}"
            for text in asked.get("after", ())
        )
        programs.add(name, 1.5, held=True, **{**asked, "after": after})
    programs.release_all()


@pytest.mark.usefixtures("two_slots")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_run_starts_once_and_in_order(programs: Programs, seed: int) -> None:
    chance, restarted_at = random.Random(seed), 0.0
    _queue_ten(programs)
    states = {run.id: RunState.QUEUED for run in programs.runs}
    while any(state in LIVE for state in states.values()):
        time.sleep(chance.uniform(0.2, 1.0))
        victims = [programs.dispatcher(), *_supervisors(programs), None, None]
        _kill(chance.choice(victims))
        if not restarted_at and len(programs.starts()) >= 5:
            _restart_the_machine(programs)
            restarted_at = time.time()
        if programs.dispatcher() is None:
            run_ltui("runs", code=0)
        states = {run.id: resolve_snapshot(run).state for run in programs.runs}
    assert restarted_at
    _check(programs, states, restarted_at)


def _check(programs: Programs, states: dict[str, RunState], restarted_at: float) -> None:
    lines = programs.lines()
    starts = {line.run: line.t for line in lines if line.word == "start"}
    ends = {line.run: line.t for line in lines if line.word == "end"}
    assert len(lines) == len(starts) + len(ends), "a run was started twice"
    killed = [run for run, state in states.items() if state is not RunState.FINISHED]
    assert len(killed) <= 2, "only what ran when the machine restarted does not finish"
    assert ends.keys() == states.keys() - set(killed)
    spans = {run: (t, ends.get(run, restarted_at)) for run, t in starts.items()}
    for run, (start, _) in spans.items():
        for text in ASKED[run[0]].get("after", ()):
            assert spans[f"{split_dependency(text)[0]}-0000"][1] <= start
        at_once = sum(_slots(other) for other, (a, b) in spans.items() if a <= start < b)
        assert at_once <= 2
    started_at = {run.id[0]: resolve_snapshot(run).started_at or 0.0 for run in programs.runs}
    in_order = sorted((run for run in "cgbahf"), key=started_at.__getitem__)
    assert "".join(in_order) == "cgbahf"


def _slots(run: str) -> int:
    return int(ASKED[run[0]].get("slots", 1))
