"""The run queue: runs that wait to be started, and the decision which of them may start. Pure.

It has nothing to do with the tensor queue, through which ranks report. An entry is stored as
``queued.json`` in the directory of its run, so its field names must not change. Entries with a
higher priority come first, then those with a lower position.

A run uses slots of its machine unless it was given GPUs by ``free:N``. Entries that wait for slots
keep their order among each other, and so do entries that want GPUs: the supervisor of one of them
waits for its GPUs, and the next one is started when it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunState

FAILED, STOPPED = "failed", "stopped"
"""How an entry has left the order: it could not be started, or a person took it out."""
GONE = "gone"
"""What is known of a run that is not there any more."""
NEVER = "never starts"
"""Begin of the reason of an entry that cannot start unless something is changed."""
_LIVE = frozenset(state.value for state in LIVE)
ENDED_WELL = ":ok"
"""End of a dependency that must have finished."""


LATEST = 250e9
"""The highest unix time of an entry, in the year 9892: later ones have no date."""
_UnixTime = Annotated[float, Meta(ge=0, le=LATEST)]


class QueueEntry(Struct, frozen=True, kw_only=True):
    """What a person asked for when a run was put into the run queue."""

    priority: int = 0
    after: tuple[str, ...] = ()
    """Ids of runs that must have ended before; ``ID:ok`` must have finished."""
    not_before: _UnixTime | None = None
    """Unix time before which it does not start."""
    slots: int = 1
    """Slots of the machine that it uses, unless it has GPUs."""
    gpus: int = 0
    """Number of free GPUs that its supervisor waits for; 0 for none."""
    held: bool = False
    """It does not start until it is released."""
    position: float = 0.0
    """Place among the entries of the same priority; 0 in a new entry means the end."""
    asked_at: float = 0.0
    """Unix time."""
    host: str = ""
    """Name of the machine that starts it."""
    inode: int = 0
    """That of the run directory, which a copy of it does not have."""
    umask: int = 0o077
    """The umask of the process that asked."""
    resume: bool = False
    """It is another attempt of a run that has ended, from its last good checkpoint."""
    checkpoint: str | None = None
    """Name of the checkpoint to begin with, in the folder of the run's checkpoints."""
    step: int | None = None
    """Global step of that checkpoint."""
    starting: int | None = None
    """Number of the attempt that is being started; None until that is decided."""
    ended: str | None = None
    """``FAILED`` or ``STOPPED`` if it does not wait any more."""
    reason: str | None = None
    """Why it could not be started."""

    @property
    def waits(self) -> bool:
        """Return True if nobody has begun to start it, and it has not left the order."""
        return self.ended is None and self.starting is None


class UsedSlots(Struct, frozen=True, kw_only=True):
    """A live run of this machine."""

    run: str
    slots: int = 1
    """Slots that it uses; 0 if it has GPUs."""
    waits_for_gpus: bool = False
    left_s: float | None = None
    """Seconds until it ends, as far as known."""


class QueueFacts(Struct, frozen=True, kw_only=True):
    """Everything that the decision needs."""

    entries: Mapping[str, QueueEntry]
    """Entries by the id of their run."""
    live: Sequence[UsedSlots] = ()
    """Live runs of this machine; runs that are just being started are not among them."""
    others: Mapping[str, str] = {}
    """State of every run that an entry depends on, as ``RunState`` or ``GONE``."""
    host: str = ""
    """This machine."""
    now: float = 0.0
    """Unix time."""
    slots: int = 1
    """Slots of this machine."""
    passing: bool = False
    """An entry may start before an earlier one that needs more slots than are free."""


class QueuePlace(Struct, frozen=True, kw_only=True):
    """One entry in the order, and what it waits for."""

    run: str
    starts: bool = False
    """It may start now."""
    reason: str = ""
    """What it waits for, in words."""
    expected_at: float | None = None
    """Unix time at which it will probably start; None if that is not known."""


def ordered(entries: Mapping[str, QueueEntry]) -> list[str]:
    """Return the runs in the order in which they start if nothing else keeps them."""

    def key(run: str) -> tuple[int, float, float, str]:
        entry = entries[run]
        return -entry.priority, entry.position, entry.asked_at, run

    return sorted(entries, key=key)


def decide(facts: QueueFacts) -> list[QueuePlace]:
    """Return every entry in order but those that were taken out, and which of them may start now.

    An entry whose start has been decided is not decided again, but uses its slots.
    """
    starting = [
        UsedSlots(run=run, slots=_slots(entry), waits_for_gpus=entry.gpus > 0)
        for run, entry in facts.entries.items()
        if entry.starting is not None and entry.ended is None
    ]
    line = _Line(facts, [*facts.live, *starting])
    places = []
    entries = {run: entry for run, entry in facts.entries.items() if entry.ended != STOPPED}
    for number, run in enumerate(ordered(entries), 1):
        entry = entries[run]
        if entry.ended is not None:
            places.append(QueuePlace(run=run, reason=f"could not be started: {entry.reason}"))
        elif entry.starting is not None:
            places.append(QueuePlace(run=run, reason="it is being started"))
        elif (reason := _own_reason(run, facts)) is not None:
            places.append(QueuePlace(run=run, reason=reason, expected_at=_own_start(run, facts)))
        else:
            places.append(line.place(run, entry, _ordinal(number)))
    return places


class _Line:
    """The slots and the wait for GPUs, while the entries take their turns."""

    def __init__(self, facts: QueueFacts, live: Sequence[UsedSlots]) -> None:
        self._facts = facts
        self._users = [one for one in live if one.slots]
        self._free = facts.slots - sum(one.slots for one in self._users)
        self._wanted = 0
        """Slots of the entries before that wait for slots."""
        self._blocked_by: str | None = None
        self._gpu_user = next((one.run for one in live if one.waits_for_gpus), None)

    def place(self, run: str, entry: QueueEntry, number: str) -> QueuePlace:
        """Return the place of the next entry, and let it use what it needs."""
        prefix = f"{number} in the run queue: "
        if entry.gpus:
            if self._gpu_user is not None:
                reason = f"{prefix}run {self._gpu_user} waits for GPUs before it"
                return QueuePlace(run=run, reason=reason)
            self._gpu_user = run
            return QueuePlace(run=run, starts=True)
        if entry.slots > self._facts.slots:
            there = "is 1" if self._facts.slots == 1 else f"are {self._facts.slots}"
            reason = f"{NEVER}: it needs {entry.slots} slots, and there {there}"
            return QueuePlace(run=run, reason=reason)
        passes = self._blocked_by is None or self._facts.passing
        if passes and entry.slots <= self._free:
            self._free -= entry.slots
            self._users.append(UsedSlots(run=run, slots=entry.slots))
            return QueuePlace(run=run, starts=True)
        self._wanted += entry.slots
        if entry.slots <= self._free:
            reason = f"run {self._blocked_by} before it needs more slots than are free"
        else:
            reason = _used_words(self._users, self._facts.slots)
            self._blocked_by = self._blocked_by or run
        at = self._expected_at()
        return QueuePlace(run=run, reason=prefix + reason, expected_at=at)

    def _expected_at(self) -> float | None:
        """Return when the slots for the entries until here are free, by the ends of the live
        runs alone: how long the entries before take is not known."""
        free = self._free
        left = [(one.left_s, one.slots) for one in self._users if one.left_s is not None]
        for left_s, slots in sorted(left):
            free += slots
            if free >= self._wanted:
                return self._facts.now + left_s
        return None


def _slots(entry: QueueEntry) -> int:
    return 0 if entry.gpus else entry.slots


def _used_words(users: Sequence[UsedSlots], slots: int) -> str:
    used = sum(one.slots for one in users)
    names = [one.run for one in users]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    by = f"run {names[0]}" if len(names) == 1 else f"runs {', '.join(names[:2])}{more}"
    return f"{used} of {slots} slots {'is' if used == 1 else 'are'} used by {by}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _own_reason(run: str, facts: QueueFacts) -> str | None:
    """Return what keeps an entry from starting whatever the others do; None if nothing does."""
    entry = facts.entries[run]
    if entry.host != facts.host:
        return f"waits on machine {entry.host}"
    if entry.held:
        return "held"
    reasons = [dependency_reason(text, facts.others) for text in entry.after]
    for reason in sorted(filter(None, reasons), key=lambda text: not text.startswith(NEVER)):
        return reason
    if entry.not_before is not None and facts.now < entry.not_before:
        return f"not before {_time_words(entry.not_before, facts.now)}"
    return None


def dependency_reason(text: str, others: Mapping[str, str]) -> str | None:
    """Return why an entry with the dependency ``RUN`` or ``RUN:ok`` waits; None if it does not."""
    run, must_finish = split_dependency(text)
    state = others.get(run, GONE)
    if state in _LIVE:
        return f"waits for run {run} to {'finish' if must_finish else 'end'}"
    if not must_finish or state == RunState.FINISHED.value:
        return None
    how = "was deleted" if state == GONE else f"is {state}"
    return f"{NEVER}: run {run} had to finish before, and it {how}"


def split_dependency(text: str) -> tuple[str, bool]:
    """Return the run of a dependency, and whether it must have finished."""
    run = text.removesuffix(ENDED_WELL)
    return run, run != text


def check_no_cycle(entries: Mapping[str, QueueEntry], run: str, after: Sequence[str]) -> None:
    """Raise ``ProblemError`` if a run that waits for ``after`` would wait for itself."""
    waits_for = {one: entry.after for one, entry in entries.items() if entry.waits} | {run: after}
    ways = [[run]]
    for way in ways:
        for text in waits_for.get(way[-1], ()):
            other = split_dependency(text)[0]
            if other == run:
                raise ProblemError.of(
                    where="--after",
                    what=f"the run would wait for itself: {' after '.join([*way, run])}.",
                    remedy=f"Look at `ltui queue`, or take it out: ltui queue edit {way[-1]} "
                    "--after none",
                )
            if other not in way:
                ways.append([*way, other])


def _own_start(run: str, facts: QueueFacts) -> float | None:
    """Return when the time and the dependencies of an entry let it start, as far as known."""
    entry = facts.entries[run]
    if entry.held or entry.host != facts.host:
        return None
    left = {one.run: one.left_s for one in facts.live}
    starts = [facts.now, entry.not_before or 0.0]
    for text in entry.after:
        if dependency_reason(text, facts.others) is not None:
            left_s = left.get(split_dependency(text)[0])
            if left_s is None:
                return None
            starts.append(facts.now + left_s)
    return max(starts)


def _time_words(at: float, now: float) -> str:
    time = datetime.fromtimestamp(at)
    same_day = time.date() == datetime.fromtimestamp(now).date()
    return f"{time:%H:%M}" if same_day else f"{time:%Y-%m-%d %H:%M}"


def moved(entries: Mapping[str, QueueEntry], run: str, number: int) -> dict[str, QueueEntry]:
    """Return the entries that change if ``run`` moves to place ``number``, from 1.

    It takes the priority of the entry whose place it takes.
    """
    before = ordered(entries)
    line = [name for name in before if name != run]
    index, old = max(0, min(number - 1, len(line))), before.index(run)
    line.insert(index, run)
    levels = {name: entries[name].priority for name in line}
    levels[run] = levels[before[index]]
    new = {
        name: replace(entries[name], position=float(place), priority=levels[name])
        for place, name in enumerate(line, 1)
    }
    return {} if index == old else {n: entry for n, entry in new.items() if entry != entries[n]}
