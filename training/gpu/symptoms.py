"""What one sample of the GPUs shows to be wrong, before asking for how long. Pure.

Each kind has a threshold at which it is noticed and a looser one down to which it is still held, so
that a value on the edge does not flicker. ``findings.py`` adds the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ltui.training.gpu import throttle_reasons
from ltui.training.gpu.rank_mapping import FOREIGN, RANK, UNSEEN
from ltui.training.gpu.reading import BLOCKED_PREFIX
from ltui.training.gpu.xid_codes import xid_meaning, xid_sentence
from ltui.training.state.run_snapshot import (
    GpuProcessSnapshot,
    GpuSnapshot,
    RankSnapshot,
    RankState,
)

BUSY_PERCENT = 95.0
STILL_BUSY_PERCENT = 90.0
LOW_POWER, STILL_LOW_POWER = 0.25, 0.32
"""Of the power limit. A kernel that spins on a flag leaves a GPU near its idle draw, about a tenth
of the limit on data-centre boards; training draws half and more. The edge between is a choice."""
WORKING_SM_ACTIVITY = 0.5
"""GPM: above this the multiprocessors are plainly at work, whatever the power says."""
FULL, STILL_FULL = 0.97, 0.95
SLOW_CLOCK, STILL_SLOW_CLOCK = 0.85, 0.92
LOADED_PERCENT = 50.0
"""Clocks and links rest when a GPU does; they are compared above this utilisation only."""
XID_SHOWN_S = 600.0

WARNING, ERROR = "warning", "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    kind: str
    gpu: int
    text: str
    """One line; ``{age}`` stands for how long it has been so."""
    starts_finding: bool = True
    """False: between the two thresholds; keeps a finding, begins none."""
    level: str = WARNING
    ranks: tuple[int, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Counters of a GPU when the run first saw it."""

    ecc_uncorrected: int | None = None
    nvlinks_up: int | None = None


def symptoms(
    gpus: Sequence[GpuSnapshot],
    ranks: Mapping[int, RankSnapshot],
    baselines: Mapping[int, Baseline],
    now: float,
) -> Iterator[Symptom]:
    """Everything that this sample shows. ``now`` is unix time."""
    for gpu in gpus:
        if gpu.error is not None:
            if not _explained(gpu, now):
                yield from _unreadable(gpu)
            continue
        yield from _damaged(gpu, baselines.get(gpu.index, Baseline()))
        if gpu.ranks:
            yield from _waiting(gpu, ranks)
            yield from _held_down(gpu)
            yield from _full(gpu)
            yield from _shared(gpu)
            yield from _narrow(gpu)
    yield from _slow_clocks(gpus)
    for gpu in gpus:
        yield from _xid(gpu, now)


# -- kinds -----------------------------------------------------------------------------------------


def _unreadable(gpu: GpuSnapshot) -> Iterator[Symptom]:
    # Those that a hanging call elsewhere holds up are not the trouble themselves.
    if gpu.error is not None and not gpu.error.startswith(BLOCKED_PREFIX):
        yield Symptom(
            kind="unreadable", gpu=gpu.index, text=gpu.error, level=ERROR, ranks=gpu.ranks
        )


def _explained(gpu: GpuSnapshot, now: float) -> bool:
    """Whether an XID that is shown says already why the GPU can't be read."""
    recent = gpu.xid_at is not None and now - gpu.xid_at <= XID_SHOWN_S
    return recent and gpu.xid_code is not None and xid_meaning(gpu.xid_code).unusable


def _waiting(gpu: GpuSnapshot, ranks: Mapping[int, RankSnapshot]) -> Iterator[Symptom]:
    use, power, limit = gpu.utilisation_percent, gpu.power_w, gpu.power_limit_w
    if use is None or power is None or not limit:
        return
    if gpu.sm_activity is not None and gpu.sm_activity > WORKING_SM_ACTIVITY:
        return
    share = power / limit
    if use < STILL_BUSY_PERCENT or share > STILL_LOW_POWER:
        return
    yield Symptom(
        kind="waiting",
        gpu=gpu.index,
        text=f"power {power:.0f} W at {use:.0f} % utilisation for {{age}}: {_why(gpu, ranks)}",
        starts_finding=use >= BUSY_PERCENT and share <= LOW_POWER,
        ranks=gpu.ranks,
        evidence={"power_w": power, "power_limit_w": limit, "utilisation_percent": use},
    )


def _why(gpu: GpuSnapshot, ranks: Mapping[int, RankSnapshot]) -> str:
    """A collective that waits and a stream of tiny kernels look alike here; the ranks tell."""
    states = {ranks[rank].state for rank in gpu.ranks if rank in ranks}
    if not states & {RankState.STALLED, RankState.WAITING}:
        if RankState.OK in states:
            return "little work: small kernels, or short waits between them"
        return "kernels wait or do little work"
    if len(ranks) > 1:
        return "kernels wait in a collective"
    return "a kernel runs that does next to nothing"


def _held_down(gpu: GpuSnapshot) -> Iterator[Symptom]:
    reasons = set(gpu.throttle_reasons or ())
    if reasons & throttle_reasons.THERMAL_REASONS:
        yield Symptom(
            kind="thermal",
            gpu=gpu.index,
            text=f"thermal slowdown for {{age}}{_heat(gpu)}",
            ranks=gpu.ranks,
            evidence={"temperature_c": gpu.temperature_c, "sm_clock_mhz": gpu.sm_clock_mhz},
        )
    if throttle_reasons.POWER_BRAKE in reasons:
        yield Symptom(
            kind="power_brake",
            gpu=gpu.index,
            text="slowed down for {age}: the power supply of the machine limits it (power brake)",
            ranks=gpu.ranks,
        )


def _heat(gpu: GpuSnapshot) -> str:
    if gpu.temperature_c is None:
        return ""
    limit = gpu.slowdown_temperature_c
    return f" ({gpu.temperature_c:.0f} °C" + (f", limit {limit:.0f} °C)" if limit else ")")


def _full(gpu: GpuSnapshot) -> Iterator[Symptom]:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is None or not total or used / total < STILL_FULL:
        return
    yield Symptom(
        kind="memory_full",
        gpu=gpu.index,
        text=f"memory at {100 * used / total:.0f} %",
        starts_finding=used / total >= FULL,
        ranks=gpu.ranks,
        evidence={"memory_used_bytes": used, "memory_total_bytes": total},
    )


def _shared(gpu: GpuSnapshot) -> Iterator[Symptom]:
    processes = gpu.processes or ()
    foreign = [p for p in processes if p.owner == FOREIGN]
    if foreign:
        yield Symptom(
            kind="foreign",
            gpu=gpu.index,
            text=f"used by {_several(foreign)}",
            ranks=gpu.ranks,
            evidence={"pids": [p.pid for p in foreign]},
        )
    # Seen from within a container our own ranks may be among those that can't be seen.
    unseen = [p for p in processes if p.owner == UNSEEN]
    if unseen and any(p.owner == RANK for p in processes):
        yield Symptom(
            kind="unseen",
            gpu=gpu.index,
            text="used by a process that is not visible from here, perhaps in another container",
            ranks=gpu.ranks,
            evidence={"pids": [p.pid for p in unseen]},
        )


def _several(processes: Sequence[GpuProcessSnapshot]) -> str:
    first = processes[0]
    who = [first.name, f"pid {first.pid}", f"user {first.user}" if first.user else None]
    described = ", ".join(part for part in who if part)
    if len(processes) == 1:
        return f"another process ({described})"
    return f"{len(processes)} other processes ({described}, ...)"


def _narrow(gpu: GpuSnapshot) -> Iterator[Symptom]:
    if (gpu.utilisation_percent or 0.0) < LOADED_PERCENT:
        return
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    if width and widest and width < widest:
        yield Symptom(
            kind="pcie_width",
            gpu=gpu.index,
            text=f"PCIe link with {width} of {widest} lanes",
            ranks=gpu.ranks,
        )
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    if generation and newest and generation < newest:
        yield Symptom(
            kind="pcie_generation",
            gpu=gpu.index,
            text=f"PCIe link runs as generation {generation} of {newest}",
            ranks=gpu.ranks,
        )


def _slow_clocks(gpus: Sequence[GpuSnapshot]) -> Iterator[Symptom]:
    """Of GPUs of one model under load: who runs well below the others."""
    loaded = [
        gpu
        for gpu in gpus
        if gpu.ranks
        and gpu.error is None
        and gpu.sm_clock_mhz is not None
        and (gpu.utilisation_percent or 0.0) >= LOADED_PERCENT
    ]
    for gpu in loaded:
        others = [o.sm_clock_mhz or 0.0 for o in loaded if o is not gpu and o.name == gpu.name]
        if not others or gpu.sm_clock_mhz is None:
            continue
        usual = median(others)
        if usual <= 0 or gpu.sm_clock_mhz / usual > STILL_SLOW_CLOCK:
            continue
        ratio = gpu.sm_clock_mhz / usual
        cause = f": {', '.join(gpu.throttle_reasons)}" if gpu.throttle_reasons else ""
        who = ", ".join(str(rank) for rank in gpu.ranks)
        yield Symptom(
            kind="slow_clock",
            gpu=gpu.index,
            text=f"the GPU clock of rank {who} is {100 * (1 - ratio):.0f} % lower than the"
            f" others' ({gpu.sm_clock_mhz:.0f} of {usual:.0f} MHz){cause}",
            starts_finding=ratio <= SLOW_CLOCK,
            ranks=gpu.ranks,
            evidence={"sm_clock_mhz": gpu.sm_clock_mhz, "others_mhz": usual},
        )


def _damaged(gpu: GpuSnapshot, before: Baseline) -> Iterator[Symptom]:
    errors, then = gpu.ecc_uncorrected, before.ecc_uncorrected
    if errors is not None and then is not None and errors > then:
        new = errors - then
        yield Symptom(
            kind="ecc",
            gpu=gpu.index,
            text=f"{new} uncorrected memory {'error' if new == 1 else 'errors'} during the run",
            level=ERROR,
            ranks=gpu.ranks,
        )
    if gpu.repair_failed:
        yield Symptom(
            kind="repair",
            gpu=gpu.index,
            text="faulty memory could not be retired: replace the GPU",
            level=ERROR,
            ranks=gpu.ranks,
        )
    elif gpu.repair_pending:
        yield Symptom(
            kind="repair",
            gpu=gpu.index,
            text="faulty memory is retired only after a reset of the GPU",
            ranks=gpu.ranks,
        )
    up, usual = gpu.nvlinks_up, before.nvlinks_up
    if up is not None and usual is not None and up < usual:
        yield Symptom(
            kind="nvlink",
            gpu=gpu.index,
            text=f"{usual - up} of {usual} NVLinks went down",
            level=ERROR,
            ranks=gpu.ranks,
        )


def _xid(gpu: GpuSnapshot, now: float) -> Iterator[Symptom]:
    code, at = gpu.xid_code, gpu.xid_at
    if code is None or at is None or now - at > XID_SHOWN_S:
        return
    yield Symptom(
        kind="xid",
        gpu=gpu.index,
        text=f"{xid_sentence(code)} ({{age}} ago)",
        level=ERROR if xid_meaning(code).unusable else WARNING,
        ranks=gpu.ranks,
        evidence={"xid": code, "at": at},
    )
