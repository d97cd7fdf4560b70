"""Values of runs that take long to read: disk use and settings.

They are read only if a list needs them, once for each version of a run's files. The index keeps
them between starts of ltui.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import SETTING
from ltui.app.runs.run_index import RunIndex, Stamped
from ltui.app.runs.run_settings import compared_settings
from ltui.training.problem import ProblemError
from ltui.training.store.disk_use import disk_use
from ltui.training.store.run_directory import RunDir

LIVE_SIZE_S = 60.0
"""Seconds after which the disk use of a live run is measured again."""
SIZES, SETTINGS = "size", "settings"
"""The kinds of slow values."""


def slow_kinds(names: Iterable[str]) -> frozenset[str]:
    """Return the kinds of slow values that the fields of these names need."""
    kinds = {
        SIZES if name == "size" else SETTINGS if name.startswith(SETTING) else "" for name in names
    }
    return frozenset(kinds - {""})


class SlowValues:
    """Reads and keeps the slow values of all runs of a home."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._stored: dict[str, dict[str, Stamped]] = {}
        """What is known, by kind and run."""
        self._measured_at: dict[str, float] = {}
        """Time of the monotonic clock at which a live run was measured, by run."""
        self._completed: dict[str, tuple[RunEntry, frozenset[str], RunEntry]] = {}
        """An entry as it was given, the kinds that were added to it, and the result, by run."""

    def add(
        self,
        entries: Sequence[RunEntry],
        stamps: Mapping[str, str],
        kinds: frozenset[str],
        limit_s: float | None,
    ) -> tuple[tuple[RunEntry, ...], int]:
        """Return the entries with their values of these kinds, and how many entries lack some.

        ``stamps``: a text that changes with the files of a run; its first word with the
        specification. After ``limit_s`` seconds no more values are read.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for kind in kinds - self._stored.keys():
            self._stored[kind] = {
                run_id: Stamped(stored.stamp, value)
                for run_id, stored in self._index.read_values(kind).items()
                if (value := _checked(kind, stored.value)) is not None
            }
        added, missing = [], 0
        read: dict[str, dict[str, Stamped]] = {kind: {} for kind in kinds}
        for entry in entries:
            before, had, completed = self._completed.get(entry.id, (None, kinds, entry))
            if before is not entry or had != kinds:
                stamp = stamps[entry.id]
                values = {
                    kind: value
                    for kind in kinds
                    if (value := self._value(kind, entry, stamp, deadline, read)) is not None
                }
                completed = _with_values(entry, values)
                if len(values) < len(kinds):
                    missing += 1
                elif not entry.live:
                    self._completed[entry.id] = entry, kinds, completed
            added.append(completed)
        for kind, values_read in read.items():
            self._index.write_values(kind, values_read)
        return tuple(added), missing

    def _value(
        self,
        kind: str,
        entry: RunEntry,
        stamp: str,
        deadline: float | None,
        read: dict[str, dict[str, Stamped]],
    ) -> Any:
        """Return a value that is known, or read it; None if the time is over."""
        if kind == SETTINGS:
            stamp = stamp.split(" ")[0]
        stored = self._stored[kind].get(entry.id)
        if stored is not None and (stored.stamp == stamp or self._is_recent(kind, entry)):
            return stored.value
        if deadline is not None and time.monotonic() > deadline:
            return None
        if kind == SIZES:
            self._measured_at[entry.id] = time.monotonic()
            stored = Stamped(stamp, float(disk_use(entry.run_dir.path)))
        else:
            stored = Stamped(stamp, _read_settings(entry.run_dir))
        self._stored[kind][entry.id] = stored
        if not entry.live:
            read[kind][entry.id] = stored
        return stored.value

    def _is_recent(self, kind: str, entry: RunEntry) -> bool:
        measured_at = self._measured_at.get(entry.id)
        return (
            kind == SIZES
            and entry.live
            and measured_at is not None
            and time.monotonic() - measured_at < LIVE_SIZE_S
        )

    def forget(self, gone: Collection[str]) -> None:
        """Forget runs that do not exist any more."""
        for run_id in gone:
            self._completed.pop(run_id, None)
            self._measured_at.pop(run_id, None)
            for values in self._stored.values():
                values.pop(run_id, None)


def _read_settings(run_dir: RunDir) -> dict[str, str]:
    """Return the settings of a run; none if its specification cannot be read."""
    try:
        return _shared(compared_settings(run_dir.read_spec()))
    except (ProblemError, TypeError, ValueError):
        # A file that was edited by hand may hold anything.
        return {}


def _checked(kind: str, value: Any) -> Any:
    """Return a value of the index; None if it is damaged."""
    if kind == SETTINGS:
        return _shared(value) if isinstance(value, dict) else None
    return value if isinstance(value, float) else None


def _shared(settings: Mapping[Any, Any]) -> dict[str, str]:
    """Return settings whose texts share their memory with those of other runs."""
    return {sys.intern(str(name)): sys.intern(str(value)) for name, value in settings.items()}


def _with_values(entry: RunEntry, values: Mapping[str, Any]) -> RunEntry:
    return replace(
        entry,
        size_bytes=values.get(SIZES, entry.size_bytes),
        settings=values.get(SETTINGS, entry.settings),
    )
