"""The run queue for commands and screens: its order, and the changes that a person makes.

Each change is one decision under the queue's lock; several terminals may make changes at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.launch.build_spec import changed_spec
from ltui.app.launch.queue_dispatcher import queue_settings
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.dispatcher_process import ensure_dispatcher, wake_dispatcher
from ltui.training.lifecycle.run_queue import read_facts
from ltui.training.problem import ProblemError
from ltui.training.state.run_queue import (
    ENDED_WELL,
    LATEST,
    NEVER,
    QueueEntry,
    QueuePlace,
    check_no_cycle,
    decide,
    moved,
    split_dependency,
)
from ltui.training.state.stop_conditions import parse_time_condition
from ltui.training.store.find_run import find_run
from ltui.training.store.queue_files import (
    change_entry,
    check_changeable,
    may_start_here,
    queue_lock,
    read_entry,
    read_queue,
    write_entry,
)
from ltui.training.store.run_directory import RunDir, write_atomically
from ltui.training.store.spec_file import read_spec_file, spec_text
from ltui.training.sweep.sweep_files import active_sweeps

_HALF_A_DAY_S = 43_200.0
"""Seconds from now until which a time of day is clear without the day."""


class QueueView(Struct, frozen=True, kw_only=True):
    """The run queue as it is now."""

    places: tuple[QueuePlace, ...]
    entries: dict[str, QueueEntry]
    damaged: dict[str, str]
    """Why an entry cannot be read, by the id of its run."""


def queue_view(home: Path) -> QueueView:
    """Return the order of the run queue and what each entry waits for, and start the dispatcher if
    it is dead."""
    queue = read_queue(home)
    if any(map(may_start_here, queue.entries.values())) or active_sweeps(home):
        ensure_dispatcher(home)
    slots, passing = queue_settings(home)
    places = decide(read_facts(home, queue.entries, slots=slots, passing=passing))
    return QueueView(places=tuple(places), entries=queue.entries, damaged=queue.damaged)


def place_words(view: QueueView, place: QueuePlace) -> str:
    """Return what an entry waits for, and when it will probably start.

    Of a held one, also what it waits for when it is released.
    """
    reason, entry = place.reason or "starts now", view.entries[place.run]
    if entry.held and entry.waits:
        words = [reason, *(f"after {text}" for text in entry.after)]
        if entry.not_before is not None:
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.not_before))
            words.append(f"not before {at}")
        if entry.slots > 1 and not entry.gpus:
            words.append(f"{entry.slots} slots")
        return ", ".join(words)
    if place.expected_at is None or reason.startswith("not before"):
        return reason
    wait_s = place.expected_at - time.time()
    form = "%H:%M" if wait_s < _HALF_A_DAY_S else "%Y-%m-%d %H:%M"
    at = time.strftime(form, time.localtime(place.expected_at))
    return f"{reason}; starts at about {at}"


def reasons_to_wait(home: Path) -> dict[str, str]:
    """Return what each entry of the run queue waits for, in words that begin with ``NEVER`` if it
    cannot start, or waits for such an entry."""
    view = queue_view(home)
    reasons = {place.run: place.reason for place in view.places}
    blocked = [run for run, reason in reasons.items() if reason.startswith(NEVER)]
    for other in blocked:  # it grows
        for run, entry in view.entries.items():
            waits_for = (split_dependency(text)[0] for text in entry.after)
            if entry.waits and not entry.held and run not in blocked and other in waits_for:
                reasons[run] = f"{NEVER}: it waits for run {other}, and that {reasons[other]}"
                blocked.append(run)
    return reasons


def dependencies(home: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of ``RUN`` and ``RUN:ok`` of ``--after``. Raises ``ProblemError``."""
    found = []
    for text in texts:
        name, must_finish = split_dependency(text)
        found.append(find_run(home, name).id + (ENDED_WELL if must_finish else ""))
    return tuple(dict.fromkeys(found))


def start_time(text: str) -> float:
    """Return the unix time of ``18:30`` or ``+2h`` of ``--not-before``. Raises ``ProblemError``."""
    now = time.time()
    try:
        condition = parse_time_condition(text, now)
    except ProblemError:
        raise ProblemError.of(
            where=f"--not-before {text}",
            what="invalid time.",
            remedy="Give a time such as 18:30, or a delay such as +2h.",
        ) from None
    at = condition.at_s or now + (condition.wait_s or 0.0)
    if at > LATEST:
        raise ProblemError.of(where=f"--not-before {text}", what="this is later than any date.")
    return at


def move(run_dir: RunDir, number: int) -> None:
    """Move an entry to a place of the order, from 1. Raises ``ProblemError``."""
    with queue_lock(run_dir.home):
        entries = read_queue(run_dir.home).entries
        check_changeable(run_dir, entries.get(run_dir.id))
        waiting = {run: entry for run, entry in entries.items() if entry.waits}
        check_waits(run_dir, entries[run_dir.id])
        for run, entry in moved(waiting, run_dir.id, number).items():
            write_entry(RunDir(run_dir.home / "runs" / run), entry)


def check_waits(run_dir: RunDir, entry: QueueEntry) -> None:
    """Raise ``ProblemError`` if an entry has left the order."""
    if entry.ended is not None:
        raise ProblemError.of(
            where=run_dir.id,
            what=f"it {entry.ended} and does not wait any more.",
            remedy=f"Put it back: ltui queue retry {run_dir.id}",
        )


def hold(run_dir: RunDir, *, held: bool) -> None:
    """Keep an entry from starting, or let it start again. Raises ``ProblemError``."""

    def change(entry: QueueEntry) -> QueueEntry:
        check_waits(run_dir, entry)
        return replace(entry, held=held)

    change_entry(run_dir, change)
    if not held:
        wake_dispatcher(run_dir.home)


def edit(
    run_dir: RunDir,
    overrides: Sequence[str] = (),
    *,
    priority: int | None = None,
    after: tuple[str, ...] | None = None,
    not_before: float | None = None,
    slots: int | None = None,
) -> None:
    """Change the settings of a queued run, or when it starts; None leaves a value as it is.

    ``not_before`` 0 removes the time. Raises ``ProblemError``; then nothing is changed.
    """
    before = read_entry(run_dir)
    check_changeable(run_dir, before)
    assert before is not None
    path = run_dir.queued_spec_path if before.resume else run_dir.spec_path
    spec: RunSpec | None = None
    if overrides or slots is not None:
        spec = read_spec_file(path if path.exists() else run_dir.spec_path)
        # The check imports classes in another interpreter, so the lock is not held for it.
        spec = changed_spec(spec, overrides) if overrides else spec
        spec = spec.with_changes(slots=slots or spec.slots)

    def change(entry: QueueEntry) -> QueueEntry:
        check_waits(run_dir, entry)
        check_no_cycle(read_queue(run_dir.home).entries, run_dir.id, after or ())
        if spec is not None:
            if entry != before:
                raise ProblemError.of(
                    where=run_dir.id,
                    what="it was changed by another command at the same time.",
                    remedy="Look at it with `ltui queue`, and try again.",
                )
            write_atomically(path, spec_text(spec).encode())
        given = {"priority": priority, "after": after, "slots": slots, "not_before": not_before}
        changed = replace(entry, **{name: v for name, v in given.items() if v is not None})
        return replace(changed, not_before=changed.not_before or None)

    change_entry(run_dir, change)
    wake_dispatcher(run_dir.home)
