"""GPUs of one run: readings with the run's ranks, the owners of the processes, and findings.

The supervisor calls ``sample`` once a second. The call never waits for the driver.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from ltui.training.gpu.findings import Finding, FindingsState, update_findings
from ltui.training.gpu.rank_mapping import RankLocation, gpu_snapshots, map_ranks, ranks_of
from ltui.training.gpu.reading import (
    NOT_READ_YET,
    ORDER,
    VISIBLE,
    GpuReading,
    GpuView,
    Xid,
    xid_sentence,
)
from ltui.training.process.proc_files import environment
from ltui.training.state.run_snapshot import Event, GpuSnapshot, RankSnapshot


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
