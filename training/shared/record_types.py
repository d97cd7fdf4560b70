"""Types of the values in a rank's tensor queue: record kinds, step fields, phases, the pulse.

Standard library only, because both the rank (torch, perhaps no NumPy) and the readers (NumPy, no
torch) import it. The numbers are the wire format: append, never renumber.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class RecordKind(IntEnum):
    """Kind of a record, which determines the contents of its payload and label."""

    STEP = 1
    """Payload float64[len(StepField)]; no label. One record per training batch."""
    METRICS = 2
    """Payload float64[n], or the type of a loss that is on a GPU; label ``{"names": [n strings],
    "step": int, "epoch": int, "t": float}``. ``t`` is in unix seconds."""
    EVENT = 3
    """Empty payload; label ``{"kind": str, "text": str, ...}``, see ``docs/protocols.md``."""
    HELLO = 4
    """Empty payload; label with the identity of the rank. First record of a rank's queue."""
    PLAN = 5
    """Empty payload; label with the planned length of the run: max_steps, max_epochs, batches."""


class StepField(IntEnum):
    """Index into the float64 vector of a ``RecordKind.STEP`` record. Unknown values are NaN."""

    GLOBAL_STEP = 0
    """Optimizer steps completed, including this batch."""
    EPOCH = 1
    BATCH = 2
    """Batch index within the epoch."""
    SAMPLES = 3
    """Samples of this batch on this rank."""
    LOSS = 4
    """Loss that ``training_step`` returned on this rank, not reduced over the ranks."""
    LR = 5
    """Learning rate of the first parameter group."""
    STEP_S = 6
    """Seconds from the end of the previous batch to the end of this one."""
    FETCH_S = 7
    """Seconds that the rank waited for its data."""
    FORWARD_S = 8
    BACKWARD_S = 9
    OPTIMIZER_S = 10
    MEMORY_BYTES = 11
    """Memory allocated on the device at the end of the batch."""
    MEMORY_PEAK_BYTES = 12
    WALL_S = 13
    """Unix time at the end of the batch."""
    STEPPED = 14
    """1.0 if the optimizer stepped in this batch, 0.0 if the batch only accumulated gradients."""
    TRANSFER_S = 15
    """Seconds to move the batch to the device, measured on the host."""


class Phase(IntEnum):
    """Current activity of a rank, as published in its pulse."""

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
    COMPUTE = 19
    """Anything else in a program without a Trainer, whose parts of a step are unknown."""

    @property
    def label(self) -> str:
        """Display text such as ``fetch data`` or ``backward``."""
        return _PHASE_LABELS.get(self, self.name.lower().replace("_", " "))


_PHASE_LABELS = {
    Phase.FETCH: "fetch data",
    Phase.TRANSFER: "to device",
    Phase.BATCH_END: "batch end",
}


STEP_PHASES = frozenset(Phase(n) for n in range(Phase.FETCH, Phase.BATCH_END + 1))
"""Phases of a training step."""


class Outcome(IntEnum):
    """How a rank's training loop ended, as published in its pulse."""

    RUNNING = 0
    FINISHED = 1
    STOPPED = 2
    """Left the loop at an agreed step, after a checkpoint or after reporting that it failed."""
    RAISED = 3


@dataclass(frozen=True, kw_only=True)
class PulseState:
    """One consistent reading of a rank's pulse."""

    pid: int
    start_ticks: int
    """``starttime`` of /proc/PID/stat, which distinguishes processes with a reused pid."""
    rank: int
    local_rank: int
    world_size: int
    phase: Phase
    epoch: int
    batch: int
    global_step: int
    changed_ns: int
    """CLOCK_MONOTONIC time in ns of the last change of phase, batch or step."""
    changed_wall_s: float
    outcome: Outcome
    decision_done: int
    """Id of the last control decision that this rank has carried out."""
    telemetry_ok: bool
    """False after the telemetry callback disabled itself. An EVENT record holds the reason."""
    restarts: int
    heartbeat_ns: int = 0
    """CLOCK_MONOTONIC time in ns of the last heartbeat, with or without a change; 0 if unknown."""
    node: int = 0
    """Node on which the rank runs. ``pid`` and ``start_ticks`` mean a process of this machine only
    if it is 0. The times are those of this machine's clocks for every node."""

    @property
    def known_epoch(self) -> int | None:
        """The epoch; None before the training, and in a program whose epochs are not known (-1)."""
        return self.epoch if self.epoch >= 0 and self.phase is not Phase.STARTING else None
