"""Symptoms of problems in one sample of the GPUs, regardless of their duration. Pure.

Each kind has a threshold at which it starts and a looser one at which it ends, so that a value near
the threshold does not flicker. ``findings.py`` adds the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import Struct, field

from ltui.training.gpu.reading import (
    FOREIGN,
    POWER_BRAKE,
    RANK,
    THERMAL_REASONS,
    UNSEEN,
    xid_meaning,
    xid_sentence,
)
from ltui.training.state.run_snapshot import (
    GpuProcessSnapshot,
    GpuSnapshot,
    RankSnapshot,
    RankState,
)

BUSY_PERCENT = 95.0
"""Utilisation from which a GPU with low power draw counts as waiting."""
STILL_BUSY_PERCENT = 90.0
LOW_POWER, STILL_LOW_POWER = 0.25, 0.32
"""Low power draw as a fraction of the power limit.

A kernel that spins on a flag leaves a GPU near its idle draw, which is about a tenth of the limit
on data-centre boards. Training draws half of the limit or more. The threshold between is a choice.
"""
WORKING_SM_ACTIVITY = 0.5
"""GPM: SM activity above which a GPU is working, regardless of its power draw."""
FULL, STILL_FULL = 0.97, 0.95
"""Fraction of the memory in use from which it is reported as full."""
SLOW_CLOCK, STILL_SLOW_CLOCK = 0.85, 0.92
"""Clock as a fraction of the median of the other GPUs."""
LOADED_PERCENT = 50.0
"""Utilisation from which clocks and links are compared. An idle GPU reduces them."""
XID_SHOWN_S = 600.0
"""Seconds to show an XID error after it was read."""

WARNING, ERROR = "warning", "error"


class Symptom(Struct, frozen=True):
    """A sign of a problem in one sample of a GPU."""

    kind: str
    gpu: GpuSnapshot
    text: str
    """One line; ``{age}`` stands for how long it has been so."""
    starts_finding: bool = True
    """False between the two thresholds: the symptom keeps a finding but does not start one."""
    level: str = WARNING
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Baseline(Struct, frozen=True):
    """Counters of a GPU at its first sample in the run."""

    ecc_uncorrected: int | None = None
    nvlinks_up: int | None = None


def symptoms(
    gpus: Sequence[GpuSnapshot],
    ranks: Mapping[int, RankSnapshot],
    baselines: Mapping[int, Baseline],
    now: float,
) -> Iterator[Symptom]:
    """Yield all symptoms in a sample. ``now`` is in unix seconds."""
    for gpu in gpus:
        if gpu.error is not None:
            # GPUs that are only blocked by a call for another GPU are not the cause.
            if not gpu.blocked and not _explained_by_xid(gpu, now):
                yield Symptom("unreadable", gpu, gpu.error, level=ERROR)
            continue
        yield from _hardware_errors(gpu, baselines.get(gpu.index, Baseline()))
        if gpu.ranks:
            yield from _low_power(gpu, ranks)
            yield from _throttled(gpu)
            yield from _memory_full(gpu)
            yield from _shared(gpu)
            yield from _slow_link(gpu)
    yield from _slow_clocks(gpus)
    for gpu in gpus:
        yield from _xid(gpu, now)


# -- kinds -----------------------------------------------------------------------------------------


def _explained_by_xid(gpu: GpuSnapshot, now: float) -> bool:
    """Return True if a shown XID error already explains why the GPU can't be read."""
    recent = gpu.xid_at is not None and now - gpu.xid_at <= XID_SHOWN_S
    return recent and gpu.xid_code is not None and xid_meaning(gpu.xid_code).unusable


def _low_power(gpu: GpuSnapshot, ranks: Mapping[int, RankSnapshot]) -> Iterator[Symptom]:
    use, power, limit = gpu.utilisation_percent, gpu.power_w, gpu.power_limit_w
    if use is None or power is None or not limit:
        return
    if gpu.sm_activity is not None and gpu.sm_activity > WORKING_SM_ACTIVITY:
        return
    share = power / limit
    if use < STILL_BUSY_PERCENT or share > STILL_LOW_POWER:
        return
    cause = _low_power_cause(gpu, ranks)
    yield Symptom(
        "waiting",
        gpu,
        f"power {power:.0f} W at {use:.0f} % utilisation for {{age}}: {cause}",
        starts_finding=use >= BUSY_PERCENT and share <= LOW_POWER,
        evidence={"power_w": power, "power_limit_w": limit, "utilisation_percent": use},
    )


def _low_power_cause(gpu: GpuSnapshot, ranks: Mapping[int, RankSnapshot]) -> str:
    """Return the cause of a low power draw.

    A waiting collective and a stream of tiny kernels give the same readings. The states of the
    ranks distinguish them.
    """
    states = {ranks[rank].state for rank in gpu.ranks if rank in ranks}
    if not states & {RankState.STALLED, RankState.WAITING}:
        if RankState.OK in states:
            return "little work: small kernels, or short waits between them"
        return "kernels wait or do little work"
    if len(ranks) > 1:
        return "kernels wait in a collective"
    return "a kernel runs that does next to nothing"


def _throttled(gpu: GpuSnapshot) -> Iterator[Symptom]:
    reasons = set(gpu.throttle_reasons or ())
    if reasons & THERMAL_REASONS:
        yield Symptom(
            "thermal",
            gpu,
            f"thermal slowdown for {{age}}{_temperature_text(gpu)}",
            evidence={"temperature_c": gpu.temperature_c, "sm_clock_mhz": gpu.sm_clock_mhz},
        )
    if POWER_BRAKE in reasons:
        yield Symptom(
            "power_brake",
            gpu,
            "slowed down for {age}: the power supply of the machine limits it (power brake)",
        )


def _temperature_text(gpu: GpuSnapshot) -> str:
    if gpu.temperature_c is None:
        return ""
    limit = gpu.slowdown_temperature_c
    return f" ({gpu.temperature_c:.0f} °C" + (f", limit {limit:.0f} °C)" if limit else ")")


def _memory_full(gpu: GpuSnapshot) -> Iterator[Symptom]:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    if used is None or not total or used / total < STILL_FULL:
        return
    yield Symptom(
        "memory_full",
        gpu,
        f"memory at {100 * used / total:.0f} %",
        starts_finding=used / total >= FULL,
        evidence={"memory_used_bytes": used, "memory_total_bytes": total},
    )


def _shared(gpu: GpuSnapshot) -> Iterator[Symptom]:
    processes = gpu.processes or ()
    foreign = [p for p in processes if p.owner == FOREIGN]
    if foreign:
        yield Symptom(
            "foreign",
            gpu,
            f"used by {_process_text(foreign)}",
            evidence={"pids": [p.pid for p in foreign]},
        )
    # Inside a container, the run's own ranks may be among the processes that are not visible.
    unseen = [p for p in processes if p.owner == UNSEEN]
    if unseen and any(p.owner == RANK for p in processes):
        yield Symptom(
            "unseen",
            gpu,
            "used by a process that is not visible from here, perhaps in another container",
            evidence={"pids": [p.pid for p in unseen]},
        )


def _process_text(processes: Sequence[GpuProcessSnapshot]) -> str:
    first = processes[0]
    parts = [first.name, f"pid {first.pid}", f"user {first.user}" if first.user else None]
    described = ", ".join(part for part in parts if part)
    if len(processes) == 1:
        return f"another process ({described})"
    return f"{len(processes)} other processes ({described}, ...)"


def _slow_link(gpu: GpuSnapshot) -> Iterator[Symptom]:
    if (gpu.utilisation_percent or 0.0) < LOADED_PERCENT:
        return
    width, widest = gpu.pcie_width, gpu.pcie_width_max
    if width and widest and width < widest:
        yield Symptom("pcie_width", gpu, f"PCIe link with {width} of {widest} lanes")
    generation, newest = gpu.pcie_generation, gpu.pcie_generation_max
    if generation and newest and generation < newest:
        yield Symptom(
            "pcie_generation", gpu, f"PCIe link runs as generation {generation} of {newest}"
        )


def _slow_clocks(gpus: Sequence[GpuSnapshot]) -> Iterator[Symptom]:
    """Yield the GPUs under load with a much lower clock than the others of the same model."""
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
        rank_text = ", ".join(str(rank) for rank in gpu.ranks)
        yield Symptom(
            "slow_clock",
            gpu,
            f"the GPU clock of rank {rank_text} is {100 * (1 - ratio):.0f} % lower than the"
            f" others' ({gpu.sm_clock_mhz:.0f} of {usual:.0f} MHz){cause}",
            starts_finding=ratio <= SLOW_CLOCK,
            evidence={"sm_clock_mhz": gpu.sm_clock_mhz, "others_mhz": usual},
        )


def _hardware_errors(gpu: GpuSnapshot, before: Baseline) -> Iterator[Symptom]:
    errors, then = gpu.ecc_uncorrected, before.ecc_uncorrected
    if errors is not None and then is not None and errors > then:
        new = errors - then
        yield Symptom(
            "ecc",
            gpu,
            f"{new} uncorrected memory {'error' if new == 1 else 'errors'} during the run",
            level=ERROR,
        )
    if gpu.repair_failed:
        yield Symptom(
            "repair", gpu, "faulty memory could not be retired: replace the GPU", level=ERROR
        )
    elif gpu.repair_pending:
        yield Symptom("repair", gpu, "faulty memory is retired only after a reset of the GPU")
    links_up, usual = gpu.nvlinks_up, before.nvlinks_up
    if links_up is not None and usual is not None and links_up < usual:
        yield Symptom(
            "nvlink", gpu, f"{usual - links_up} of {usual} NVLinks went down", level=ERROR
        )


def _xid(gpu: GpuSnapshot, now: float) -> Iterator[Symptom]:
    code, at = gpu.xid_code, gpu.xid_at
    if code is None or at is None or now - at > XID_SHOWN_S:
        return
    yield Symptom(
        "xid",
        gpu,
        f"{xid_sentence(code)} ({{age}} ago)",
        level=ERROR if xid_meaning(code).unusable else WARNING,
        evidence={"xid": code, "at": at},
    )
