"""Reading of one GPU or MIG device at one point in time, as the driver reports it.

``state/gpu_values.py`` holds the measurements. ``run_gpus.py`` determines the ranks on a GPU.

Names of the reasons for which a GPU's clocks are reduced, from NVML's bit mask. The bits are those
of NVML's ``nvmlClocksEventReasons``. The bit of an idle GPU has no name here, because idleness does
not slow a run down.

Selection of free GPUs (``free:2``). A GPU is free if no visible process computes on it and its
memory is almost unused. A process in another container is visible only by its memory.

Meaning and severity of the driver's XID error codes. The codes and causes follow NVIDIA's "XID
Errors" catalogue (docs.nvidia.com/deploy/xid-errors).

Recordings of readings: written from a sampler, played again as a source of readings. A recording is
a file of JSON lines. The first line says where it is from, such as
``{"format": 1, "driver": "580.65.06", "simulated": false}``; each further line is one round of
readings: ``{"at_s": 12.0, "phase": "idle", "readings": [{...}]}``. Values that are the default of
their field are left out, and what identifies the machine is not written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.state.gpu_values import GpuValues

NOT_READ_YET = "GPUs not read yet"
NO_DRIVER = "no NVIDIA driver on this machine"
NO_GPU = "the NVIDIA driver reports no GPU"


class XidMeaning(Struct, frozen=True):
    """Description and severity of one XID code."""

    text: str
    unusable: bool = False
    """True if the GPU can't be used until a reset, a reboot or a repair."""


XID_MEANINGS = {
    8: XidMeaning("a kernel ran into the driver's time limit"),
    13: XidMeaning("a kernel did something illegal (graphics engine exception)"),
    31: XidMeaning("a kernel accessed memory that it does not own (page fault)"),
    32: XidMeaning("a command buffer was corrupt (bus or driver)"),
    43: XidMeaning("the driver ended a channel after a program's fault"),
    44: XidMeaning("the GPU's context switch failed"),
    45: XidMeaning("the driver cleaned up after a program that ended"),
    48: XidMeaning("an uncorrectable memory error (double bit)", unusable=True),
    56: XidMeaning("display engine error"),
    61: XidMeaning("the GPU's microcontroller stopped at a breakpoint", unusable=True),
    62: XidMeaning("the GPU's microcontroller halted", unusable=True),
    63: XidMeaning("a faulty memory row was retired; it takes effect at the next reset"),
    64: XidMeaning("a faulty memory row could not be retired", unusable=True),
    68: XidMeaning("video processor exception"),
    69: XidMeaning("a kernel did something illegal (graphics class error)"),
    74: XidMeaning("NVLink error: a link to another GPU or the switch failed", unusable=True),
    79: XidMeaning("the GPU fell off the bus", unusable=True),
    92: XidMeaning("a high rate of corrected single-bit memory errors"),
    94: XidMeaning("an uncorrectable memory error, contained: only the affected program must end"),
    95: XidMeaning("an uncorrectable memory error that could not be contained", unusable=True),
    109: XidMeaning("a context switch timed out"),
    110: XidMeaning("security fault", unusable=True),
    119: XidMeaning("the GPU's system processor (GSP) does not answer", unusable=True),
    120: XidMeaning("the GPU's system processor (GSP) failed", unusable=True),
    121: XidMeaning("error on the chip-to-chip link"),
    137: XidMeaning("NVLink: a program accessed a peer's memory without permission"),
    140: XidMeaning("unrecovered memory error", unusable=True),
    143: XidMeaning("the GPU could not be initialised", unusable=True),
    144: XidMeaning("NVLink: an error in a link's hardware"),
    154: XidMeaning("the driver asks for a recovery action; see its log"),
    156: XidMeaning("a resource was retired: recorded"),
}


def xid_meaning(code: int) -> XidMeaning:
    """Return the meaning of an XID code, with a generic text for an unknown code."""
    return XID_MEANINGS.get(code, XidMeaning("not in ltui's table; see NVIDIA's XID catalogue"))


def xid_sentence(code: int) -> str:
    """Return a text such as ``XID 79: the GPU fell off the bus``."""
    return f"XID {code}: {xid_meaning(code).text}"


POWER_CAP = "power cap"
THERMAL = "thermal slowdown"
HARDWARE_THERMAL = "hardware thermal slowdown"
POWER_BRAKE = "power brake"
HARDWARE = "hardware slowdown"

THERMAL_REASONS = frozenset({THERMAL, HARDWARE_THERMAL})

_NAMES = (
    (0x002, "clocks set by a user"),
    (0x004, POWER_CAP),
    (0x008, HARDWARE),
    (0x010, "synchronised with slower GPUs"),
    (0x020, THERMAL),
    (0x040, HARDWARE_THERMAL),
    (0x080, POWER_BRAKE),
    (0x100, "display clock setting"),
)
_CAUSES_OF_HARDWARE = 0x040 | 0x080
"""Bits of specific hardware slowdowns. If one is set, the general bit is ignored."""


def reason_names(mask: int) -> tuple[str, ...]:
    """Return the names of a mask's bits in NVML's order; unknown bits are given as a number."""
    if mask & _CAUSES_OF_HARDWARE:
        mask &= ~0x008
    names = tuple(name for bit, name in _NAMES if mask & bit)
    unknown = mask & ~sum(bit for bit, _ in _NAMES) & ~0x001
    return (*names, f"reason 0x{unknown:x}") if unknown else names


MIG_INDEX_STRIDE = 100
"""MIG device ``n`` of GPU ``g`` has the index ``(g + 1) * MIG_INDEX_STRIDE + n``."""


def mig_index(gpu: int, number: int) -> int:
    """Return the index of a MIG device, which differs from those of all GPUs."""
    return (gpu + 1) * MIG_INDEX_STRIDE + number


RANK, RUN, FOREIGN, UNSEEN, DISPLAY = "rank", "run", "foreign", "unseen", "display"
"""Owners of a process: a rank, the run, another program, a process that is not visible, a display
server."""


class GpuProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
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

    def owner(self, rank: int | None, run_id: str | None) -> str:
        """Return whose process it is for the run ``run_id``; ``rank``: the rank that it is."""
        if rank is not None:
            return RANK
        if not self.visible:
            return UNSEEN
        if run_id is not None and self.run_id == run_id:
            return RUN
        return DISPLAY if self.graphics else FOREIGN


class Xid(Struct, frozen=True, kw_only=True):
    """An XID error that the driver reported for a GPU."""

    at: float
    """Unix seconds when the error was read."""
    code: int
    index: int
    """Index of the GPU, or of the MIG device if the driver names one."""
    uuid: str | None = None


class GpuReading(
    GpuValues, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
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


class GpuView(Struct, frozen=True, kw_only=True):
    """The latest readings of all GPUs and the state of the driver."""

    readings: tuple[GpuReading, ...] = ()
    """Sorted by index, MIG devices after GPUs. ``error`` is set while the driver hangs."""
    note: str | None = None
    """Reason why there are no readings, or why they are old."""
    not_answering_s: float | None = None
    """Age of the hanging driver call in seconds; None if no call hangs."""
    complete: bool = True
    """False during the first round, while GPUs that are not read yet are missing."""


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


_FORMAT = 1


class Round(Struct, frozen=True, kw_only=True):
    """The readings of all GPUs at one time."""

    at_s: float
    """Seconds since the beginning of the recording."""
    readings: tuple[GpuReading, ...]
    phase: str = ""
    """What ran on the GPUs meanwhile, such as ``idle``."""


class Recording(Struct, frozen=True, kw_only=True):
    """Rounds in the order of time."""

    rounds: tuple[Round, ...]
    driver: str | None = None
    """Version of the driver."""
    simulated: bool = False
    """True if the driver was simulated."""


def write_recording(path: Path, recording: Recording) -> None:
    """Write the recording. UUIDs, process ids, names, users and unix times are replaced."""
    head = {"format": _FORMAT, "driver": recording.driver, "simulated": recording.simulated}
    lines = [json.dumps(head)]
    for entry in recording.rounds:
        readings = tuple(_anonymous(reading) for reading in entry.readings)
        kept = to_builtins(replace(entry, at_s=round(entry.at_s, 3), readings=readings))
        # The driver returns some numbers as whole ones; written are those that are read again.
        lines.append(json.dumps(to_builtins(convert(kept, Round)), separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recording(path: Path) -> Recording:
    """Return the recording in ``path``. Raises ``OSError``, and ``ValueError`` if it is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        head, *rest = [json.loads(line) for line in lines]
        if head["format"] != _FORMAT:
            raise ValueError(f"format {head['format']} instead of {_FORMAT}")
        recording = convert({**head, "rounds": rest}, Recording)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no recording of GPU readings: {error}") from error
    if not recording.rounds:
        raise ValueError(f"{path} has no readings")
    return recording


class RecordedGpus:
    """A source of readings with the interface of ``GpuSampler``, which repeats a recording."""

    def __init__(self, rounds: Sequence[Round], clock: Callable[[], float] = time.time) -> None:
        """``clock``: returns the unix time. The recording begins now."""
        self._rounds, self._clock = rounds, clock
        self._began = clock()

    def latest(self) -> GpuView:
        """Return the readings of the current second."""
        # The last round lasts as long as the one before it.
        last = self._rounds[-1].at_s
        length_s = last + (last - self._rounds[-2].at_s if len(self._rounds) > 1 else 1.0)
        now = self._clock()
        elapsed_s = (now - self._began) % max(length_s, 1e-3)
        current = self._rounds[0]
        for entry in self._rounds:
            if entry.at_s > elapsed_s:
                break
            current = entry
        at = now - elapsed_s + current.at_s
        return GpuView(readings=tuple(replace(r, sampled_at=at) for r in current.readings))

    def take_xids(self) -> tuple[Xid, ...]:
        """Return nothing: XID errors are not recorded."""
        return ()

    def stop(self, wait_s: float = 0.0) -> bool:  # noqa: ARG002 - interface of GpuSampler
        """Do nothing: there is no thread to stop."""
        return True


def _anonymous(reading: GpuReading) -> GpuReading:
    processes = reading.processes and tuple(
        GpuProcess(pid=1000 + number, memory_bytes=process.memory_bytes, graphics=process.graphics,
                   visible=process.visible)
        for number, process in enumerate(reading.processes)
    )  # fmt: skip
    uuid = reading.uuid and f"GPU-00000000-0000-4000-8000-{reading.index:012}"
    return replace(reading, uuid=uuid, processes=processes, sampled_at=None, last_xid=None)
