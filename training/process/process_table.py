"""All processes of the machine, read once, and the trees that they form."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.proc_files import ProcessEntry, entry_of, pids


class ProcessTable:
    """All processes, zombies included."""

    def __init__(self) -> None:
        self.entries = {pid: entry for pid in pids() if (entry := entry_of(pid)) is not None}
        self._children: dict[int, list[ProcessEntry]] = {}
        for entry in self.entries.values():
            self._children.setdefault(entry.parent, []).append(entry)

    def descendants(self, pid: int, without: Collection[int] = ()) -> Iterator[ProcessEntry]:
        """Yield the descendants of ``pid``, nearest first, but not the trees of ``without``."""
        pending = [pid]
        for parent in pending:
            children = [e for e in self._children.get(parent, ()) if e.pid not in without]
            pending += [entry.pid for entry in children]
            yield from children

    def tree(self, pid: int, without: Collection[int] = ()) -> list[int]:
        """Return the pids of the living processes among ``pid`` and its descendants."""
        root = [] if self.identity(pid) is None else [pid]
        return root + [entry.pid for entry in self.descendants(pid, without) if entry.living]

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Return the identity of a living process."""
        entry = self.entries.get(pid)
        if entry is None or not entry.living:
            return None
        return ProcessIdentity(pid, entry.start_ticks)
