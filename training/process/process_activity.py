"""Activity of processes between two samples, usage of ranks, and the state of their machine.

They are read from ``/proc`` and the control groups. This needs no special rights and does not
disturb the processes.

CPU and memory usage is that of a rank with its children: DataLoader workers count for their rank. A
rank that was started by another rank, as Lightning's own launcher does, does not count for the rank
that started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import HostEvidence, ProcessActivity
from ltui.training.process.identity import ProcessIdentity, ProcessTable
from ltui.training.process.proc_files import (
    entry_of,
    environment,
    open_files,
    processor_times,
    read_pairs,
    read_text,
    threads_of,
)

_NO_LIMIT = 1 << 60
"""Limits from this number of bytes on mean that there is no limit."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - DataLoader workers put their batches there
_CGROUP = Path("/sys/fs/cgroup")


def read_host(pid: int | None = None, kills_before: int | None = None) -> HostEvidence:
    """Read the state of the machine.

    ``pid`` is a rank; its control group is inspected. ``kills_before`` is the number of
    out-of-memory kills when the attempt started.
    """
    memory = read_pairs("/proc/meminfo")
    used, limit = group_memory(pid)
    kills = oom_kills(pid)
    try:
        shm = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        shm = None
    return HostEvidence(
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory_available_bytes=_kibibytes(memory.get("MemAvailable")),
        memory_total_bytes=_kibibytes(memory.get("MemTotal")),
        memory_limit_bytes=limit,
        memory_used_bytes=used,
        oom_kills=None if kills is None else max(0, kills - (kills_before or 0)),
        shm_free_bytes=shm.free if shm else None,
        shm_total_bytes=shm.total if shm else None,
    )


def oom_kills(pid: int | None = None) -> int | None:
    """Return the number of processes that the kernel killed since boot because memory ran out."""
    counts = [read_pairs("/proc/vmstat", " ")]
    for folder in _group_folders(pid):
        counts += [read_pairs(folder / n, " ") for n in ("memory.events", "memory.oom_control")]
    return next((int(count["oom_kill"]) for count in counts if "oom_kill" in count), None)


def group_memory(pid: int | None) -> tuple[int | None, int | None]:
    """Return the used and maximum bytes of the control group; None if there is no limit."""
    for folder in _group_folders(pid):
        used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
        limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            cache = _file_cache(folder)
            return (None if used is None else max(0, used - cache)), limit
    return None, None


def unacknowledged_tcp(pid: int) -> tuple[int, int] | None:
    """Return (bytes not acknowledged, retransmits) over the TCP connections of a process."""
    inodes = {target[8:-1] for target in open_files(pid) if target.startswith("socket:[")}
    if not inodes:
        return None
    waiting = retransmits = 0
    for name in ("tcp", "tcp6"):
        for line in read_text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] in inodes and fields[3] in ("01", "02", "04"):
                waiting += int(fields[4].partition(":")[0], 16)
                retransmits += int(fields[6], 16)
    return waiting, retransmits


def _group_folders(pid: int | None) -> Iterable[Path]:
    """Return the folders of the process's control group (versions 2 and 1).

    The paths as seen in a container are included.
    """
    paths = []
    for line in read_text(f"/proc/{pid or 'self'}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths += [_CGROUP / path.strip("/"), _CGROUP]
        elif "memory" in controllers.split(","):
            paths += [_CGROUP / "memory" / path.strip("/"), _CGROUP / "memory"]
    return [p for p in paths if p.is_dir()]


def _file_cache(folder: Path) -> int:
    """Return the bytes of the file cache, which the kernel frees before it kills a process.

    Memory in ``/dev/shm`` is not part of it.
    """
    values = read_pairs(folder / "memory.stat", " ")
    # In version 1 the values with "total" include the groups below.
    names = ("inactive_file", "active_file")
    return sum(int(values.get(f"total_{name}", values.get(name, 0))) for name in names)


def _kibibytes(value: str | None) -> int | None:
    """Return the bytes of a value such as ``131072 kB``."""
    return None if value is None else int(value.split()[0]) * 1024


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


LOADER_NAME = "pt_data_worker"
"""Name that torch gives its DataLoader workers."""


class ProcessCounters(Struct, frozen=True):
    """Counters of one process, sampled at one time."""

    at_s: float
    ran_ns: int
    """Processor time of all threads except the excluded one, in nanoseconds."""
    switches: int
    """Context switches of the main thread."""
    delay_ns: int
    """Time that the main thread waited for a processor, in nanoseconds."""
    read_bytes: int | None
    written_bytes: int | None


def read_counters(
    pid: int, at_s: float, without_thread: int | None = None
) -> ProcessCounters | None:
    """Read the counters of a process; None if it ended or is another user's.

    ``at_s`` is the time on any monotonic clock. ``without_thread`` is a thread whose processor time
    and I/O are left out.
    """
    threads = threads_of(pid)
    if not threads:
        return None
    ran, delay = 0, 0
    for thread in threads:
        if thread == without_thread:
            continue
        times = processor_times(pid, thread)
        if times is not None:
            ran += times[0]
            delay += times[1] if thread == pid else 0
    switches = context_switches(pid)
    moved = _read_io(f"/proc/{pid}/io")
    if moved is not None and without_thread is not None:
        read, written = _read_io(f"/proc/{pid}/task/{without_thread}/io") or (0, 0)
        moved = moved[0] - read, moved[1] - written
    return ProcessCounters(at_s, ran, switches, delay, *(moved or (None, None)))


def context_switches(pid: int) -> int:
    """Return the number of context switches of the main thread so far."""
    status = read_pairs(f"/proc/{pid}/task/{pid}/status")
    names = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return sum(int(status.get(name, 0)) for name in names)


def activity_between(
    pid: int, before: ProcessCounters | None, after: ProcessCounters | None
) -> ProcessActivity:
    """Return the activity of the process between two samples."""
    entry = entry_of(pid)
    if entry is None or entry.state == "X":
        return ProcessActivity(pid=pid)
    status = read_pairs(f"/proc/{pid}/status")
    activity = ProcessActivity(
        pid=pid,
        name=entry.name,
        state=entry.state,
        exiting=entry.exiting,
        wait_channel=read_text(f"/proc/{pid}/wchan").strip("0\n") or None,
        rss_bytes=entry.rss_bytes,
        signals_caught=_signal_names(status.get("SigCgt")),
        signals_pending=(
            *_signal_names(status.get("SigPnd")),
            *_signal_names(status.get("ShdPnd")),
        ),
    )
    if before is None or after is None or after.at_s <= before.at_s:
        return activity
    seconds = after.at_s - before.at_s
    return replace(
        activity,
        interval_s=seconds,
        cpu_share=max(0, after.ran_ns - before.ran_ns) / 1e9 / seconds,
        switches=max(0, after.switches - before.switches),
        run_delay_share=max(0, after.delay_ns - before.delay_ns) / 1e9 / seconds,
        read_bytes=_difference(before.read_bytes, after.read_bytes),
        written_bytes=_difference(before.written_bytes, after.written_bytes),
    )


def handles_signal(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal, so that it does not end it."""
    mask = read_pairs(f"/proc/{pid}/status").get("SigCgt")
    return mask is not None and bool(int(mask, 16) >> (number - 1) & 1)


def open_stack_file(pid: int, folder: str) -> str | None:
    """Return the stack dump file in ``folder`` that the process has open; None if there is none."""
    start = f"{folder}/stacks-"
    return next((target for target in open_files(pid) if target.startswith(start)), None)


def thread_state(pid: int, thread: int) -> str | None:
    """Return the state letter of a thread (``R``, ``S``, ...); None if it ended."""
    fields = read_text(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()
    return fields[0] if fields else None


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _signal_names(mask: str | None) -> tuple[str, ...]:
    if mask is None:
        return ()
    bits = int(mask, 16)
    return tuple(s.name for s in signal.Signals if bits >> (s - 1) & 1)


def _read_io(path: str) -> tuple[int, int] | None:
    fields = read_pairs(path)
    if "read_bytes" not in fields:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


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
