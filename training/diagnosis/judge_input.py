"""The input of ``judge``, and the history that it keeps from one call to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import Evidence, Frame, HostEvidence
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.tensor_queue.record_types import Phase, PulseState

STEP_PHASES = frozenset(
    {
        Phase.FETCH,
        Phase.TRANSFER,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.BATCH_END,
    }
)
"""Phases of a training step."""
BEFORE_TRAINING = frozenset({Phase.UNKNOWN, Phase.STARTING, Phase.SETUP, Phase.SANITY})
"""Phases before the first training step."""
LIVE_STATES = frozenset({RankState.OK, RankState.STARTING})
"""States of ranks that train or are about to train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How the process of one rank ended, as far as that could be observed."""

    signal: str | None = None
    """Name of the signal that ended it, such as ``SIGSEGV``."""
    exit_code: int | None = None
    frame: Frame | None = None
    """The line of user code that ran when the process crashed, from faulthandler."""
    last_line: str | None = None
    """The line of the rank's log that most likely contains the reason."""

    @property
    def text(self) -> str:
        """``killed by SIGSEGV``, ``exit code 3`` or ``its process is gone``."""
        if self.signal is not None:
            return f"killed by {self.signal}"
        return "its process is gone" if self.exit_code is None else f"exit code {self.exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthHistory:
    """The state that ``judge`` keeps from one call to the next."""

    judged_ns: int | None = None
    """CLOCK_MONOTONIC of the last call."""
    forgiven_ns: int = 0
    """Time without progress before this instant does not count."""
    active: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts of the last call by ``verdict_key``; ``began`` is set in each."""
    places: Mapping[int, tuple[Phase, int]] = field(default_factory=dict)
    """rank -> (phase, nanosecond at which it last changed) at the last call."""
    longest_s: Mapping[Phase, float] = field(default_factory=dict)
    """The longest time that any rank made no progress in a phase and then continued."""
    drift_ns: tuple[int, int] | None = None
    """When ranks began to drift, and when they were last observed to drift."""
    straggling_since_ns: int | None = None
    evaluated: Mapping[int, int] = field(default_factory=dict)
    """rank -> batches of the last validation in which the rank was observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeInput:
    """Everything that one judgement is based on."""

    now_ns: int
    """CLOCK_MONOTONIC, the clock of the pulses."""
    now_s: float | None = None
    """Unix time, for ``began`` and ``ended`` of verdicts."""
    policy: StallPolicy
    history: HealthHistory = field(default_factory=HealthHistory)
    """The history that the last judgement returned."""
    pulses: Mapping[int, PulseState | None]
    """The current status of every rank; None if the rank has not written one yet."""
    fold: FoldState = field(default_factory=FoldState)
    """Totals of the records of all ranks."""
    dead: frozenset[int] = frozenset()
    """Ranks whose process is gone although they had not finished."""
    deaths: Mapping[int, Death] = field(default_factory=dict)
    """How processes of ranks ended, as far as that is known."""
    stopped_pids: Mapping[int, int] = field(default_factory=dict)
    """rank -> pid of its process that is stopped (SIGSTOP or a debugger). No budget applies."""
    stopped_workers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank -> pids of its DataLoader workers that are stopped."""
    silent_s: Mapping[int, float] = field(default_factory=dict)
    """Ranks that have a process but no pulse yet -> seconds since the process was first seen."""
    oom_kills: int | None = None
    """Processes that the kernel's out-of-memory killer ended recently; None if unknown."""
    cpu_delays: Mapping[int, float] = field(default_factory=dict)
    """rank -> fraction of the last seconds in which its main thread waited for a processor."""
    evidence: Evidence | None = None
    """The last evidence that was collected."""
    evidence_expected: bool = False
    """True if evidence will be collected for suspects, so pulses need not decide alone."""
    host: HostEvidence | None = None
    """The current condition of the machine."""
    gpu_verdicts: Sequence[Verdict] = ()
    """Active findings about GPUs."""


def verdict_key(verdict: Verdict) -> str:
    """Return the key that identifies a verdict from one judgement to the next."""
    return f"{verdict.kind} {','.join(map(str, verdict.culprits))}"
