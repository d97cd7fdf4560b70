"""One GPU (or MIG slice) at one moment, as the driver told it. Pure values.

A reading that the driver refuses, or that has not been taken yet, is ``None``: never zero. Shares
are 0 to 1, percentages keep the driver's 0 to 100. Whose a process is, ``mapping.py`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCKED_PREFIX = "not read since"
"""How the error of a GPU begins that can't be read because the driver hangs at another one."""

MIG_INDEX_STRIDE = 100
"""A MIG slice ``n`` of GPU ``g`` has the index ``(g + 1) * MIG_INDEX_STRIDE + n``."""


def mig_index(gpu: int, number: int) -> int:
    """The index that stands for a MIG slice, apart from those of whole GPUs."""
    return (gpu + 1) * MIG_INDEX_STRIDE + number


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    memory_bytes: int | None = None
    graphics: bool = False
    """A display server or the like, not a computation."""
    visible: bool = True
    """False: this machine's /proc doesn't show it; it runs in another container."""
    start_ticks: int | None = None
    user: str | None = None
    name: str | None = None
    run_id: str | None = None
    """``LTUI_RUN_ID`` in its environment, where that may be read."""
    gpu_instance: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """An error that the driver reported about a GPU."""

    at: float
    """Unix seconds when it was read."""
    code: int
    index: int
    """Of the GPU, or of the MIG slice where the driver names one."""
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    index: int
    """NVML's index (PCI order); for a MIG slice see ``mig_index``."""
    label: str
    """For people: ``3``, or ``3/1`` for slice 1 of GPU 3."""
    uuid: str | None = None
    name: str | None = None
    parent: int | None = None
    """Of a MIG slice: the index of its GPU."""
    gpu_instance: int | None = None
    mig_enabled: bool = False
    """MIG is on: work runs in slices, which have readings of their own."""
    sampled_at: float | None = None
    """Unix seconds."""
    error: str | None = None
    """Why nothing is known: ``fell off the bus``; the rest is then what was last known, or None."""

    utilisation_percent: float | None = None
    """Share of the time in which some kernel ran, however small."""
    memory_utilisation_percent: float | None = None
    """Share of the time in which the memory was read or written."""
    memory_used_bytes: int | None = None
    """Without what the driver keeps for itself."""
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    slowdown_temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """In words (``throttle.py``); empty: runs unhindered."""
    fan_percent: float | None = None
    performance_state: int | None = None
    """0 (fastest) to 15."""

    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_tx_bytes_per_s: float | None = None
    """From the GPU."""
    pcie_rx_bytes_per_s: float | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_errors: int | None = None
    """CRC errors, replays and recoveries since the driver was loaded."""

    ecc_corrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected: int | None = None
    ecc_corrected_ever: int | None = None
    ecc_uncorrected_ever: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    repair_pending: bool | None = None
    """Pages or rows wait for a reset of the GPU to be taken out of use."""
    repair_failed: bool | None = None

    sm_activity: float | None = None
    """GPM: share of SM cycles with a warp resident, 0 to 1."""
    sm_occupancy: float | None = None
    """GPM: warps resident over those possible, 0 to 1."""
    tensor_activity: float | None = None
    """GPM: share of cycles in which tensor cores worked, 0 to 1."""
    dram_activity: float | None = None
    """GPM: memory bandwidth used over that possible, 0 to 1."""

    processes: tuple[GpuProcess, ...] | None = None
    last_xid: Xid | None = None
