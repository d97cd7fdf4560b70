"""CPU and memory usage of every rank with its children.

DataLoader workers count for their rank. A rank that was started by another rank, as Lightning's own
launcher does, does not count for the rank that started it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from ltui.training.process.identity import ProcessIdentity, ProcessTable
from ltui.training.process.proc_files import environment, processor_times

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DELAY_S = 2.0
"""Seconds over which the time of waiting for a processor is averaged."""


class RankUsage(Struct, frozen=True):
    """CPU and memory usage of one rank with its children."""

    cpu_percent: float | None
    """CPU usage, 100 for one core; None in the first sample."""
    rss_bytes: int
    delay_share: float | None = None
    """Fraction of the last seconds in which the main thread was runnable but had no processor.

    None before the second sample, and if the kernel does not count it.
    """


class UsageMeter:
    """Usage of ranks, sampled repeatedly."""

    def __init__(self) -> None:
        self._previous: dict[int, tuple[float, dict[tuple[int, int], int]]] = {}
        self._delays: dict[ProcessIdentity, deque[tuple[float, int]]] = {}

    def sample(
        self, table: ProcessTable, ranks: Mapping[int, ProcessIdentity], now_s: float
    ) -> dict[int, RankUsage]:
        """Return the usage of each living rank. ``now_s`` is the time on any monotonic clock."""
        usages: dict[int, RankUsage] = {}
        pids = {identity.pid for identity in ranks.values()}
        for rank, identity in ranks.items():
            if table.identity(identity.pid) != identity:
                self._previous.pop(rank, None)
                continue
            tree = [table.entries[pid] for pid in table.tree(identity.pid, pids)]
            ticks = {(p.pid, p.start_ticks): p.cpu_ticks for p in tree}
            rss_bytes = sum(p.rss_bytes for p in tree)
            delay_share = self._delay_share(identity, now_s)
            usages[rank] = RankUsage(self._percent(rank, ticks, now_s), rss_bytes, delay_share)
            self._previous[rank] = (now_s, ticks)
        self._delays = {
            identity: d for identity, d in self._delays.items() if identity in ranks.values()
        }
        return usages

    def _delay_share(self, identity: ProcessIdentity, now_s: float) -> float | None:
        """Return the fraction over the samples of the last ``_DELAY_S`` seconds."""
        delay_ns = _run_delay_ns(identity.pid)
        if delay_ns is None:
            return None
        earlier = self._delays.setdefault(identity, deque())
        while len(earlier) > 1 and now_s - earlier[1][0] >= _DELAY_S:
            earlier.popleft()
        fraction = None
        if earlier and now_s > earlier[0][0]:
            fraction = (delay_ns - earlier[0][1]) / 1e9 / (now_s - earlier[0][0])
        earlier.append((now_s, delay_ns))
        return fraction

    def _percent(self, rank: int, ticks: dict[tuple[int, int], int], now_s: float) -> float | None:
        previous = self._previous.get(rank)
        if previous is None or now_s <= previous[0]:
            return None
        spent = sum(max(0, count - previous[1].get(process, 0)) for process, count in ticks.items())
        return 100.0 * spent / _TICKS_PER_S / (now_s - previous[0])


class RankFinder:
    """Finds the ranks of a command without telemetry by ``RANK`` in their environment."""

    def __init__(self) -> None:
        self._ranks: dict[ProcessIdentity, int] = {}

    def find(self, table: ProcessTable, engine: ProcessIdentity) -> dict[int, ProcessIdentity]:
        """Return the process of each rank; the command is rank 0 if no process has a rank."""
        ranks: dict[int, ProcessIdentity] = {}
        for pid in table.tree(engine.pid):
            identity = table.identity(pid)
            if identity is None:
                continue
            rank = self._ranks.get(identity)
            if rank is None and (rank := _rank_of(pid)) is not None:
                # A process without RANK is read again: it may still start another program.
                self._ranks[identity] = rank
            # The tree is walked from its root, so a rank comes before its own children.
            if rank is not None and pid != engine.pid:
                ranks.setdefault(rank, identity)
        if not self._ranks and (identity := table.identity(engine.pid)) is not None:
            return {0: identity}
        return dict(sorted(ranks.items()))


def _run_delay_ns(pid: int) -> int | None:
    """Return the nanoseconds that the main thread has waited for a processor so far."""
    times = processor_times(pid, pid)
    return times[1] if times is not None else None


def _rank_of(pid: int) -> int | None:
    text = environment(pid).get("RANK", "")
    return int(text) if text.isdigit() else None
