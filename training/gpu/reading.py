"""Reading of one GPU or MIG device at one point in time, as the driver reports it. Pure values.

``state/gpu_values.py`` holds the measurements. ``rank_mapping.py`` determines the owners of the
processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltui.training.state.gpu_values import GpuValues

MIG_INDEX_STRIDE = 100
"""MIG device ``n`` of GPU ``g`` has the index ``(g + 1) * MIG_INDEX_STRIDE + n``."""


def mig_index(gpu: int, number: int) -> int:
    """Return the index of a MIG device, which differs from those of all GPUs."""
    return (gpu + 1) * MIG_INDEX_STRIDE + number


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int
    memory_bytes: int | None = None
    graphics: bool = False
    """True for a display server or similar process that does no computation."""
    visible: bool = True
    """False if this machine's /proc does not show it, because it runs in another container."""
    start_ticks: int | None = None
    user: str | None = None
    name: str | None = None
    run_id: str | None = None
    """``LTUI_RUN_ID`` of its environment, if this is readable."""
    gpu_instance: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """An XID error that the driver reported for a GPU."""

    at: float
    """Unix seconds when the error was read."""
    code: int
    index: int
    """Index of the GPU, or of the MIG device if the driver names one."""
    uuid: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading(GpuValues):
    """All values of one GPU or MIG device."""

    label: str
    """Displayed name: ``3``, or ``3/1`` for MIG device 1 of GPU 3."""
    parent: int | None = None
    """Index of the GPU of a MIG device."""
    gpu_instance: int | None = None
    mig_enabled: bool = False
    """True if MIG is enabled. Work then runs in MIG devices, which have their own readings."""
    processes: tuple[GpuProcess, ...] | None = None
    last_xid: Xid | None = None
