"""What the machine says of a run, once a second: its ranks' processes and its GPUs.

Used by the supervisor's loop alone; nothing here waits, a driver call that hangs is itself a
reading.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ltui.training.gpu.findings import verdicts as gpu_verdicts
from ltui.training.gpu.run_gpus import RunGpus, RunGpusView
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import ProcessTable, RankFinder, RankUsage, UsageMeter
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.training.store.history_writer import Batch
from ltui.training.supervise.untracked_program import Program, ProgramReader
from ltui.training.tensor_queue.record_types import PulseState

READINGS_S = 1.0


class MachineMonitor:
    """Readings of one attempt."""

    def __init__(self, run_id: str, *, user_command: bool) -> None:
        """``user_command``: the run is a command of the user, which may itself count as a rank."""
        self.gpus = RunGpus(run_id)
        self.gpu_view = RunGpusView()
        self.gpu_verdicts: tuple[Verdict, ...] = ()
        """In force, of the GPUs."""
        self.unreported_processes: dict[int, ProcessIdentity] = {}
        """Processes of ranks that have no pulse, or none yet."""
        self.program = Program()
        """What those processes show; of use while no rank has sent telemetry."""
        self.readings: dict[int, RankUsage] = {}
        """By rank."""
        self.rank_processes: dict[int, ProcessIdentity] = {}
        self.table: ProcessTable | None = None
        """Of the newest reading."""
        self._user_command = user_command
        self._readings = UsageMeter()
        self._finder = RankFinder()
        self._program_reader = ProgramReader()
        self._read_at = 0.0
        self._gpus_at: float | None = None
        self._over: list[Verdict] = []

    def sample(
        self,
        snapshot: RunSnapshot,
        pulses: Mapping[int, PulseState | None],
        engine: ProcessIdentity | None,
        now_s: float,
    ) -> Batch | None:
        """New readings for the store; None while the last ones are young."""
        now = time.monotonic()
        if now - self._read_at < READINGS_S:
            return None
        self._read_at = now
        batch = Batch()
        self.table = table = ProcessTable()
        heard_of = {
            rank: ProcessIdentity(p.pid, p.start_ticks)
            for rank, p in pulses.items()
            if p is not None and p.pid > 0
        }
        self.unreported_processes = self._without_telemetry(
            table, engine, heard_of, snapshot.world_size
        )
        if self._user_command and engine is not None and not heard_of:
            self.program = self._program_reader.read(table, engine, self.unreported_processes)
        self.rank_processes = {**self.unreported_processes, **heard_of}
        self.readings = self._readings.sample(table, self.rank_processes, now)
        batch.processes = [
            (rank, now_s, r.cpu_percent, r.rss_bytes) for rank, r in self.readings.items()
        ]
        self._look_at_gpus(snapshot, batch, now_s)
        return batch

    def _without_telemetry(
        self,
        table: ProcessTable,
        engine: ProcessIdentity | None,
        heard_of: Mapping[int, ProcessIdentity],
        size: int | None,
    ) -> dict[int, ProcessIdentity]:
        if engine is None or (heard_of and (size is None or len(heard_of) >= size)):
            return {}
        found = self._finder.find(table, engine)
        return {
            rank: mark
            for rank, mark in found.items()
            # Until a rank has named itself, the command stands for it; of a preset it never does.
            if rank not in heard_of and (mark != engine or (not heard_of and self._user_command))
        }

    def _look_at_gpus(self, snapshot: RunSnapshot, batch: Batch, now_s: float) -> None:
        view = self.gpu_view = self.gpus.sample(snapshot.ranks, now_s)
        known = {(v.kind, v.began): v for v in self.gpu_verdicts}
        self.gpu_verdicts = gpu_verdicts(view.findings)
        for verdict in self.gpu_verdicts:
            known.pop((verdict.kind, verdict.began), None)
        self._over += [replace(v, ended=now_s) for v in known.values()]
        for event in view.events:
            fields = {"gpu": event.gpu, "ranks": list(event.ranks), "xid": event.code}
            batch.events.append((None, None, event.at, "gpu_error", event.text, fields))
        sampled_at = max(
            (g.sampled_at for g in view.gpus if g.sampled_at is not None), default=None
        )
        if sampled_at != self._gpus_at:
            self._gpus_at = sampled_at
            batch.gpus = [g for g in view.gpus if g.error is None]

    def cpu_delays(self) -> dict[int, float]:
        """rank -> share of the last seconds in which it waited for a processor."""
        found = {rank: reading.delay_share for rank, reading in self.readings.items()}
        return {rank: share for rank, share in found.items() if share is not None}

    def take_ended_verdicts(self) -> list[Verdict]:
        """The GPUs' verdicts that are over since this was last asked."""
        over, self._over = self._over, []
        return over

    def end_verdicts(self, ended_at: float) -> list[Verdict]:
        """End what is in force: the run has ended."""
        over = [replace(v, ended=ended_at) for v in self.gpu_verdicts]
        self.gpu_verdicts = ()
        return over
