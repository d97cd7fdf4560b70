"""The one frozen picture of a run: what ``ltui show --json`` and the dashboard both show.

Pure. Missing is ``None``, never zero. Times ending in ``_at`` are unix seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from ltui.training.state.json_decoder import from_json


class RunState(str, Enum):
    """A run's state. ``LIVE`` and ``RESUMABLE`` below group them."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    """Ended by itself with an error."""
    CRASHED = "crashed"
    """Killed from outside: a rank or the engine died by a signal."""
    LOST = "lost"
    """Nothing of the run is alive and nobody saw how it ended."""


LIVE = frozenset(
    {
        RunState.QUEUED,
        RunState.STARTING,
        RunState.RUNNING,
        RunState.PAUSING,
        RunState.PAUSED,
        RunState.STOPPING,
    }
)


class RankState(str, Enum):
    """How one rank is doing."""

    STARTING = "starting"
    OK = "ok"
    RUNNING = "running"
    """Its process runs. It sends no telemetry, so nothing more is known."""
    WAITING = "waiting"
    """Still for longer than the budget, but behind another rank that holds it up."""
    STALLED = "stalled"
    PAUSED = "paused"
    DEAD = "dead"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricValue:
    last: float
    step: int
    best_min: float | None = None
    best_max: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    samples_per_s: float | None = None
    """All ranks together, over the last seconds."""
    best_samples_per_s: float | None = None
    steps_per_s: float | None = None
    data_wait_share: float | None = None
    """Share of the step spent waiting for data, 0 to 1, mean over ranks."""
    fetch_share: float | None = None
    forward_share: float | None = None
    backward_share: float | None = None
    optimizer_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSnapshot:
    rank: int
    local_rank: int | None = None
    pid: int | None = None
    host: str | None = None
    device: str | None = None
    """``cpu`` or ``cuda:N``."""
    gpu_uuid: str | None = None
    state: RankState = RankState.UNKNOWN
    phase: str | None = None
    epoch: int | None = None
    batch: int | None = None
    global_step: int | None = None
    age_s: float | None = None
    """Seconds since the pulse last changed."""
    samples_per_s: float | None = None
    step_s: float | None = None
    """Median seconds of the recent steps."""
    data_wait_share: float | None = None
    recent_step_s: tuple[float, ...] = ()
    """Step times, oldest first, at most 32."""
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    exit_code: int | None = None
    note: str | None = None
    """Why, in a few words: ``killed by SIGKILL``, ``telemetry off: ...``."""
    missed_records: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcessSnapshot:
    """A process that holds memory of a GPU."""

    pid: int
    owner: str
    """``rank``, ``run`` (another process of this run), ``foreign``, ``display``, or ``unseen``: the
    driver names it, this machine does not show it, so whose it is is unknown."""
    rank: int | None = None
    memory_bytes: int | None = None
    user: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSnapshot:
    index: int
    uuid: str | None = None
    name: str | None = None
    utilisation_percent: float | None = None
    memory_utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    fan_percent: float | None = None
    ranks: tuple[int, ...] = ()
    error: str | None = None
    sampled_at: float | None = None
    label: str | None = None
    """For people where it isn't ``index``: ``3/1`` is MIG slice 1 of GPU 3."""
    mig_parent: int | None = None
    """Of a MIG slice: the index of its GPU."""
    memory_temperature_c: float | None = None
    slowdown_temperature_c: float | None = None
    sm_clock_max_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """In words; empty: nothing holds the clocks down."""
    performance_state: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_tx_bytes_per_s: float | None = None
    """From the GPU."""
    pcie_rx_bytes_per_s: float | None = None
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    nvlink_errors: int | None = None
    ecc_corrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    repair_pending: bool | None = None
    """Faulty memory waits for a reset to be taken out of use."""
    repair_failed: bool | None = None
    sm_activity: float | None = None
    """GPM, 0 to 1, like the three below; None where the GPU doesn't offer it."""
    sm_occupancy: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    processes: tuple[GpuProcessSnapshot, ...] | None = None
    xid_code: int | None = None
    """The last XID error, and when it was read."""
    xid_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    kind: str
    level: str
    """``dead``, ``stalled``, ``slow`` or ``warning``."""
    culprits: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    place: str | None = None
    cause: str
    remedy: str | None = None
    confidence: float = 1.0
    began: float | None = None
    ended: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    path: str
    global_step: int
    epoch: int | None = None
    ok: bool | None = None
    """Size and checksum as its manifest says; None where that was not looked at."""
    reason: str | None = None
    """``stop``, ``request``, ``periodic``, ``end``."""
    saved_at: float | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeWarning:
    """Something about how the run is set up that freezes runs or makes their figures wrong."""

    what: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    id: str
    name: str
    state: RunState
    detail: str | None = None
    """The state in a sentence: ``stopped at step 1204, checkpoint verified``."""
    preset: str | None = None
    command: tuple[str, ...] | None = None
    """For ``ltui exec``: the user's command."""
    attempt: int = 1
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    supervisor_pid: int | None = None
    world_size: int | None = None
    epoch: int | None = None
    global_step: int | None = None
    max_steps: int | None = None
    max_epochs: int | None = None
    batches_per_epoch: int | None = None
    elapsed_s: float | None = None
    """Of this attempt."""
    eta_s: float | None = None
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    throughput: Throughput = Throughput()
    ranks: tuple[RankSnapshot, ...] = ()
    gpus: tuple[GpuSnapshot, ...] = ()
    gpu_note: str | None = None
    """Why there are no GPU readings: ``no NVIDIA driver on this machine``."""
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[CheckpointInfo, ...] = ()
    script_checkpoints: tuple[CheckpointInfo, ...] = ()
    """Saved by the script's own callbacks (ModelCheckpoint) and still there. A resume does not use
    them: ``reason`` says by which metric they were kept."""
    history_note: str | None = None
    """Set while the history is incomplete: ``disk full since 14:03``, ``records lost: 120``."""
    log_dir: str | None = None
    run_dir: str | None = None
    taken_at: float | None = None
    flops_per_batch: float | None = None
    """Of one rank, counted once where that was asked for (LTUI_COUNT_FLOPS)."""
    model_flop_utilisation: float | None = None
    """0 to 1; None unless the count and every device's peak are known."""
    changes: tuple[str, ...] = ()
    """What ``--set`` changed for this attempt: ``trainer.max_epochs=60``."""
    restarted_because: str | None = None
    """Why nobody had to ask for this attempt; None where a person did."""
    stops: tuple[str, ...] = ()
    """When the run stops by itself: ``at step 500``, ``when val/loss < 0.2``."""
    cautions: tuple[FreezeWarning, ...] = ()


HEAD_FIELDS = (
    "id", "name", "state", "detail", "preset", "command", "attempt", "created_at", "started_at",
    "ended_at", "exit_code", "supervisor_pid", "world_size", "epoch", "global_step", "max_steps",
    "max_epochs", "elapsed_s", "eta_s", "metrics", "throughput", "run_dir",
)  # fmt: skip
"""What ``ltui runs --json`` gives of each run."""


def to_json(value: Any) -> Any:
    """A snapshot (or any value in one) as plain JSON values; NaN and infinities become ``None``."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def head_json(snapshot: RunSnapshot) -> dict[str, Any]:
    """The head of a run: ``HEAD_FIELDS`` of ``to_json``."""
    return {name: to_json(getattr(snapshot, name)) for name in HEAD_FIELDS}


def snapshot_from_json(document: dict[str, Any]) -> RunSnapshot:
    """Return the snapshot that ``to_json`` wrote as ``document``; unknown keys are ignored.

    Raise ``ValueError`` if a required field is missing or has the wrong form.
    """
    try:
        return from_json(RunSnapshot, document, tolerant=True)
    except ValueError as error:
        raise ValueError(f"not a run snapshot: {error.__cause__}") from error
