"""Which rank works on which GPU, and whose the processes on a GPU are. Pure.

A rank's GPU is told, in this order, by the UUID that the rank reported, by the driver's list of
processes, and by ``CUDA_VISIBLE_DEVICES`` with the rank's ``cuda:N``. Where these leave a doubt the
answer is "unknown", with the reason: CUDA numbers GPUs by speed unless ``CUDA_DEVICE_ORDER`` says
otherwise, the driver by bus; on a machine with mixed models the two differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from ltui.training.gpu.reading import GpuProcess, GpuReading
from ltui.training.state.run_snapshot import GpuProcessSnapshot, GpuSnapshot

RANK, RUN, FOREIGN, UNSEEN, DISPLAY = "rank", "run", "foreign", "unseen", "display"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLocation:
    """What is known of where a rank runs."""

    rank: int
    pid: int | None = None
    start_ticks: int | None = None
    device: str | None = None
    """``cpu``, ``cuda``, ``cuda:N``."""
    gpu_uuid: str | None = None
    """As torch gives it: with or without ``GPU-`` before it."""
    visible_devices: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the rank; None where it is not set."""
    device_order: str | None = None
    """``CUDA_DEVICE_ORDER`` of the rank."""
    on_this_host: bool = True
    """False: on another machine, whose GPUs are not among the readings."""


@dataclass(frozen=True, slots=True)
class RankMap:
    gpu_of: Mapping[int, int] = field(default_factory=dict)
    """Rank to the index of its GPU or slice."""
    unknown: Mapping[int, str] = field(default_factory=dict)
    """Rank to the reason why its GPU isn't known."""

    def ranks_of(self, index: int) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, gpu in self.gpu_of.items() if gpu == index))


def map_ranks(readings: Sequence[GpuReading], places: Sequence[RankLocation]) -> RankMap:
    """Every rank here that uses a GPU, either with its GPU or with the reason why not."""
    gpu_of: dict[int, int] = {}
    unknown: dict[int, str] = {}
    for place in places:
        if not place.on_this_host or place.device == "cpu":
            continue
        found = _find(readings, place)
        if isinstance(found, int):
            gpu_of[place.rank] = found
        else:
            unknown[place.rank] = found
    return RankMap(gpu_of, unknown)


# -- one rank --------------------------------------------------------------------------------------


def _find(readings: Sequence[GpuReading], place: RankLocation) -> int | str:
    if not readings:
        return "there are no GPU readings"
    told = None
    if place.gpu_uuid is not None:
        told = _by_uuid(readings, place.gpu_uuid)
        if told is None:
            return f"the driver shows no GPU with the UUID {place.gpu_uuid}"
        if not told.mig_enabled:
            return told.index
    holding = _by_process(readings, place)
    if told is not None:
        holding = [reading for reading in holding if reading.parent == told.index]
    if len(holding) == 1:
        return holding[0].index
    listed = _by_variable(readings, place)
    if isinstance(listed, GpuReading) and (told is None or listed.parent == told.index):
        return listed.index
    if told is not None:
        return f"on GPU {told.label}, in which MIG slice isn't known"
    if holding and isinstance(listed, str):
        labels = ", ".join(reading.label for reading in holding)
        return f"its process holds memory on several GPUs ({labels})"
    return listed if isinstance(listed, str) else "the GPU it names isn't the one it uses"


def normalize_uuid(uuid: str) -> str:
    """A UUID for comparing: without ``GPU-`` or ``MIG-``, in lower case."""
    text = uuid.strip().lower()
    return text[4:] if text.startswith(("gpu-", "mig-")) else text


def _by_uuid(readings: Sequence[GpuReading], uuid: str) -> GpuReading | None:
    wanted = normalize_uuid(uuid)
    matching = [r for r in readings if r.uuid is not None and normalize_uuid(r.uuid) == wanted]
    return matching[0] if len(matching) == 1 else None


def _by_process(readings: Sequence[GpuReading], place: RankLocation) -> list[GpuReading]:
    """GPUs and slices that list the rank's process; a GPU with slices speaks through them."""
    return [
        reading
        for reading in readings
        if not reading.mig_enabled and any(_is_rank(p, place) for p in reading.processes or ())
    ]


def _is_rank(process: GpuProcess, place: RankLocation) -> bool:
    if place.pid is None or process.pid != place.pid or not process.visible:
        return False
    ticks = (process.start_ticks, place.start_ticks)
    return None in ticks or ticks[0] == ticks[1]


def _by_variable(readings: Sequence[GpuReading], place: RankLocation) -> GpuReading | str:
    """By ``cuda:N`` among the visible devices; else the reason why that tells nothing."""
    ordinal = _ordinal(place.device)
    if ordinal is None:
        return "the rank has not told its device yet"
    whole = [reading for reading in readings if reading.parent is None]
    if place.visible_devices is None:
        return _by_number(whole, ordinal, place)
    entries = [entry.strip() for entry in place.visible_devices.split(",")]
    if ordinal >= len(entries):
        return f"cuda:{ordinal} isn't among CUDA_VISIBLE_DEVICES={place.visible_devices}"
    entry = entries[ordinal]
    if entry.isdigit():
        return _by_number(whole, int(entry), place)
    return _by_prefix(readings, entry)


def _ordinal(device: str | None) -> int | None:
    if device is None or not device.startswith("cuda"):
        return None
    number = device.partition(":")[2] or "0"
    return int(number) if number.isdigit() else None


def _by_number(whole: Sequence[GpuReading], number: int, place: RankLocation) -> GpuReading | str:
    models = {reading.name for reading in whole}
    if place.device_order != "PCI_BUS_ID" and (len(models) > 1 or None in models):
        return "CUDA and the driver may number these different GPUs differently"
    matching = [reading for reading in whole if reading.index == number]
    if not matching:
        return f"the driver shows no GPU {number}"
    if matching[0].mig_enabled:
        return f"on GPU {number}, in which MIG slice isn't known"
    return matching[0]


def _by_prefix(readings: Sequence[GpuReading], entry: str) -> GpuReading | str:
    """CUDA takes the beginning of a UUID where it is unambiguous."""
    start = entry.lower()
    matching = [r for r in readings if start and (r.uuid or "").lower().startswith(start)]
    if len(matching) != 1:
        return f"CUDA_VISIBLE_DEVICES names {entry}, which the driver doesn't show"
    return matching[0]


# -- whose processes, and the picture that front ends get -----------------------------------------


def gpu_snapshots(
    readings: Sequence[GpuReading],
    ranks: RankMap,
    places: Sequence[RankLocation],
    run_id: str | None,
) -> tuple[GpuSnapshot, ...]:
    """The readings as front ends get them, each with its ranks and with whose its processes are."""
    return tuple(_snapshot(reading, ranks, places, run_id) for reading in readings)


def _snapshot(
    reading: GpuReading, ranks: RankMap, places: Sequence[RankLocation], run_id: str | None
) -> GpuSnapshot:
    same = {name: getattr(reading, name) for name in _SAME}
    processes = reading.processes
    xid = reading.last_xid
    return GpuSnapshot(
        ranks=ranks.ranks_of(reading.index),
        mig_parent=reading.parent,
        processes=None
        if processes is None
        else tuple(process_snapshot(p, places, run_id) for p in processes),
        xid_code=None if xid is None else xid.code,
        xid_at=None if xid is None else xid.at,
        **same,
    )


_SAME = tuple(
    ({f.name for f in fields(GpuReading)} & {f.name for f in fields(GpuSnapshot)}) - {"processes"}
)
"""Readings that go into the picture as they are."""


def process_snapshot(
    process: GpuProcess, places: Sequence[RankLocation], run_id: str | None
) -> GpuProcessSnapshot:
    """The process with its owner, seen from the run ``run_id``."""
    rank = next(
        (place.rank for place in places if place.on_this_host and _is_rank(process, place)), None
    )
    return GpuProcessSnapshot(
        pid=process.pid,
        owner=_owner(process, rank, run_id),
        rank=rank,
        memory_bytes=process.memory_bytes,
        user=process.user,
        name=process.name,
    )


def _owner(process: GpuProcess, rank: int | None, run_id: str | None) -> str:
    if rank is not None:
        return RANK
    if not process.visible:
        return UNSEEN
    if run_id is not None and process.run_id == run_id:
        return RUN
    return DISPLAY if process.graphics else FOREIGN
