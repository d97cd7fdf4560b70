"""On a machine with an NVIDIA GPU: are the readings true?

    python tests/gpu/hardware/check_readings.py [--json FILE] [--gpu 0] [--only smi]

Compares every reading with ``nvidia-smi -q -x``, then runs kernels whose effect is known and looks
whether the readings show it: a large bf16 matrix product must keep the tensor cores busy, a large
copy the memory, and a kernel that only spins must draw little power at full utilisation, which is
what a hung collective looks like. Prints a table, writes the figures, exits with 1 if one is off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ltui.training.gpu.rank_mapping import RankLocation, map_ranks, normalize_uuid
from ltui.training.gpu.reading import GpuReading
from ltui.training.gpu.sampler import NO_DRIVER, NO_GPU, GpuSampler
from ltui.training.gpu.symptoms import LOW_POWER

MIB = 1 << 20
KERNEL_S = 6.0
"""How long each kernel runs: several samples, and longer than the driver averages power (1 s)."""


@dataclass
class Check:
    what: str
    ltui: Any
    expected: str
    ok: bool | None
    """None: neither side tells it; nothing was checked."""


# -- beside nvidia-smi -----------------------------------------------------------------------------


def smi() -> ElementTree.Element:
    done = subprocess.run(
        ["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=60, check=True
    )
    return ElementTree.fromstring(done.stdout)


def number(gpu: ElementTree.Element, *paths: str) -> float | None:
    """The first of these entries that holds a number; units are cut off."""
    for path in paths:
        text = (gpu.findtext(path) or "").strip().split(" ")[0].removesuffix("x").lstrip("P")
        try:
            return float(text)
        except ValueError:
            continue
    return None


# Reading, where nvidia-smi has it (names changed between driver branches), its unit in ours, and
# how far two looks a moment apart may lie from each other.
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
    "sw_power_cap": "power cap",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}


def beside_smi(reading: GpuReading, gpu: ElementTree.Element) -> list[Check]:
    checks = [
        Check("name", reading.name, gpu.findtext("product_name") or "", None),
        Check("uuid", reading.uuid, gpu.findtext("uuid") or "", None),
    ]
    for check in checks:
        check.ok = check.ltui == check.expected
    for field, paths, unit, slack in TABLE:
        ours, theirs = getattr(reading, field), number(gpu, *paths)
        if ours is None and theirs is None:
            checks.append(Check(field, None, "n/a", None))
        elif ours is None or theirs is None:
            checks.append(Check(field, ours, f"{theirs}", False))
        else:
            off = abs(ours - theirs * unit)
            checks.append(Check(field, ours, f"{theirs * unit:g} +- {slack:g}", off <= slack))
    return [*checks, _reasons(reading, gpu), _slowdown(reading, gpu), _remapped(reading, gpu)]


def _slowdown(reading: GpuReading, gpu: ElementTree.Element) -> Check:
    """Older boards name the temperature, newer ones the degrees that are left until it."""
    theirs = number(gpu, "temperature/gpu_temp_slow_threshold")
    now, left, limit = (
        number(gpu, f"temperature/{entry}")
        for entry in ("gpu_temp", "gpu_temp_tlimit", "gpu_temp_slow_tlimit_threshold")
    )
    if theirs is None and now is not None and left is not None and limit is not None:
        theirs = now + left - limit
    ours = reading.slowdown_temperature_c
    if ours is None or theirs is None:
        return Check("slowdown_temperature_c", ours, f"{theirs}", None if ours == theirs else False)
    return Check("slowdown_temperature_c", ours, f"{theirs:g} +- 2", abs(ours - theirs) <= 2)


def _remapped(reading: GpuReading, gpu: ElementTree.Element) -> Check:
    rows = [number(gpu, f"remapped_rows/remapped_row_{kind}") for kind in ("corr", "unc")]
    theirs = None if rows[0] is None or rows[1] is None else int(rows[0] + rows[1])
    ours = reading.remapped_rows
    return Check("remapped_rows", ours, f"{theirs}", None if ours is None else ours == theirs)


def _reasons(reading: GpuReading, gpu: ElementTree.Element) -> Check:
    active = set()
    for block in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for suffix, word in _REASONS.items():
            for entry in (f"{block}/{block}_{suffix}", f"{block}/{block[:-1]}_{suffix}"):
                if (gpu.findtext(entry) or "").strip() == "Active":
                    active.add(word)
    ours = {word for word in reading.throttle_reasons or () if word in _REASONS.values()}
    ok = None if reading.throttle_reasons is None else ours == active
    return Check("throttle_reasons", sorted(ours), str(sorted(active)), ok)


# -- beside kernels --------------------------------------------------------------------------------


def during(
    sampler: GpuSampler, index: int, work: Callable[[], None], wait: Callable[[], None]
) -> GpuReading:
    """The last reading taken while ``work``, called again and again, keeps the GPU busy."""
    ends = time.monotonic() + KERNEL_S
    while time.monotonic() < ends:
        work()
        wait()
    reading = next(r for r in sampler.latest().readings if r.index == index)
    wait()
    return reading


def beside_kernels(sampler: GpuSampler, ordinal: int) -> list[Check]:
    import torch  # Only this half needs it.

    device = torch.device("cuda", ordinal)
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    torch.zeros(1, device=device)
    place = RankLocation(rank=0, pid=os.getpid(), device=f"cuda:{ordinal}", gpu_uuid=uuid or None)
    time.sleep(2.5)
    readings = sampler.latest().readings
    ranks = map_ranks(readings, [place])
    checks = [
        Check("torch's UUID leads to a GPU", ranks.gpu_of.get(0), str(uuid), not ranks.unknown)
    ]
    if ranks.unknown:
        return checks
    index = ranks.gpu_of[0]
    found = next(r for r in readings if r.index == index)
    checks.append(
        Check(
            "its UUID", found.uuid, uuid, normalize_uuid(found.uuid or "") == normalize_uuid(uuid)
        )
    )
    pids = [p.pid for p in found.processes or () if p.visible]
    # In a container the driver may name processes by the host's numbers.
    checks.append(
        Check("this process is listed", pids, str(os.getpid()), os.getpid() in pids or None)
    )

    def wait() -> None:
        torch.cuda.synchronize(device)

    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def products() -> None:
        for _ in range(20):
            a @ a

    def copies() -> None:
        for _ in range(50):
            target.copy_(source)

    def spin() -> None:
        torch.cuda._sleep(500_000_000)

    product = during(sampler, index, products, wait)
    copy = during(sampler, index, copies, wait)
    spinning = during(sampler, index, spin, wait)
    wait()
    time.sleep(4.0)
    idle = next(r for r in sampler.latest().readings if r.index == index)
    return [*checks, *_kernel_checks(product, copy, spinning, idle)]


def _kernel_checks(
    product: GpuReading, copy: GpuReading, spinning: GpuReading, idle: GpuReading
) -> list[Check]:
    checks = [
        _above("product: utilisation", product.utilisation_percent, 90),
        _above("copy: utilisation", copy.utilisation_percent, 90),
        _above("spin: utilisation", spinning.utilisation_percent, 90),
        _below("idle: utilisation", idle.utilisation_percent, 10),
        _above("product: power share", _share(product), 0.5),
        _below("spin: power share", _share(spinning), LOW_POWER),
    ]
    if product.sm_activity is None:
        return [*checks, Check("GPM", None, "not offered by this GPU", None)]
    return [
        *checks,
        _above("product: tensor activity", product.tensor_activity, 0.4),
        _above("product: SM activity", product.sm_activity, 0.8),
        _below("copy: tensor activity", copy.tensor_activity, 0.05),
        _above("copy: DRAM activity", copy.dram_activity, 0.6),
        _below("spin: SM activity", spinning.sm_activity, 0.1),
        _below("spin: DRAM activity", spinning.dram_activity, 0.1),
        _below("idle: SM activity", idle.sm_activity, 0.05),
    ]


def _share(reading: GpuReading) -> float | None:
    if reading.power_w is None or not reading.power_limit_w:
        return None
    return reading.power_w / reading.power_limit_w


def _above(what: str, value: float | None, bound: float) -> Check:
    return Check(what, value, f"> {bound:g}", None if value is None else value > bound)


def _below(what: str, value: float | None, bound: float) -> Check:
    return Check(what, value, f"< {bound:g}", None if value is None else value < bound)


# -- what it costs ---------------------------------------------------------------------------------


def cost(sampler: GpuSampler) -> list[Check]:
    """Processor time of the sampler on the real driver; this thread sleeps meanwhile."""
    before, at = time.process_time(), time.monotonic()
    calls = sampler._client.calls
    time.sleep(10.0)
    span = time.monotonic() - at
    share = 100 * (time.process_time() - before) / span
    rate = (sampler._client.calls - calls) / span
    return [
        Check("sampler: % of a core", share, "< 2", share < 2.0),
        Check("sampler: driver calls a second", rate, "(for information)", None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--gpu", type=int, default=0, help="torch's number of the GPU for kernels")
    parser.add_argument("--only", choices=("smi", "kernels", "cost"), help="one part of it")
    options = parser.parse_args()
    sampler = GpuSampler()
    deadline = time.monotonic() + 60
    while not (view := sampler.latest()).readings and time.monotonic() < deadline:
        if view.note in (NO_DRIVER, NO_GPU):
            break
        time.sleep(0.1)
    if not view.readings:
        print(f"no GPU: {view.note}", file=sys.stderr)
        return 2
    time.sleep(2.5)
    return _report(options, sampler)


def _report(options: argparse.Namespace, sampler: GpuSampler) -> int:
    parts = (options.only,) if options.only else ("smi", "kernels", "cost")
    checks: dict[str, list[Check]] = {"cost": cost(sampler)} if "cost" in parts else {}
    document = smi()
    for reading in sampler.latest().readings if "smi" in parts else ():
        for gpu in document.findall("gpu"):
            if gpu.findtext("uuid") == reading.uuid:
                checks[f"GPU {reading.label} beside nvidia-smi"] = beside_smi(reading, gpu)
    if "kernels" in parts:
        checks[f"kernels on cuda:{options.gpu}"] = beside_kernels(sampler, options.gpu)
    last = [asdict(reading) for reading in sampler.latest().readings]
    sampler.stop(5.0)
    for title, found in checks.items():
        print(f"\n{title}")
        for check in found:
            mark = {True: "ok", False: "OFF", None: "-"}[check.ok]
            print(f"  {mark:4} {check.what:34} {check.ltui!s:40} {check.expected}")
    if options.json is not None:
        figures = {
            "host": platform.platform(),
            "driver": document.findtext("driver_version"),
            "checks": {title: [asdict(c) for c in found] for title, found in checks.items()},
            "readings": last,
        }
        options.json.write_text(json.dumps(figures, indent=1, default=str))
    return int(any(check.ok is False for found in checks.values() for check in found))


if __name__ == "__main__":
    sys.exit(main())
