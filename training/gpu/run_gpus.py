"""GPUs of one run: readings with the run's ranks, the owners of the processes, and findings.

The supervisor calls ``sample`` once a second. The call never waits for the driver.

A rank's GPU is determined, in this order, by the UUID that the rank reported, by the driver's list
of processes, and by ``CUDA_VISIBLE_DEVICES`` with the rank's ``cuda:N``. If the result is
ambiguous, the GPU is unknown. For example, CUDA numbers GPUs by speed unless ``CUDA_DEVICE_ORDER``
is set, and the driver numbers them by bus. On a machine with different models the two numberings
differ.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ltui.training.gpu.findings import Finding, FindingsState, update_findings
from ltui.training.gpu.reading import (
    NOT_READ_YET,
    ORDER,
    VISIBLE,
    GpuProcess,
    GpuReading,
    GpuView,
    Xid,
    xid_sentence,
)
from ltui.training.process.proc_files import environment
from ltui.training.state.gpu_values import GpuValues
from ltui.training.state.run_snapshot import Event, GpuProcessSnapshot, GpuSnapshot, RankSnapshot


class RankLocation(Struct, frozen=True, kw_only=True):
    """Reported location of a rank."""

    rank: int
    pid: int | None = None
    device: str | None = None
    """``cpu``, ``cuda`` or ``cuda:N``."""
    gpu_uuid: str | None = None
    """UUID as reported by torch, with or without the prefix ``GPU-``."""
    visible_devices: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the rank; None if it is not set."""
    device_order: str | None = None
    """``CUDA_DEVICE_ORDER`` of the rank."""
    on_this_host: bool = True
    """False if the rank runs on another machine. Its GPU is then not among the readings."""


def map_ranks(readings: Sequence[GpuReading], locations: Sequence[RankLocation]) -> dict[int, int]:
    """Return rank -> index of its GPU or MIG device; a rank whose GPU is unknown is left out."""
    found = {
        location.rank: _find_gpu(readings, location)
        for location in locations
        if location.on_this_host and location.device != "cpu"
    }
    return {rank: reading.index for rank, reading in found.items() if reading is not None}


# -- one rank --------------------------------------------------------------------------------------


def _find_gpu(readings: Sequence[GpuReading], location: RankLocation) -> GpuReading | None:
    reported = None
    if location.gpu_uuid is not None:
        reported = _by_uuid(readings, location.gpu_uuid)
        if reported is None or not reported.mig_enabled:
            return reported
    holding = _by_process(readings, location)
    if reported is not None:
        holding = [reading for reading in holding if reading.parent == reported.index]
    if len(holding) == 1:
        return holding[0]
    listed = _by_variable(readings, location)
    is_reported = listed is None or reported is None or listed.parent == reported.index
    return listed if is_reported else None


def normalize_uuid(uuid: str) -> str:
    """Return a UUID in lower case without the prefix ``GPU-`` or ``MIG-``, for comparison."""
    text = uuid.strip().lower()
    return text[4:] if text.startswith(("gpu-", "mig-")) else text


def _by_uuid(readings: Sequence[GpuReading], uuid: str) -> GpuReading | None:
    normalized = normalize_uuid(uuid)
    matching = [r for r in readings if r.uuid is not None and normalize_uuid(r.uuid) == normalized]
    return matching[0] if len(matching) == 1 else None


def _by_process(readings: Sequence[GpuReading], location: RankLocation) -> list[GpuReading]:
    """Return the GPUs and MIG devices that list the rank's process.

    GPUs with MIG enabled are represented by their MIG devices.
    """
    return [
        reading
        for reading in readings
        if not reading.mig_enabled and any(_is_rank(p, location) for p in reading.processes or ())
    ]


def _is_rank(process: GpuProcess, location: RankLocation) -> bool:
    return location.pid is not None and process.pid == location.pid and process.visible


def _by_variable(readings: Sequence[GpuReading], location: RankLocation) -> GpuReading | None:
    """Return the GPU of ``cuda:N`` among the visible devices."""
    ordinal = _ordinal(location.device)
    if ordinal is None:
        return None
    if location.visible_devices is None:
        return _by_number(readings, ordinal, location)
    entries = [entry.strip() for entry in location.visible_devices.split(",")]
    entry = entries[ordinal] if ordinal < len(entries) else ""
    if entry.isdigit():
        return _by_number(readings, int(entry), location)
    # CUDA accepts unambiguous prefixes of UUIDs.
    start = entry.lower()
    matching = [r for r in readings if start and (r.uuid or "").lower().startswith(start)]
    return matching[0] if len(matching) == 1 else None


def _ordinal(device: str | None) -> int | None:
    if device is None or not device.startswith("cuda"):
        return None
    number = device.partition(":")[2] or "0"
    return int(number) if number.isdigit() else None


def _by_number(
    readings: Sequence[GpuReading], number: int, location: RankLocation
) -> GpuReading | None:
    gpus = [reading for reading in readings if reading.parent is None]
    models = {reading.name for reading in gpus}
    if location.device_order != "PCI_BUS_ID" and (len(models) > 1 or None in models):
        return None  # CUDA and the driver may number these different GPUs differently.
    return next((r for r in gpus if r.index == number and not r.mig_enabled), None)


# -- owners of processes, and snapshots for front ends --------------------------------------------


def gpu_snapshots(
    readings: Sequence[GpuReading],
    gpu_of: Mapping[int, int],
    locations: Sequence[RankLocation],
    run_id: str | None,
) -> tuple[GpuSnapshot, ...]:
    """Convert readings to snapshots for front ends, with the ranks and the owners of processes."""
    return tuple(
        GpuSnapshot(
            **{f: getattr(reading, f) for f in GpuValues.__struct_fields__},
            ranks=ranks_of(gpu_of, reading.index),
            label=reading.label,
            mig_parent=reading.parent,
            processes=None
            if reading.processes is None
            else tuple(_process_snapshot(p, locations, run_id) for p in reading.processes),
            xid_code=None if reading.last_xid is None else reading.last_xid.code,
            xid_at=None if reading.last_xid is None else reading.last_xid.at,
        )
        for reading in readings
    )


def ranks_of(gpu_of: Mapping[int, int], index: int) -> tuple[int, ...]:
    """Return the ranks on the GPU or MIG device ``index``."""
    return tuple(sorted(rank for rank, gpu in gpu_of.items() if gpu == index))


def _process_snapshot(
    process: GpuProcess, locations: Sequence[RankLocation], run_id: str | None
) -> GpuProcessSnapshot:
    """Return a process with its owner from the point of view of the run ``run_id``."""
    own = (place for place in locations if place.on_this_host and _is_rank(process, place))
    rank = next((place.rank for place in own), None)
    return GpuProcessSnapshot(
        pid=process.pid,
        owner=process.owner(rank, run_id),
        rank=rank,
        memory_bytes=process.memory_bytes,
        user=process.user,
        name=process.name,
    )


class RunGpusView(Struct, frozen=True, kw_only=True):
    """Result of one ``RunGpus.sample``."""

    gpus: tuple[GpuSnapshot, ...] = ()
    note: str | None = NOT_READ_YET
    """Reason why there are no readings, or only old ones."""
    findings: tuple[Finding, ...] = ()
    events: tuple[Event, ...] = ()
    """XID errors since the previous sample."""


class GpuSource(Protocol):
    """A source of GPU readings with the interface of ``GpuSampler``."""

    def latest(self) -> GpuView:
        """Return the latest readings without waiting."""

    def take_xids(self) -> tuple[Xid, ...]:
        """Return the XID errors since the last call."""

    def stop(self, wait_s: float = 0.0) -> bool:
        """Stop sampling. Return True if it has stopped within ``wait_s`` seconds."""


class RunGpus:
    """Samples the GPUs for one run, from construction until ``stop``."""

    def __init__(
        self, run_id: str | None, *, period_s: float = 1.0, source: GpuSource | None = None
    ) -> None:
        """``source``: source of the readings, by default a ``GpuSampler``."""
        self._run_id = run_id
        if source is None:
            # Imported here: a demo needs no driver.
            from ltui.training.gpu.sampler import GpuSampler

            source = GpuSampler(period_s=period_s)
        self._sampler = source
        self._state = FindingsState()
        self._host = socket.gethostname()
        self._environments: dict[int, tuple[str | None, str | None]] = {}

    def sample(self, ranks: Sequence[RankSnapshot], now: float | None = None) -> RunGpusView:
        """Return the latest readings with the GPUs of ``ranks``. ``now`` is in unix seconds."""
        now = time.time() if now is None else now
        view = self._sampler.latest()
        places = [self._locate_rank(rank) for rank in ranks]
        gpu_of = map_ranks(view.readings, places)
        gpus = gpu_snapshots(view.readings, gpu_of, places, self._run_id)
        self._state = update_findings(self._state, gpus, ranks, now)
        return RunGpusView(
            gpus=gpus,
            note=view.note,
            findings=self._state.findings,
            events=tuple(
                _event(xid, view.readings, ranks_of(gpu_of, xid.index))
                for xid in self._sampler.take_xids()
            ),
        )

    def latest(self) -> GpuView:
        """Return the latest readings without ranks, for the selection of GPUs."""
        return self._sampler.latest()

    def stop(self, wait_s: float = 0.0) -> bool:
        """Stop sampling. Return True if the thread has ended within ``wait_s`` seconds."""
        return self._sampler.stop(wait_s)

    def _locate_rank(self, rank: RankSnapshot) -> RankLocation:
        on_this_host = rank.node == 0 and rank.host in (None, self._host)
        visible, order = self._environment(rank.pid) if on_this_host else (None, None)
        return RankLocation(
            rank=rank.rank,
            pid=rank.pid,
            device=rank.device,
            gpu_uuid=rank.gpu_uuid,
            visible_devices=visible,
            device_order=order,
            on_this_host=on_this_host,
        )

    def _environment(self, pid: int | None) -> tuple[str | None, str | None]:
        """Return the GPU variables of a process's environment, which is read once per process."""
        if pid is None:
            return None, None
        if pid not in self._environments:
            variables = environment(pid)
            self._environments[pid] = variables.get(VISIBLE), variables.get(ORDER)
        return self._environments[pid]


def _event(xid: Xid, readings: Sequence[GpuReading], ranks: tuple[int, ...]) -> Event:
    label = next((r.label for r in readings if r.index == xid.index), str(xid.index))
    rank_text = f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
    place = f"GPU {label}{rank_text if ranks else ''}"
    fields = {"gpu": xid.index, "ranks": list(ranks), "xid": xid.code}
    return Event(xid.at, "gpu_error", f"{place}: {xid_sentence(xid.code)}", fields)
