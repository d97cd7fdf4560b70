"""Values of one GPU or MIG device that readings and snapshots have in common. Pure.

A value that the driver refuses, or that has not been read yet, is ``None``, never zero. Fractions
are 0 to 1, percentages 0 to 100 as in the driver. Field names are stored in runs and must not
change.
"""

from __future__ import annotations

from msgspec import Struct

GPU_READINGS = (
    "utilisation_percent", "memory_utilisation_percent", "memory_used_bytes", "power_w",
    "temperature_c", "sm_clock_mhz", "sm_activity", "tensor_activity", "dram_activity",
)  # fmt: skip
"""Fields of ``GpuValues`` that the history keeps: columns of its table and of the charts. A history
that was begun without one of them has no values of it."""


class GpuValues(Struct, frozen=True, kw_only=True):
    """The values of one GPU or MIG device at one point in time."""

    index: int
    """NVML's index (PCI order); for a MIG device see ``gpu/reading.py``."""
    uuid: str | None = None
    name: str | None = None
    sampled_at: float | None = None
    """Unix seconds."""
    error: str | None = None
    """Reason why the GPU can't be read, such as ``fell off the bus``.

    The other fields are then the last values read, or None.
    """
    blocked: bool | None = None
    """True if ``error`` is only that a driver call for another GPU hangs."""

    utilisation_percent: float | None = None
    """Percent of the time in which any kernel ran, even a small one."""
    memory_utilisation_percent: float | None = None
    """Percent of the time in which the memory was read or written."""
    memory_used_bytes: int | None = None
    """Memory in use, without the memory that the driver reserves."""
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
    """Names as in ``gpu/reading.py``; empty if the clocks are not limited."""
    fan_percent: float | None = None
    performance_state: int | None = None
    """0 (fastest) to 15."""

    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_tx_bytes_per_s: float | None = None
    """From the GPU to the host."""
    pcie_rx_bytes_per_s: float | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_errors: int | None = None
    """CRC errors, replays and recoveries since the driver was loaded."""

    ecc_corrected: int | None = None
    """Number of errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    repair_pending: bool | None = None
    """True if faulty pages or rows are retired only after a reset of the GPU."""
    repair_failed: bool | None = None

    sm_activity: float | None = None
    """GPM: fraction of SM cycles with a resident warp, 0 to 1."""
    sm_occupancy: float | None = None
    """GPM: resident warps divided by the maximum, 0 to 1."""
    tensor_activity: float | None = None
    """GPM: fraction of cycles in which tensor cores were active, 0 to 1."""
    dram_activity: float | None = None
    """GPM: used memory bandwidth divided by the maximum, 0 to 1."""
