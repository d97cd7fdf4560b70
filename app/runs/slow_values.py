"""Values of runs that take long to read: disk use and settings.

They are read only if a list needs them, once for each version of a run's files. The index keeps
them between starts of ltui.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import SETTING
from ltui.app.runs.run_index import RunIndex, Stamped
from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.store.run_directory import RunDir, disk_use

SIZES, SETTINGS = "size", "settings"
"""The kinds of slow values."""
LIVE_READ_S = {SIZES: 60.0, SETTINGS: 5.0}
"""Seconds after which a value of a live run is read again."""
_SETTINGS_FILES = 3
"""Number of words of a stamp with the files that settings are in: specification and history."""


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
        self._read_at: dict[tuple[str, str], float] = {}
        """Time of the monotonic clock at which a value was read, by kind and run."""
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

        ``stamps``: a text that changes with the files of a run; its first words with the
        specification and the history. After ``limit_s`` seconds no more values are read.
        """
        if not kinds:
            return tuple(entries), 0
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
            stamp = " ".join(stamp.split(" ")[:_SETTINGS_FILES])
        stored = self._stored[kind].get(entry.id)
        if stored is not None and (stored.stamp == stamp or self._is_recent(kind, entry)):
            return stored.value
        if deadline is not None and time.monotonic() > deadline:
            return None
        self._read_at[kind, entry.id] = time.monotonic()
        if kind == SIZES:
            stored = Stamped(stamp, float(disk_use(entry.run_dir.path)))
        else:
            stored = Stamped(stamp, read_settings(entry.run_dir))
        self._stored[kind][entry.id] = stored
        if not entry.live:
            read[kind][entry.id] = stored
        return stored.value

    def _is_recent(self, kind: str, entry: RunEntry) -> bool:
        read_at = self._read_at.get((kind, entry.id))
        recent = read_at is not None and time.monotonic() - read_at < LIVE_READ_S[kind]
        return entry.live and recent

    def forget(self, gone: Collection[str]) -> None:
        """Forget runs that do not exist any more."""
        for run_id in gone:
            self._completed.pop(run_id, None)
            for kind, values in self._stored.items():
                values.pop(run_id, None)
                self._read_at.pop((kind, run_id), None)


def read_settings(run_dir: RunDir) -> dict[str, str]:
    """Return the settings of a run; none if its specification cannot be read."""
    # Imported here: only a list that needs settings reads a history, with NumPy, and YAML.
    from ltui.app.runs.run_settings import run_settings
    from ltui.training.store.history_reader import RunStore

    reported: Mapping[str, Any] = {}
    # Files that were edited by hand may hold anything.
    with suppress(*WRONG_CONTENT), RunStore(run_dir) as store:
        reported = store.hyperparameters()
    try:
        return _shared(run_settings(run_dir.read_spec(), reported))
    except WRONG_CONTENT:
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
