"""Small programs in the run queue, which write when they started and ended."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.dispatcher_process import wake_dispatcher
from ltui.training.lifecycle.run_queue import enqueue
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_queue import QueueEntry
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.queue_files import dispatcher_lock, queue_lock, read_queue, write_entry
from ltui.training.store.run_directory import RunDir
from tests.waiting import wait_for

PROGRAM = """
import os, sys, time
def note(word):
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{word} {sys.argv[2]} {time.time()}\\n".encode())
note("start")
while sys.argv[3][0] == "=" and open(sys.argv[1]).read().count("start") < int(sys.argv[3][1:]):
    time.sleep(0.05)
time.sleep(0.2 if sys.argv[3][0] == "=" else float(sys.argv[3]))
note("end")
"""


class Line(Struct, frozen=True):
    """What a program wrote."""

    word: str
    run: str
    t: float


class Programs:
    """The queued programs of one home."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self.log = home, folder / "log"
        self.runs: list[RunDir] = []

    def add(self, name: str, lasts_s: float | str = 0.2, **asked: Any) -> RunDir:
        """Put a program into the queue; its id is its name with the end ``-0000``.

        It ends after some seconds; with ``=2``, after two programs have started.
        """
        run_id, slots = f"{name}-0000", asked.pop("slots", 1)
        (self.home / "runs").mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-c", PROGRAM, str(self.log), run_id, str(lasts_s))
        spec = RunSpec(
            id=run_id, name=name, created_at=time.time(), cwd=str(self.home), python=sys.executable,
            command=command, nproc=0, env={"PATH": os.environ["PATH"]}, slots=slots,
        )  # fmt: skip
        self.runs.append(enqueue(spec, self.home, QueueEntry(**asked)))
        return self.runs[-1]

    def release_all(self) -> None:
        """Release all held runs in one decision."""
        with queue_lock(self.home):
            for run, entry in read_queue(self.home).entries.items():
                held = QueueEntry(**{**_fields(entry), "held": False})
                write_entry(RunDir(self.home / "runs" / run), held)
        wake_dispatcher(self.home)

    def lines(self) -> list[Line]:
        """Return what the programs have written until now."""
        text = self.log.read_text() if self.log.exists() else ""
        words = [line.split() for line in text.splitlines()]
        return [Line(word, run, float(t)) for word, run, t in words]

    def starts(self) -> list[str]:
        """Return the names of the programs in the order in which they started."""
        return [line.run[:-5] for line in self.lines() if line.word == "start"]

    def state(self, run: RunDir) -> RunState:
        return resolve_snapshot(run).state

    def wait(self, *runs: RunDir) -> None:
        """Wait until these runs, by default all, have ended."""
        for run in runs or self.runs:
            wait_for(partial(self.state, run), wanted=lambda state: state not in LIVE)

    def dispatcher(self) -> int | None:
        """Return the pid of the dispatcher."""
        holder = lock_holder(dispatcher_lock(self.home))
        return None if holder is None else holder.pid


def _fields(entry: QueueEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}
