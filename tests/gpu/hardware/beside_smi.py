"""Compare readings with what ``nvidia-smi -q -x`` says at the same time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from msgspec.structs import fields

from ltui.training.gpu.reading import GpuProcess, GpuReading
from ltui.training.state.gpu_values import GpuValues
from tests.gpu.hardware.check import Check, holds

MIB = 1 << 20

# Field of a reading; where nvidia-smi has it, as names changed between branches of the driver; its
# unit in ours; and the difference that two readings at almost the same time may have.
TABLE: tuple[tuple[str, tuple[str, ...], float, float], ...] = (
    ("memory_total_bytes", ("fb_memory_usage/total",), MIB, 2 * MIB),
    ("memory_used_bytes", ("fb_memory_usage/used",), MIB, 64 * MIB),
    ("utilisation_percent", ("utilization/gpu_util",), 1, 20),
    ("memory_utilisation_percent", ("utilization/memory_util",), 1, 20),
    (
        "power_w",
        (
            "gpu_power_readings/average_power_draw",
            "gpu_power_readings/power_draw",
            "gpu_power_readings/instant_power_draw",
            "power_readings/power_draw",
        ),
        1,
        25,
    ),
    (
        "power_limit_w",
        (
            "gpu_power_readings/current_power_limit",
            "power_readings/enforced_power_limit",
            "power_readings/power_limit",
        ),
        1,
        1,
    ),
    ("temperature_c", ("temperature/gpu_temp",), 1, 4),
    ("memory_temperature_c", ("temperature/memory_temp",), 1, 4),
    ("sm_clock_mhz", ("clocks/sm_clock",), 1, 200),
    ("memory_clock_mhz", ("clocks/mem_clock",), 1, 200),
    ("sm_clock_max_mhz", ("max_clocks/sm_clock",), 1, 1),
    ("fan_percent", ("fan_speed",), 1, 5),
    ("performance_state", ("performance_state",), 1, 0),
    ("pcie_generation", ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",), 1, 0),
    ("pcie_generation_max", ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",), 1, 0),
    ("pcie_width", ("pci/pci_gpu_link_info/link_widths/current_link_width",), 1, 0),
    ("pcie_width_max", ("pci/pci_gpu_link_info/link_widths/max_link_width",), 1, 0),
)
_REASONS = {
    "applications_clocks_setting": "clocks set by a user",
    "sw_power_cap": "power cap",
    "sync_boost": "synchronised with slower GPUs",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}
_ELSEWHERE = {
    *("index", "uuid", "name", "sampled_at", "error", "blocked"),
    *("slowdown_temperature_c", "throttle_reasons", "remapped_rows", "retired_pages"),
    *("repair_pending", "repair_failed", "ecc_corrected", "ecc_uncorrected"),
    *("nvlinks", "nvlinks_up"),
}
"""Fields that are compared outside of the table."""
NOT_IN_SMI = frozenset(f.name for f in fields(GpuValues)) - {row[0] for row in TABLE} - _ELSEWHERE
"""Fields without a counterpart in ``nvidia-smi -q -x``: throughput and GPM."""


def number(gpu: Element, *paths: str) -> float | None:
    """Return the first of these entries that is a number, without its unit."""
    for path in paths:
        text = (gpu.findtext(path) or "").strip().split(" ")[0].removesuffix("x").lstrip("P")
        try:
            return float(text)
        except ValueError:
            continue
    return None


def beside_smi(
    readings: Sequence[GpuReading], gpu: Element, links: tuple[int, int] | None
) -> Iterator[Check]:
    """Compare the last of ``readings`` with nvidia-smi's answer.

    The others were taken shortly before. nvidia-smi answered between the first and the last, so its
    value may lie between theirs. ``links``: NVLinks, and how many are up.
    """
    last = readings[-1]
    theirs = (gpu.findtext("product_name") or "").strip()
    yield Check("name", last.name, theirs, last.name == theirs)
    # The UUID itself identifies a machine and is in no report.
    yield holds("uuid", last.uuid == (gpu.findtext("uuid") or "").strip())
    for field, paths, unit, slack in TABLE:
        value = number(gpu, *paths)
        yield _compared(field, readings, None if value is None else value * unit, slack)
    yield _compared("slowdown_temperature_c", readings, _slowdown(gpu), 2)
    yield _compared("remapped_rows", readings, _sum(gpu, "remapped_rows", "_corr", "_unc"), 0)
    yield _compared("retired_pages", readings, _sum(gpu, "retired_pages", "retired_count"), 0)
    yield _flag(last, "repair_pending", gpu, "remapped_row_pending", "pending_retirement")
    yield _flag(last, "repair_failed", gpu, "remapped_row_failure")
    volatile = gpu.find("ecc_errors/volatile")
    for field, correctable in (("ecc_corrected", True), ("ecc_uncorrected", False)):
        yield _compared(field, readings, _ecc(volatile, correctable=correctable), 0)
    for place, field in enumerate(("nvlinks", "nvlinks_up")):
        if links is None:  # it says nothing if no link is active
            yield Check(field, getattr(last, field), "n/a")
        else:
            yield _compared(field, readings, links[place], 0)
    yield _reasons(readings, gpu)


def _compared(
    field: str, readings: Sequence[GpuReading], theirs: float | None, slack: float
) -> Check:
    values = [getattr(reading, field) for reading in readings]
    known = [value for value in values if value is not None]
    ours = values[-1]
    if ours is None and theirs is None:
        return Check(field, None, "n/a")
    if ours is None or theirs is None:
        return Check(field, ours, "n/a" if theirs is None else f"{theirs:g}", False)
    ok = min(known) - slack <= theirs <= max(known) + slack
    return Check(field, ours, f"{theirs:g} +- {slack:g}", ok)


def _slowdown(gpu: Element) -> float | None:
    """Return the temperature of the slowdown. Newer boards say the degrees that are left."""
    now, left, limit = (
        number(gpu, f"temperature/{entry}")
        for entry in ("gpu_temp", "gpu_temp_tlimit", "gpu_temp_slow_tlimit_threshold")
    )
    if now is not None and left is not None and limit is not None:
        return now + left - limit
    return number(gpu, "temperature/gpu_temp_slow_threshold")


def _sum(gpu: Element, block: str, *endings: str) -> float | None:
    """Return the sum of the numbers in a block whose entries end with one of ``endings``."""
    found = gpu.find(block)
    entries = [] if found is None else [e for e in found.iter() if e.tag.endswith(endings)]
    numbers = [value for entry in entries if (value := number(entry, ".")) is not None]
    return sum(numbers) if numbers else None


def _ecc(volatile: Element | None, *, correctable: bool) -> float | None:
    """Return the sum of the volatile errors; GPUs name their parts of memory differently."""
    if volatile is None:
        return None
    old = number(volatile, f"{'single' if correctable else 'double'}_bit/total")
    if old is not None:
        return old
    entries = list(volatile)
    numbers = [
        value
        for entry in entries
        if ("uncorrectable" not in entry.tag) is correctable and "correctable" in entry.tag
        if (value := number(entry, ".")) is not None
    ]
    return sum(numbers) if numbers else None


def _flag(reading: GpuReading, field: str, gpu: Element, *tags: str) -> Check:
    """Compare a yes or no. A GPU with row remapping has no page retirement and the reverse."""
    texts = {(entry.text or "").strip() for tag in tags for entry in gpu.iter(tag)}
    theirs = True if "Yes" in texts else False if "No" in texts else None
    ours = getattr(reading, field)
    expected = {None: "n/a", True: "yes", False: "no"}[theirs]
    return Check(field, ours, expected, None if ours is None is theirs else ours == theirs)


def _reasons(readings: Sequence[GpuReading], gpu: Element) -> Check:
    active = set()
    for block in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for suffix, name in _REASONS.items():
            for entry in (f"{block}/{block}_{suffix}", f"{block}/{block[:-1]}_{suffix}"):
                if (gpu.findtext(entry) or "").strip() == "Active":
                    active.add(name)
    ours = [
        {reason for reason in reading.throttle_reasons if reason in _REASONS.values()}
        for reading in readings
        if reading.throttle_reasons is not None
    ]
    expected = ", ".join(sorted(active)) or "none"
    if not ours:
        return Check("throttle_reasons", None, expected)
    # Reasons come and go many times a second.
    return Check("throttle_reasons", sorted(ours[-1]), expected, active in ours)


def processes_beside_smi(processes: Sequence[GpuProcess], gpu: Element) -> Iterator[Check]:
    """Compare the processes that both name. nvidia-smi leaves out those of other containers."""
    theirs = {
        int(entry.findtext("pid") or 0): number(entry, "used_memory")
        for entry in gpu.iterfind("processes/process_info")
    }
    seen = {process.pid: process for process in processes if process.visible}
    unseen = [process.pid for process in processes if not process.visible]
    yield Check("processes", sorted(seen), _listed(theirs), sorted(seen) == sorted(theirs))
    yield Check("processes that are not visible from here", len(unseen))
    for pid in sorted(seen.keys() & theirs.keys()):
        ours, mib = seen[pid].memory_bytes, theirs[pid]
        off = None if ours is None or mib is None else abs(ours - mib * MIB) > 2 * MIB
        ok = None if ours is None is mib else off is False
        yield Check(f"memory of process {pid}", ours, "n/a" if mib is None else f"{mib:g} MiB", ok)


def _listed(pids: dict[int, float | None]) -> str:
    return ", ".join(map(str, sorted(pids))) or "none"
