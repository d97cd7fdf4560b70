"""Sample the processes and GPUs of a run once a second.

Used by the supervisor's loop only. Nothing here blocks: a driver call that hangs is reported as a
reading.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ltui.training.gpu.findings import verdicts as gpu_verdicts
from ltui.training.gpu.run_gpus import RunGpus, RunGpusView
from ltui.training.lifecycle.rank_queue_poller import local_processes
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.process_table import ProcessTable
from ltui.training.process.rank_usage import RankFinder, RankUsage, UsageMeter
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.training.store.history_writer import Batch
from ltui.training.supervise.untracked_program import Program, ProgramReader
from ltui.training.tensor_queue.record_types import PulseState

READINGS_S = 1.0
"""Seconds between two samples."""


class MachineMonitor:
    """Samples the processes and GPUs of one attempt."""

    def __init__(self, run_id: str, queue_dir: Path, *, user_command: bool) -> None:
        """``user_command``: the run is a command of the user, which may itself count as a rank."""
        self.gpus = RunGpus(run_id)
        self.gpu_view = RunGpusView()
        self.gpu_verdicts: tuple[Verdict, ...] = ()
        """Verdicts about GPUs that are currently active."""
        self.unreported_processes: dict[int, ProcessIdentity] = {}
        """rank -> process, for ranks that have not sent a pulse."""
        self.program = Program()
        """What the processes do. Updated until a rank sends telemetry."""
        self.readings: dict[int, RankUsage] = {}
        """rank -> the newest CPU and memory reading."""
        self.rank_processes: dict[int, ProcessIdentity] = {}
        self.table: ProcessTable | None = None
        """The process table of the newest sample."""
        self._user_command = user_command
        self._readings = UsageMeter()
        self._finder = RankFinder()
        self._program_reader = ProgramReader(queue_dir)
        self._read_at = 0.0
        self._gpus_at: float | None = None
        self._ended_verdicts: list[Verdict] = []

    def sample(
        self,
        snapshot: RunSnapshot,
        pulses: Mapping[int, PulseState | None],
        engine: ProcessIdentity | None,
        now_s: float,
    ) -> Batch | None:
        """Return new readings for the store, or None if the last sample is recent enough."""
        now = time.monotonic()
        if now - self._read_at < READINGS_S:
            return None
        self._read_at = now
        batch = Batch()
        self.table = table = ProcessTable()
        reported = local_processes(pulses)
        remote = sum(p is not None and p.node != 0 for p in pulses.values())
        local_size = None if snapshot.world_size is None else snapshot.world_size - remote
        self.unreported_processes = self._without_telemetry(table, engine, reported, local_size)
        if engine is not None and not any(pulses.values()):
            self.program = self._program_reader.read(table, engine, self.unreported_processes)
        self.rank_processes = {**self.unreported_processes, **reported}
        self.readings = self._readings.sample(table, self.rank_processes, now)
        batch.processes = [
            (rank, now_s, r.cpu_percent, r.rss_bytes) for rank, r in self.readings.items()
        ]
        self._sample_gpus(snapshot, batch, now_s)
        return batch

    def _without_telemetry(
        self,
        table: ProcessTable,
        engine: ProcessIdentity | None,
        reported: Mapping[int, ProcessIdentity],
        size: int | None,
    ) -> dict[int, ProcessIdentity]:
        if engine is None or (reported and (size is None or len(reported) >= size)):
            return {}
        processes = self._finder.find(table, engine)
        return {
            rank: process
            for rank, process in processes.items()
            # The user's command counts as a rank until a rank reports. A preset's agent never does.
            if rank not in reported and (process != engine or (not reported and self._user_command))
        }

    def _sample_gpus(self, snapshot: RunSnapshot, batch: Batch, now_s: float) -> None:
        view = self.gpu_view = self.gpus.sample(snapshot.ranks, now_s)
        ended = {(v.kind, v.began): v for v in self.gpu_verdicts}
        self.gpu_verdicts = gpu_verdicts(view.findings)
        for verdict in self.gpu_verdicts:
            ended.pop((verdict.kind, verdict.began), None)
        self._ended_verdicts += [replace(v, ended=now_s) for v in ended.values()]
        batch.events = list(view.events)
        sampled_at = max(
            (g.sampled_at for g in view.gpus if g.sampled_at is not None), default=None
        )
        if sampled_at != self._gpus_at:
            self._gpus_at = sampled_at
            batch.gpus = [g for g in view.gpus if g.error is None]

    def cpu_delays(self) -> dict[int, float]:
        """Return rank -> fraction of the last seconds in which it waited for a processor."""
        delays = {rank: reading.delay_share for rank, reading in self.readings.items()}
        return {rank: share for rank, share in delays.items() if share is not None}

    def take_ended_verdicts(self) -> list[Verdict]:
        """Return the verdicts about GPUs that have ended since the last call."""
        ended, self._ended_verdicts = self._ended_verdicts, []
        return ended

    def end_verdicts(self, ended_at: float) -> list[Verdict]:
        """End all active verdicts about GPUs, because the run has ended. Return them."""
        ended = [replace(v, ended=ended_at) for v in self.gpu_verdicts]
        self.gpu_verdicts = ()
        return ended
