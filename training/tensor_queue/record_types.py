"""What travels through a rank's tensor queue: record kinds, the step vector, phases, the pulse.

Standard library only, because both the rank (torch, perhaps no NumPy) and the watchers (NumPy, no
torch) import it. Numbers here are the wire format: append, never renumber.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class RecordKind(IntEnum):
    """What a record's payload and label hold."""

    STEP = 1
    """float64[len(StepField)], see ``StepField``; no label. One a training batch."""
    METRICS = 2
    """float64[n]; label ``{"names": [n strings], "step": int, "epoch": int, "t": unix s}``."""
    EVENT = 3
    """Empty payload; label ``{"kind": str, "text": str, ...}``, see ``docs/architecture.md``."""
    HELLO = 4
    """Empty payload; label with who the rank is: first record of a rank's queue."""
    PLAN = 5
    """Empty payload; label with how long the run will be: max_steps, max_epochs, batches."""


class StepField(IntEnum):
    """Index into the float64 vector of a ``RecordKind.STEP`` record. NaN where not known."""

    GLOBAL_STEP = 0
    """Optimizer steps completed, this batch included."""
    EPOCH = 1
    BATCH = 2
    """Batch index within the epoch."""
    SAMPLES = 3
    """Samples of this batch on this rank."""
    LOSS = 4
    """What training_step returned as loss, of this rank, not reduced."""
    LR = 5
    """Learning rate of the first parameter group."""
    STEP_S = 6
    """Seconds from the end of the batch before to the end of this one."""
    FETCH_S = 7
    """Seconds the rank waited for its data."""
    FORWARD_S = 8
    BACKWARD_S = 9
    OPTIMIZER_S = 10
    MEMORY_BYTES = 11
    """Memory allocated on the device now."""
    MEMORY_PEAK_BYTES = 12
    WALL_S = 13
    """Unix time at the end of the batch."""
    STEPPED = 14
    """1.0 where the optimizer stepped in this batch, 0.0 for an accumulating one."""
    TRANSFER_S = 15
    """Seconds moving the batch to the device (host side)."""


class Phase(IntEnum):
    """What a rank is doing, as its pulse says."""

    UNKNOWN = 0
    STARTING = 1
    SETUP = 2
    SANITY = 3
    FETCH = 4
    TRANSFER = 5
    FORWARD = 6
    BACKWARD = 7
    OPTIMIZER = 8
    BATCH_END = 9
    VALIDATION = 10
    CHECKPOINT = 11
    EPOCH_END = 12
    TEST = 13
    PAUSED = 14
    STOPPING = 15
    TEARDOWN = 16
    ENDED = 17
    EXCEPTION = 18

    @property
    def label(self) -> str:
        """Words for people: ``fetch data``, ``backward``."""
        return _PHASE_LABELS.get(self, self.name.lower().replace("_", " "))


_PHASE_LABELS = {
    Phase.FETCH: "fetch data",
    Phase.TRANSFER: "to device",
    Phase.BATCH_END: "batch end",
}


class Outcome(IntEnum):
    """How a rank's training loop ended, as its pulse says."""

    RUNNING = 0
    FINISHED = 1
    STOPPED = 2
    """Left the loop at an agreed step, after a checkpoint (or after saying that it failed)."""
    RAISED = 3


@dataclass(frozen=True, kw_only=True)
class PulseState:
    """One consistent reading of a rank's pulse."""

    pid: int
    start_ticks: int
    """``starttime`` of /proc/PID/stat, so that a reused pid is told apart."""
    rank: int
    local_rank: int
    world_size: int
    phase: Phase
    epoch: int
    batch: int
    global_step: int
    changed_ns: int
    """CLOCK_MONOTONIC of the last change of phase, batch or step."""
    changed_wall_s: float
    outcome: Outcome
    decision_done: int
    """Id of the last control decision that this rank carried out."""
    collective_enqueued: int
    """Last collective sequence number, -1 where unknown."""
    collective_completed: int
    telemetry_ok: bool
    """False once the callback switched itself off; the reason is in an EVENT record."""
    restarts: int
    heartbeat_ns: int = 0
    """CLOCK_MONOTONIC of the last sign of life, a change or not; 0 where not known."""
