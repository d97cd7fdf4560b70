"""CPU and memory of every rank with its children, from one pass over ``/proc``.

A rank's DataLoader workers count towards the rank. A rank that was started by another rank, as
Lightning's own launcher does, does not count towards the rank that started it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ltui.training.process.identity import ProcessIdentity, environment, stat_fields

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DELAY_S = 2.0
"""Seconds over which the wait for a processor is averaged."""
_PARENT, _USER, _SYSTEM, _STARTED, _RESIDENT = 1, 11, 12, 19, 21
"""Places in ``stat_fields``."""


@dataclass(frozen=True, slots=True)
class RankUsage:
    cpu_percent: float | None
    """100 is one core; None at the first look."""
    rss_bytes: int
    delay_share: float | None = None
    """Share of the last seconds in which the main thread was ready and had no processor; None
    before two readings, and where the kernel does not count it."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    start_ticks: int
    cpu_ticks: int
    rss_pages: int


class ProcessTable:
    """All processes at one moment."""

    def __init__(self) -> None:
        self._processes = {p.pid: p for p in _scan()}
        self._children: dict[int, list[int]] = {}
        for process in self._processes.values():
            self._children.setdefault(process.parent, []).append(process.pid)

    def tree(self, pid: int, without: Collection[int] = ()) -> list[int]:
        """Return ``pid`` and its living descendants, but not the trees below ``without``."""
        found, pending = [], [pid]
        while pending:
            current = pending.pop()
            if current in self._processes:
                found.append(current)
            pending += [p for p in self._children.get(current, []) if p not in without]
        return found

    def usage(
        self, pid: int, without: Collection[int] = ()
    ) -> tuple[dict[tuple[int, int], int], int]:
        """CPU ticks of every process of ``tree(pid, without)``, and the resident bytes of all."""
        tree = [self._processes[p] for p in self.tree(pid, without)]
        ticks = {(p.pid, p.start_ticks): p.cpu_ticks for p in tree}
        return ticks, sum(p.rss_pages for p in tree) * _PAGE_BYTES

    def identity(self, pid: int) -> ProcessIdentity | None:
        process = self._processes.get(pid)
        return None if process is None else ProcessIdentity(pid, process.start_ticks)

    def parent(self, pid: int) -> int | None:
        process = self._processes.get(pid)
        return None if process is None else process.parent


class UsageMeter:
    """Readings of ranks, look after look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, dict[tuple[int, int], int]]] = {}
        self._delays: dict[ProcessIdentity, deque[tuple[float, int]]] = {}

    def sample(
        self, table: ProcessTable, ranks: Mapping[int, ProcessIdentity], now_s: float
    ) -> dict[int, RankUsage]:
        """rank -> reading, for ranks that are alive. ``now_s`` is any steady clock."""
        readings: dict[int, RankUsage] = {}
        pids = {mark.pid for mark in ranks.values()}
        for rank, mark in ranks.items():
            if table.identity(mark.pid) != mark:
                self._before.pop(rank, None)
                continue
            ticks, rss_bytes = table.usage(mark.pid, pids)
            delay_share = self._delay_share(mark, now_s)
            readings[rank] = RankUsage(self._percent(rank, ticks, now_s), rss_bytes, delay_share)
            self._before[rank] = (now_s, ticks)
        self._delays = {m: d for m, d in self._delays.items() if m in ranks.values()}
        return readings

    def _delay_share(self, mark: ProcessIdentity, now_s: float) -> float | None:
        """Over the readings of the last ``_DELAY_S`` seconds."""
        delay_ns = _run_delay_ns(mark.pid)
        if delay_ns is None:
            return None
        earlier = self._delays.setdefault(mark, deque())
        while len(earlier) > 1 and now_s - earlier[1][0] >= _DELAY_S:
            earlier.popleft()
        share = None
        if earlier and now_s > earlier[0][0]:
            share = (delay_ns - earlier[0][1]) / 1e9 / (now_s - earlier[0][0])
        earlier.append((now_s, delay_ns))
        return share

    def _percent(self, rank: int, ticks: dict[tuple[int, int], int], now_s: float) -> float | None:
        before = self._before.get(rank)
        if before is None or now_s <= before[0]:
            return None
        spent = sum(max(0, count - before[1].get(process, 0)) for process, count in ticks.items())
        return 100.0 * spent / _TICKS_PER_S / (now_s - before[0])


class RankFinder:
    """Ranks of a command that sends no telemetry, by ``RANK`` in their environment."""

    def __init__(self) -> None:
        self._ranks: dict[ProcessIdentity, int] = {}

    def find(self, table: ProcessTable, engine: ProcessIdentity) -> dict[int, ProcessIdentity]:
        """rank -> process; the command itself as rank 0 where nobody ever named a rank."""
        found: dict[int, ProcessIdentity] = {}
        for pid in table.tree(engine.pid):
            mark = table.identity(pid)
            if mark is None:
                continue
            rank = self._ranks.get(mark)
            if rank is None and (rank := _rank(pid)) is not None:
                # What has none yet may still be about to start its program.
                self._ranks[mark] = rank
            # The tree is walked from its root, so a rank's own children come later.
            if rank is not None and pid != engine.pid:
                found.setdefault(rank, mark)
        if not self._ranks and (mark := table.identity(engine.pid)) is not None:
            return {0: mark}
        return dict(sorted(found.items()))


def _run_delay_ns(pid: int) -> int | None:
    """How long the main thread has waited for a processor so far."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _rank(pid: int) -> int | None:
    text = environment(pid).get("RANK", "")
    return int(text) if text.isdigit() else None


def _scan() -> list[_Process]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = stat_fields(int(name))
        if fields is None or len(fields) <= _RESIDENT or fields[0] in (b"Z", b"X"):
            continue
        found.append(
            _Process(
                int(name),
                int(fields[_PARENT]),
                int(fields[_STARTED]),
                int(fields[_USER]) + int(fields[_SYSTEM]),
                int(fields[_RESIDENT]),
            )
        )
    return found
