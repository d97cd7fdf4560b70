"""Wording of ranks, machines, places and activities in verdicts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from ltui.training.diagnosis.evidence import Collective, ProcessActivity
from ltui.training.shared.record_types import PulseState
from ltui.training.state.run_snapshot import NodeSnapshot

EQUAL_BATCHES = (
    "Give every rank the same number of batches: a DistributedSampler, drop_last=True, or"
)
"""Remedy for ranks with different numbers of batches, before the names of Lightning's limits."""
EQUAL_PROGRAM_BATCHES = f"{EQUAL_BATCHES} DistributedDataParallel.join()."
"""The same in a program without Lightning."""


NO_MACHINES: Mapping[int, str] = MappingProxyType({})
"""The names of the ranks' machines in a run on one machine, where they are left out of texts."""
MOST_NAMED = 6
"""Maximum number of ranks or machines that a sentence lists."""


def rank_machines(nodes: Sequence[NodeSnapshot]) -> Mapping[int, str]:
    """Return rank -> name of its machine; empty on one machine."""
    if len(nodes) < 2:
        return NO_MACHINES
    return {rank: node.name for node in nodes for rank in node.ranks}


def machines_text(names: Sequence[str]) -> str:
    """Return ``machine b``, ``machines b and c`` or ``machines b, c, d and 5 others``."""
    return names_text("machine", names)


def names_text(noun: str, names: Sequence[str]) -> str:
    """Return the noun with one name, with a few of them, or with three and how many others."""
    if len(names) == 1:
        return f"{noun} {names[0]}"
    if len(names) > MOST_NAMED:
        return f"{noun}s {', '.join(names[:3])} and {len(names) - 3} others"
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"


def ranks_text(ranks: Collection[int], machines: Mapping[int, str] = NO_MACHINES) -> str:
    """Return ``rank 2``, ``ranks 0, 1 and 3`` or ``ranks 0, 1, 2 and 61 others``.

    With ``machines``, the name of each rank's machine, return ``rank 2 on b`` or ``ranks 0 and 1 on
    a and rank 2 on b``.
    """
    ranks_by_machine: dict[str | None, list[int]] = {}
    for rank in ranks:
        ranks_by_machine.setdefault(machines.get(rank), []).append(rank)
    if len(ranks) > MOST_NAMED and len(ranks_by_machine) > 1:
        return f"{_numbers(ranks)} on {len(ranks_by_machine)} machines"
    parts = [
        _numbers_on(group, machine, machines) for machine, group in ranks_by_machine.items()
    ] or [_numbers(ranks)]
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _numbers_on(ranks: Collection[int], machine: str | None, machines: Mapping[int, str]) -> str:
    if machine is None:
        return _numbers(ranks)
    if len(ranks) > MOST_NAMED and len(ranks) == sum(name == machine for name in machines.values()):
        return f"the {len(ranks)} ranks on {machine}"
    return f"{_numbers(ranks)} on {machine}"


def _numbers(ranks: Collection[int]) -> str:
    return names_text("rank", [str(rank) for rank in ranks])


def verb(ranks: Collection[int], singular: str, plural: str) -> str:
    """Return the form of a verb that agrees with the number of ranks."""
    return singular if len(ranks) == 1 else plural


def collective_text(entry: Collective) -> str:
    """Return ``all_reduce #34``, or only ``all_reduce`` if its number is unknown."""
    return f"{entry.op} #{entry.seq}" if entry.seq >= 0 else entry.op


def sizes_text(entry: Collective) -> str:
    """Return the sizes of the tensors of a collective, such as ``[8, 16]``."""
    return "x".join(str(list(s)) for s in entry.sizes) or "no tensor"


def waiting_text(
    waiting: Collection[int], where: str | None, machines: Mapping[int, str] = NO_MACHINES
) -> str:
    """Return ``; ranks 0 and 2 wait in all_reduce #34``; empty if no rank waits."""
    if not waiting:
        return ""
    place = f" in {where}" if where else ""
    return f"; {ranks_text(waiting, machines)} {verb(waiting, 'waits', 'wait')}{place}"


def place_text(pulse: PulseState | None, detail: str | None = None) -> str | None:
    """Return the phase of a rank, and a detail such as a line."""
    label = pulse.phase.label if pulse is not None else None
    return f"{label}, {detail}" if label and detail and detail != label else detail or label


def consequences_text(ranks: Collection[int], machines: Mapping[int, str] = NO_MACHINES) -> str:
    """Return ``; the error of rank 0 followed from that``; empty for no ranks."""
    if not ranks:
        return ""
    errors = verb(ranks, "the error of", "the errors of")
    return f"; {errors} {ranks_text(ranks, machines)} followed from that"


def activity_text(process: ProcessActivity | None) -> str:
    """Return what the process does: `` (FROZEN: no context switch in 0.9 s, waits in poll)``."""
    if process is None or process.interval_s is None:
        return ""
    waits = wait_channel_text(process.wait_channel)
    if process.frozen:
        count = process.switches or 0
        switches = "context switch" if count <= 1 else "context switches"
        text = f"FROZEN: {count or 'no'} {switches} in {process.interval_s:.1f} s"
        return f" ({text}, {waits})" if waits else f" ({text})"
    facts = []
    if process.cpu_share is not None and process.cpu_share >= 0.02:
        facts.append(f"CPU {100 * process.cpu_share:.0f} %")
    if process.switches is not None:
        facts.append(f"{process.switches / process.interval_s:.0f} context switches/s")
    if process.written_bytes:
        facts.append(f"writes {process.written_bytes / process.interval_s / 1e6:.0f} MB/s")
    if process.read_bytes:
        facts.append(f"reads {process.read_bytes / process.interval_s / 1e6:.0f} MB/s")
    if process.starved:
        share = process.run_delay_share or 0.0
        facts.append(f"waits for a processor {100 * (share or 1.0):.0f} % of the time")
    return f" (MOVING: {', '.join(facts)})" if facts else ""


def wait_channel_text(channel: str | None) -> str | None:
    """Describe the kernel function in which a thread waits."""
    if not channel:
        return None
    for part, words in (
        ("futex", "futex wait (a lock)"),
        ("nanosleep", "sleeps"),
        ("pipe", "waits at a pipe"),
        ("unix_stream", "waits at a local socket"),
        ("inet", "waits at a network socket"),
        ("sk_wait", "waits at a network socket"),
        ("poll", "waits in poll"),
        ("wait4", "waits for a child process"),
        ("do_wait", "waits for a child process"),
        ("flock", "waits for a file lock"),
        ("posix_lock", "waits for a file lock"),
        ("nfs", "waits for NFS"),
        ("fuse", "waits for a FUSE file system"),
    ):
        if part in channel:
            return words
    return f"waits in {channel}"
