"""The wall clock is set under a run: back by a day, then on by ten years.

A preloaded library shifts it for every process of the run, and for none of the machine.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import RunState
from tests.chaos.conftest import everywhere
from tests.chaos.invariants import verify_checkpoints
from tests.required import required
from tests.supervise.conftest import Runs

DAY_S = 86400
SOURCE = Path(__file__).with_name("shifted_clock.c")


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``set_clock(-60)``: processes started from here see the wall clock a minute behind."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library, shift = tmp_path / "clock.so", tmp_path / "clock"
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    shift.write_bytes(struct.pack("l", 0))
    monkeypatch.setenv("LTUI_TEST_CLOCK", str(shift))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    handle = os.open(shift, os.O_RDWR)
    mapped = mmap.mmap(handle, 8)
    os.close(handle)

    def shift_by(seconds: int) -> None:
        mapped[:8] = struct.pack("l", seconds)

    yield shift_by
    mapped.close()


@everywhere
def test_the_clock_is_set(runs: Runs, set_clock: Callable[[int], None]) -> None:
    run = runs.training("--save-every", "10", step=15)
    for days in (-1, 3650, -30):
        set_clock(days * DAY_S)
        step = required(runs.more_steps(run, 25).global_step)
        seen = resolve_snapshot(run)
        assert abs(required(seen.taken_at) - time.time() - days * DAY_S) < 600, (
            "the clock was not shifted"
        )
        assert seen.state is RunState.RUNNING
        assert not [v for v in seen.verdicts if v.level != "info"], seen.verdicts
        assert seen.history_note is None
        assert (seen.elapsed_s or 0.0) >= 0.0
        newest = required(verify_checkpoints(run).last)
        assert newest["global_step"] >= step - 30, "a newer checkpoint was pruned for an older"
    stopped = runs.end(run, "stop")
    assert stopped.detail == f"stopped at step {stopped.global_step}, checkpoint verified"
    set_clock(0)
    resume(run)
    runs.until(run, lambda s: s.attempt == 2 and (s.global_step or 0) > (stopped.global_step or 0))
    ended = runs.end(run, "stop")
    assert runs.steps(run) == list(range(1, (ended.global_step or 0) + 1))
