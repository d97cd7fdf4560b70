"""Selection of free GPUs (``free:2``). Pure.

A GPU is free if no visible process computes on it and its memory is almost unused. A process in
another container is visible only by its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltui.training.gpu.reading import GpuReading
from ltui.training.problem import ProblemError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
"""Environment variables that select GPUs and their order."""
IDLE_MEMORY_FRACTION = 0.05
IDLE_MEMORY_BYTES = 1 << 30
"""An idle driver and a display use up to the smaller of these two amounts of memory."""


def usable_gpus(readings: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the devices that a run can use: GPUs without MIG, and MIG devices."""
    return tuple(reading for reading in readings if not reading.mig_enabled)


def busy_reason(reading: GpuReading) -> str | None:
    """Return why a GPU is not free; None if it seems to be free."""
    if reading.error is not None:
        return reading.error
    computing = [process for process in reading.processes or () if not process.graphics]
    if computing:
        first = computing[0]
        owner = f"user {first.user}" if first.user else "not visible from here"
        more = f" and {len(computing) - 1} more" if len(computing) > 1 else ""
        return f"used by pid {first.pid} ({owner}){more}"
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    if used is None or total is None:
        return "the driver does not report its memory"
    if used > min(IDLE_MEMORY_BYTES, IDLE_MEMORY_FRACTION * total) and not reading.processes:
        return f"{used / 2**30:.1f} GiB of its memory are used by processes that are not visible"
    return None


def free_gpus(readings: Sequence[GpuReading]) -> list[GpuReading]:
    """Return the free GPUs, sorted by free memory (most first), then by index."""
    free = [reading for reading in usable_gpus(readings) if busy_reason(reading) is None]
    return sorted(free, key=lambda r: (-_free_bytes(r), r.index))


def _free_bytes(reading: GpuReading) -> int:
    return (reading.memory_total_bytes or 0) - (reading.memory_used_bytes or 0)


def select_gpus(number: int, readings: Sequence[GpuReading]) -> list[GpuReading] | str:
    """Return ``number`` GPUs, those with the most free memory, or the reason to wait.

    Raises ``ProblemError`` if the request can never be satisfied.
    """
    candidates = usable_gpus(readings)
    if number > len(candidates):
        text = f"{number} GPUs are requested, but there are {len(candidates)}."
        remedy = "Give a count (2), a list (0,2), auto, or free:2 for two free GPUs."
        if not candidates:
            text = "there is no GPU on this machine."
            remedy = "Choose trainer.accelerator=cpu."
        raise ProblemError.of(where="trainer.devices", what=text, remedy=remedy)
    free = free_gpus(candidates)
    if len(free) >= number:
        return free[:number]
    busy = [f"GPU {r.label}: {reason}" for r in candidates if (reason := busy_reason(r))]
    return f"{len(free)} of the {number} GPUs are free; {'; '.join(busy)}"


def visible_variables(chosen: Sequence[GpuReading]) -> dict[str, str]:
    """Return the environment variables that make exactly these GPUs visible to CUDA."""
    uuids = [reading.uuid for reading in chosen if reading.uuid is not None]
    if len(uuids) == len(chosen):
        return {VISIBLE: ",".join(uuids)}
    # Without UUIDs the indices count, which are those of CUDA only in the order of the bus.
    return {VISIBLE: ",".join(str(r.index) for r in chosen), ORDER: "PCI_BUS_ID"}
