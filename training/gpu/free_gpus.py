"""Selection of GPUs for ``devices``: a count, a list, or a number of free GPUs (``free:2``). Pure.

A GPU is free if no visible process computes on it and its memory is almost unused. A process in
another container is visible only by its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ltui.training.gpu.reading import GpuReading
from ltui.training.problem import Problem, ProblemError

DEVICES_KEY = "trainer.devices"
"""Key of the configuration to name in a problem."""
IDLE_MEMORY_FRACTION = 0.05
IDLE_MEMORY_BYTES = 1 << 30
"""An idle driver and a display use up to the smaller of these two amounts of memory."""


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """A number of devices, chosen by Lightning."""

    number: int


@dataclass(frozen=True, slots=True)
class AllDevices:
    """All devices: ``auto`` or -1."""


@dataclass(frozen=True, slots=True)
class NamedDevices:
    """Particular GPUs: indices of the driver, or UUIDs."""

    names: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class FreeDevices:
    """A number of free GPUs, those with the most free memory."""

    number: int


DeviceRequest = DeviceCount | AllDevices | NamedDevices | FreeDevices


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSelection:
    """GPUs to run on. ``visible`` is the ``CUDA_VISIBLE_DEVICES`` that selects exactly these."""

    indices: tuple[int, ...]
    visible: str
    by_index: bool = False
    """True if ``visible`` has indices, because a UUID is missing.

    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` must then be set as well.
    """


@dataclass(frozen=True, slots=True)
class GpusBusy:
    """The GPUs are in use; the run can wait for them in the queue."""

    reason: str


# -- parsing a request -----------------------------------------------------------------------------


def parse_devices(value: object, where: str = DEVICES_KEY) -> DeviceRequest:
    """Parse a value of ``devices``.

    Accepted are ``2``, ``"2"``, ``-1``, ``"auto"``, ``[0, 2]``, ``"0,2"``, ``"0-3"``, ``"free:2"``
    and UUIDs. As in Lightning, a single number is a count, and ``"2,"`` or ``[2]`` is GPU 2. Raises
    ``ProblemError``.
    """
    if isinstance(value, bool) or value is None:
        raise _problem(where, f"{value!r} is not a valid selection of devices.")
    if isinstance(value, int):
        return _parse_count(value, where)
    if isinstance(value, (list, tuple)):
        return _parse_list([str(item) for item in value], where)
    text = str(value).strip()
    if text in ("auto", "-1"):
        return AllDevices()
    if text.startswith("free"):
        return _parse_free(text, where)
    if text.startswith("[") and text.endswith("]"):
        return _parse_list(text[1:-1].split(","), where)
    if text.lstrip("+-").isdigit():
        return _parse_count(int(text), where)
    return _parse_list(text.split(","), where)


def _problem(where: str, text: str, remedy: str | None = None) -> ProblemError:
    default_remedy = "Give a count (2), a list (0,2), auto, or free:2 for two free GPUs."
    return ProblemError(Problem(where=where, what=text, remedy=remedy or default_remedy))


def _parse_count(number: int, where: str) -> DeviceRequest:
    if number == -1:
        return AllDevices()
    if number < 1:
        raise _problem(where, f"{number} is not a valid number of devices; it must be at least 1.")
    return DeviceCount(number)


def _parse_free(text: str, where: str) -> FreeDevices:
    word, _, number = text.partition(":")
    if word != "free" or (number and not number.isdigit()) or text.endswith(":"):
        raise _problem(where, f"{text!r} is not a valid number of free GPUs.")
    count = int(number or 1)
    if count < 1:
        raise _problem(where, "free:0 requests no GPU.")
    return FreeDevices(count)


def _parse_list(items: Sequence[str], where: str) -> NamedDevices:
    names: list[int | str] = []
    for item in (item.strip() for item in items):
        first, dash, last = item.partition("-")
        if item.isdigit():
            names.append(int(item))
        elif dash and first.isdigit() and last.isdigit() and int(first) <= int(last):
            names.extend(range(int(first), int(last) + 1))
        elif item.startswith(("GPU-", "MIG-")):
            names.append(item)
        elif item:
            raise _problem(where, f"{item!r} is neither the number of a GPU nor its UUID.")
    if not names:
        raise _problem(where, "the list of devices is empty.")
    duplicates = sorted({str(name) for name in names if names.count(name) > 1})
    if duplicates:
        raise _problem(where, f"GPU {', '.join(duplicates)} is listed twice.")
    return NamedDevices(tuple(names))


# -- free GPUs -------------------------------------------------------------------------------------


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


def free_gpus(readings: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the free GPUs, sorted by free memory (most first), then by index."""
    free = [reading for reading in usable_gpus(readings) if busy_reason(reading) is None]
    return tuple(sorted(free, key=lambda r: (-_free_bytes(r), r.index)))


def _free_bytes(reading: GpuReading) -> int:
    return (reading.memory_total_bytes or 0) - (reading.memory_used_bytes or 0)


def select_gpus(
    request: FreeDevices | NamedDevices, readings: Sequence[GpuReading], where: str = DEVICES_KEY
) -> GpuSelection | GpusBusy:
    """Return the GPUs for a request, or the reason to wait.

    Raises ``ProblemError`` if the request can never be satisfied.
    """
    candidates = usable_gpus(readings)
    if not candidates:
        raise _problem(where, "there is no GPU on this machine.", "Choose trainer.accelerator=cpu.")
    return (
        _select_free(request, candidates, where)
        if isinstance(request, FreeDevices)
        else _select_named(request, candidates, readings, where)
    )


def _select_free(
    request: FreeDevices, candidates: Sequence[GpuReading], where: str
) -> GpuSelection | GpusBusy:
    if request.number > len(candidates):
        raise _problem(
            where, f"{request.number} GPUs are requested, but there are {len(candidates)}."
        )
    free = free_gpus(candidates)
    if len(free) >= request.number:
        return _selection(free[: request.number])
    busy = [f"GPU {r.label}: {reason}" for r in candidates if (reason := busy_reason(r))]
    return GpusBusy(f"{len(free)} of the {request.number} GPUs are free; {'; '.join(busy)}")


def _select_named(
    request: NamedDevices,
    candidates: Sequence[GpuReading],
    readings: Sequence[GpuReading],
    where: str,
) -> GpuSelection | GpusBusy:
    chosen, problems = [], []
    for name in request.names:
        matching = [r for r in candidates if name in (r.index, r.uuid)]
        if matching:
            chosen.append(matching[0])
            continue
        text = f"there is no GPU {name}; there are {', '.join(r.label for r in candidates)}."
        remedy = None
        if any(name in (r.index, r.uuid) for r in readings):
            text = f"GPU {name} is partitioned into MIG devices."
            remedy = "Give the UUIDs of MIG devices; `nvidia-smi -L` lists them."
        problems.append(Problem(where=where, what=text, remedy=remedy))
    if problems:
        raise ProblemError(*problems)
    busy = [f"GPU {r.label}: {reason}" for r in chosen if (reason := busy_reason(r))]
    return GpusBusy("; ".join(busy)) if busy else _selection(chosen)


def _selection(chosen: Sequence[GpuReading]) -> GpuSelection:
    indices = tuple(reading.index for reading in chosen)
    uuids = [reading.uuid for reading in chosen if reading.uuid is not None]
    if len(uuids) == len(chosen):
        return GpuSelection(indices=indices, visible=",".join(uuids))
    return GpuSelection(indices=indices, visible=",".join(map(str, indices)), by_index=True)
