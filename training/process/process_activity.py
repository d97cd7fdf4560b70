"""Activity of single processes between two samples, read from ``/proc``.

This needs no special rights and does not disturb the process.
"""

from __future__ import annotations

import signal

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import ProcessActivity
from ltui.training.process.proc_files import (
    entry_of,
    open_files,
    processor_times,
    read_pairs,
    read_text,
    threads_of,
)

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
    process_io = _read_io(f"/proc/{pid}/io")
    thread_io = _read_io(f"/proc/{pid}/task/{without_thread}/io") if without_thread else None
    read = None if process_io is None else process_io[0] - (thread_io[0] if thread_io else 0)
    written = None if process_io is None else process_io[1] - (thread_io[1] if thread_io else 0)
    return ProcessCounters(at_s, ran, switches, delay, read, written)


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
