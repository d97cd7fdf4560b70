"""The dispatcher: the process that starts queued runs when it is their turn.

It runs as long as an entry of the run queue may start on this machine. Everything that it knows is
in files, so it may be killed at any moment: ``dispatcher_process.py`` starts the next one.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from ltui.app.launch.advance_sweeps import advance_sweeps
from ltui.app.settings import Settings, read_user_config
from ltui.training.lifecycle.run_queue import (
    is_being_started,
    mark_starting,
    read_facts,
    record_failure,
    start_queued,
)
from ltui.training.lifecycle.supervisor_client import SupervisorDiedError
from ltui.training.process.identity import release_lock, write_lock_text
from ltui.training.state.run_queue import QueueEntry, QueuePlace, decide, split_dependency
from ltui.training.store.queue_files import (
    dispatcher_lock,
    may_start_here,
    publish,
    queue_lock,
    read_queue,
    remove_entry,
    was_started,
)
from ltui.training.store.run_directory import RunDir
from ltui.training.sweep.sweep_files import active_sweeps

POLL_S = 1.0
"""Seconds between two decisions."""
FAILED_S = 10.0
"""Seconds until the next decision after one that failed, for example because the disk is full."""
BUSY = 5
"""The dispatcher sleeps at least so many times as long as a decision takes, up to
``LONGEST_BUSY_S``: a decision that recovers a killed run waits for it, which costs nothing."""
LONGEST_BUSY_S = 5.0
MOST_DEATHS = 5
"""Number of supervisors of one run that may die while they start, until the start has failed."""
SLOTS, PASSING = "queue.slots", "queue.pass"
"""Settings: the slots of this machine, and whether a later entry may start before one that needs
more slots than are free."""


def queue_settings(home: Path) -> tuple[int, bool]:
    """Return the slots of this machine, and whether entries may pass each other."""
    settings = Settings(home, read_user_config())
    return settings.value(SLOTS), settings.value(PASSING)


class Dispatcher:
    """Decides once a second, and starts one run after the other."""

    def __init__(self, home: Path, lock: int) -> None:
        self._home, self._lock = home, lock
        self._deaths = Counter[str]()
        self._published: list[QueuePlace] | None = None

    def run(self) -> None:
        """Start runs until nothing waits that this process could start."""
        problem = ""
        # A home that is gone is not created again.
        while (self._home / "runs").is_dir():
            advance_sweeps(self._home)
            began = time.monotonic()
            pause_s = POLL_S
            try:
                if self._start_next():
                    continue
                if self._has_ended():
                    return
            except Exception as error:  # noqa: BLE001 - the top of the process
                if str(error) != problem:
                    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                problem, pause_s = str(error), FAILED_S
            busy_s = min(LONGEST_BUSY_S, BUSY * (time.monotonic() - began))
            time.sleep(max(pause_s, busy_s))

    def _start_next(self) -> bool:
        """Start the first run that may start. Return True if the next may start at once."""
        entries = read_queue(self._home).entries
        for run, entry in entries.items():
            if entry.starting is not None and entry.ended is None:
                self._finish_start(RunDir(self._home / "runs" / run), entry)
        slots, passing = queue_settings(self._home)
        facts = read_facts(self._home, entries, slots=slots, passing=passing, recovers=True)
        marked: QueueEntry | None = None
        with queue_lock(self._home):
            facts = replace(facts, entries=read_queue(self._home).entries)
            # Of an entry that is gone, the run may use slots now.
            gone = entries.keys() - facts.entries.keys()
            if gone or not _dependencies(facts.entries) <= facts.others.keys():
                return True  # An entry was changed meanwhile.
            places = decide(facts)
            first = next((place.run for place in places if place.starts), "")
            run_dir = RunDir(self._home / "runs" / first)
            if first:
                marked = mark_starting(run_dir, facts.entries[first])
        waiting = [place for place in places if facts.entries[place.run].ended is None]
        if waiting != self._published:
            publish(self._home, waiting)
            self._published = waiting
        if marked is not None:
            self._start(run_dir, marked)
        return marked is not None

    def _finish_start(self, run_dir: RunDir, entry: QueueEntry) -> None:
        """Continue a start that a killed dispatcher, or a killed supervisor, has begun."""
        if was_started(run_dir, entry):
            with queue_lock(self._home):
                remove_entry(run_dir)
        elif not is_being_started(run_dir, entry):
            self._start(run_dir, entry)

    def _start(self, run_dir: RunDir, entry: QueueEntry) -> None:
        try:
            start_queued(run_dir, entry)
        except SupervisorDiedError as error:
            # Somebody may have killed it, so the next decision tries again.
            self._deaths[run_dir.id] += 1
            if self._deaths[run_dir.id] >= MOST_DEATHS:
                record_failure(run_dir, entry, error)

    def _has_ended(self) -> bool:
        """End if no entry waits for this machine, and no sweep goes on. Whoever queues a run
        afterwards takes the queue's lock first, and then starts another dispatcher."""
        with queue_lock(self._home):
            if active_sweeps(self._home):
                return False
            if any(map(may_start_here, read_queue(self._home).entries.values())):
                return False
            publish(self._home, [])
            release_lock(self._lock)
        return True


def _dependencies(entries: Mapping[str, QueueEntry]) -> set[str]:
    return {split_dependency(text)[0] for entry in entries.values() for text in entry.after}


def main(home: Path) -> None:
    """Run unless another dispatcher of this home and machine does."""
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    path = dispatcher_lock(home)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    write_lock_text(lock, path)
    Dispatcher(home, lock).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
