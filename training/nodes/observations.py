"""Observations of one machine about its ranks and itself, and their union over all machines. Pure.

The supervisor of node 0 makes them of its own machine. An agent makes them of its machine and sends
them to node 0. Everything that needs /proc, a signal or a driver is observed on the machine itself;
node 0 only merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge_input import Death
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import RankUsage
from ltui.training.state.run_snapshot import GpuSnapshot, Verdict

MIN_SHIFT_S = 0.5
"""Seconds from which the clocks of two machines differ for the times of readings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankObservations:
    """What was observed of the processes of ranks. Sent in every report."""

    dead: tuple[int, ...] = ()
    """Ranks whose process has ended although they had not finished."""
    deaths: Mapping[int, Death] = field(default_factory=dict)
    """How processes of ranks ended, as far as that is known."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid of a process that is stopped (SIGSTOP or a debugger)."""
    stopped_workers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank -> pids of its children that are stopped."""
    silent_s: Mapping[int, float] = field(default_factory=dict)
    """Ranks that have a process but no pulse -> seconds since the process was first seen."""
    oom_kills: int | None = None
    """Recent out-of-memory kills on the machine; None if none of its ranks is dying."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineObservations:
    """What was read of the machine and its processes. Not in every report."""

    processes: Mapping[int, ProcessIdentity] = field(default_factory=dict)
    """Processes of ranks that have not sent a pulse."""
    usage: Mapping[int, RankUsage] = field(default_factory=dict)
    host: HostEvidence | None = None
    gpus: tuple[GpuSnapshot, ...] = ()
    gpu_note: str | None = None
    gpu_verdicts: tuple[Verdict, ...] = ()

    def with_times_shifted(self, seconds: float) -> MachineObservations:
        """Return the same readings with ``seconds`` added to their unix times.

        Differences that no screen shows are left, so that the readings of a thousand GPUs are
        seldom copied.
        """
        if abs(seconds) < MIN_SHIFT_S:
            return self
        return replace(
            self,
            gpus=tuple(
                replace(gpu, sampled_at=_shifted(gpu.sampled_at, seconds)) for gpu in self.gpus
            ),
            gpu_verdicts=tuple(
                replace(verdict, began=_shifted(verdict.began, seconds))
                for verdict in self.gpu_verdicts
            ),
        )


def _shifted(unix_time: float | None, seconds: float) -> float | None:
    """Return a unix time of one machine on the clock of another; None remains None."""
    return None if unix_time is None else unix_time + seconds


def merge_ranks(parts: Iterable[RankObservations]) -> RankObservations:
    """Return the observations of all machines together. A rank runs on one machine only."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    oom = [part.oom_kills for part in parts if part.oom_kills is not None]
    return RankObservations(
        dead=tuple(sorted(rank for part in parts for rank in part.dead)),
        deaths={rank: death for part in parts for rank, death in part.deaths.items()},
        stopped_pids={rank: pid for part in parts for rank, pid in part.stopped_pids.items()},
        stopped_workers={r: pids for part in parts for r, pids in part.stopped_workers.items()},
        silent_s={rank: s for part in parts for rank, s in part.silent_s.items()},
        oom_kills=sum(oom) if oom else None,
    )
