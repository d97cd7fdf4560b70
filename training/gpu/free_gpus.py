"""Which GPUs are free, and what ``devices`` asks for: a count, a list, or ``free:2``. Pure.

A GPU is free while no computation that can be seen runs on it and its memory is all but unused:
a process in another container shows in the memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ltui.training.gpu.reading import GpuReading
from ltui.training.problem import Problem, ProblemError

DEVICES_KEY = "trainer.devices"
IDLE_MEMORY_FRACTION = 0.05
IDLE_MEMORY_BYTES = 1 << 30
"""Memory in use up to the smaller of these two is what an idle driver and a display keep."""


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """That many devices, whichever Lightning takes."""

    number: int


@dataclass(frozen=True, slots=True)
class AllDevices:
    """``auto``, -1: all there are."""


@dataclass(frozen=True, slots=True)
class NamedDevices:
    """These GPUs: indices of the driver, or UUIDs."""

    names: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class FreeDevices:
    """That many free ones, those with most free memory."""

    number: int


DeviceRequest = DeviceCount | AllDevices | NamedDevices | FreeDevices


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSelection:
    """GPUs to run on. ``visible`` is the ``CUDA_VISIBLE_DEVICES`` that gives exactly these."""

    indices: tuple[int, ...]
    visible: str
    by_index: bool = False
    """A UUID is missing, so ``visible`` holds indices: set ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` too."""


@dataclass(frozen=True, slots=True)
class GpusBusy:
    """Not now: the run can wait in the queue."""

    reason: str


# -- reading what was asked for --------------------------------------------------------------------


def parse_devices(value: object, where: str = DEVICES_KEY) -> DeviceRequest:
    """``2``, ``"2"``, ``-1``, ``"auto"``, ``[0, 2]``, ``"0,2"``, ``"0-3"``, ``"free:2"``, UUIDs.

    As in Lightning a number alone is a count, and ``"2,"`` or ``[2]`` is GPU 2. Raises
    ``ProblemError``.
    """
    if isinstance(value, bool) or value is None:
        raise _problem(where, f"{value!r} is no choice of devices.")
    if isinstance(value, int):
        return _count(value, where)
    if isinstance(value, (list, tuple)):
        return _named([str(item) for item in value], where)
    text = str(value).strip()
    if text in ("auto", "-1"):
        return AllDevices()
    if text.startswith("free"):
        return _free(text, where)
    if text.startswith("[") and text.endswith("]"):
        return _named(text[1:-1].split(","), where)
    if text.lstrip("+-").isdigit():
        return _count(int(text), where)
    return _named(text.split(","), where)


def _problem(where: str, what: str, remedy: str | None = None) -> ProblemError:
    usual = "Give a count (2), a list (0,2), auto, or free:2 for two that nobody uses."
    return ProblemError(Problem(where=where, what=what, remedy=remedy or usual))


def _count(number: int, where: str) -> DeviceRequest:
    if number == -1:
        return AllDevices()
    if number < 1:
        raise _problem(where, f"{number} devices are no choice; there must be at least one.")
    return DeviceCount(number)


def _free(text: str, where: str) -> FreeDevices:
    word, _, number = text.partition(":")
    if word != "free" or (number and not number.isdigit()) or text.endswith(":"):
        raise _problem(where, f"{text!r} is no choice of free GPUs.")
    wanted = int(number or 1)
    if wanted < 1:
        raise _problem(where, "free:0 asks for no GPU at all.")
    return FreeDevices(wanted)


def _named(items: Sequence[str], where: str) -> NamedDevices:
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
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise _problem(where, f"GPU {', '.join(twice)} is listed twice.")
    return NamedDevices(tuple(names))


# -- what is free ----------------------------------------------------------------------------------


def usable_gpus(readings: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """What a run can be put on: slices where a GPU has them, else the GPU."""
    return tuple(reading for reading in readings if not reading.mig_enabled)


def busy_reason(reading: GpuReading) -> str | None:
    """Why a GPU isn't free; None if it is, as far as can be told."""
    if reading.error is not None:
        return reading.error
    working = [process for process in reading.processes or () if not process.graphics]
    if working:
        first = working[0]
        who = f"user {first.user}" if first.user else "not visible from here"
        more = f" and {len(working) - 1} more" if len(working) > 1 else ""
        return f"used by pid {first.pid} ({who}){more}"
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    if used is None or total is None:
        return "the driver doesn't tell its memory"
    if used > min(IDLE_MEMORY_BYTES, IDLE_MEMORY_FRACTION * total) and not reading.processes:
        return f"{used / 2**30:.1f} GiB of its memory are in use by processes that can't be seen"
    return None


def free_gpus(readings: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """The free ones, most free memory first; equal ones by index."""
    free = [reading for reading in usable_gpus(readings) if busy_reason(reading) is None]
    return tuple(sorted(free, key=lambda r: (-_free_bytes(r), r.index)))


def _free_bytes(reading: GpuReading) -> int:
    return (reading.memory_total_bytes or 0) - (reading.memory_used_bytes or 0)


def select_gpus(
    request: FreeDevices | NamedDevices, readings: Sequence[GpuReading], where: str = DEVICES_KEY
) -> GpuSelection | GpusBusy:
    """The GPUs for a request, or why to wait. Raises ``ProblemError`` for what can never be had."""
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
            where, f"{request.number} GPUs are asked for, and there are {len(candidates)}."
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
        found = [r for r in candidates if name in (r.index, r.uuid)]
        if found:
            chosen.append(found[0])
            continue
        what = f"there is no GPU {name}; there are {', '.join(r.label for r in candidates)}."
        remedy = None
        if any(name in (r.index, r.uuid) for r in readings):
            what = f"GPU {name} is cut into MIG slices."
            remedy = "Name slices by their UUID: nvidia-smi -L lists them."
        problems.append(Problem(where=where, what=what, remedy=remedy))
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
