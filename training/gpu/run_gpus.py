"""The GPUs as one run sees them: its ranks on them, whose processes are there, what is wrong.

For the supervisor: one ``look`` a second, which never waits for the driver.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ltui.training.gpu.findings import Finding, FindingsState, update_findings
from ltui.training.gpu.rank_mapping import RankLocation, gpu_snapshots, map_ranks
from ltui.training.gpu.reading import GpuReading, Xid
from ltui.training.gpu.sampler import NOT_READ_YET, GpuSampler, GpuView
from ltui.training.gpu.xid_codes import xid_sentence
from ltui.training.state.run_snapshot import GpuSnapshot, RankSnapshot

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuEvent:
    """Something that happened to a GPU, for the run's list of events."""

    at: float
    """Unix seconds."""
    gpu: int
    ranks: tuple[int, ...]
    code: int
    """Of the XID error."""
    text: str
    """``GPU 3 (rank 3): XID 79: the GPU fell off the bus``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGpusView:
    gpus: tuple[GpuSnapshot, ...] = ()
    note: str | None = NOT_READ_YET
    """Why there are no readings, or old ones."""
    findings: tuple[Finding, ...] = ()
    unknown: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose GPU isn't known, with the reason."""
    events: tuple[GpuEvent, ...] = ()
    """New since the look before."""


class RunGpus:
    """Samples from construction until ``stop``."""

    def __init__(self, run_id: str | None, *, period_s: float = 1.0) -> None:
        self._run_id = run_id
        self._sampler = GpuSampler(period_s=period_s)
        self._state = FindingsState()
        self._host = socket.gethostname()
        self._variables: dict[int, tuple[str | None, str | None]] = {}

    def sample(self, ranks: Sequence[RankSnapshot], now: float | None = None) -> RunGpusView:
        """The newest readings with these ranks on them; ``now`` is unix time."""
        now = time.time() if now is None else now
        view = self._sampler.latest()
        places = [self._place(rank) for rank in ranks]
        mapped = map_ranks(view.readings, places)
        gpus = gpu_snapshots(view.readings, mapped, places, self._run_id)
        self._state = update_findings(self._state, gpus, ranks, now)
        return RunGpusView(
            gpus=gpus,
            note=view.note,
            findings=self._state.findings,
            unknown=mapped.unknown if view.readings else {},
            events=tuple(
                _event(xid, view.readings, mapped.ranks_of(xid.index))
                for xid in self._sampler.take_xids()
            ),
        )

    def latest(self) -> GpuView:
        """The readings as they are, for choosing among them."""
        return self._sampler.latest()

    def stop(self, wait_s: float = 0.0) -> bool:
        """Ends the sampling; true if its thread has ended within ``wait_s``."""
        return self._sampler.stop(wait_s)

    def _place(self, rank: RankSnapshot) -> RankLocation:
        on_this_host = rank.host in (None, self._host)
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
        """What the process was started with; read once a process."""
        if pid is None:
            return None, None
        if pid not in self._variables:
            self._variables[pid] = _variables(pid)
        return self._variables[pid]


def _variables(pid: int) -> tuple[str | None, str | None]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None, None
    values = dict(entry.partition("=")[::2] for entry in entries if "=" in entry)
    return values.get(VISIBLE), values.get(ORDER)


def _event(xid: Xid, readings: Sequence[GpuReading], ranks: tuple[int, ...]) -> GpuEvent:
    label = next((r.label for r in readings if r.index == xid.index), str(xid.index))
    whose = f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
    place = f"GPU {label}{whose if ranks else ''}"
    return GpuEvent(
        at=xid.at,
        gpu=xid.index,
        ranks=ranks,
        code=xid.code,
        text=f"{place}: {xid_sentence(xid.code)}",
    )
