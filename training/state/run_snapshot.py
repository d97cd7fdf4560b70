"""Snapshot of a run: the one frozen value that ``ltui show --json`` and the dashboard both show.

Pure. A value that is unknown is ``None``, never zero. Fields that end in ``_at`` are unix times in
seconds. Field names and enum values are stored in runs and must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field

from ltui.training.json_codec import from_json, to_json
from ltui.training.state.gpu_values import GpuValues


class RunState(str, Enum):
    """State of a run. ``LIVE`` below groups the states in which it has not ended."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    """The run ended by itself with an error."""
    CRASHED = "crashed"
    """The run was killed from outside: a signal ended a rank or the engine."""
    LOST = "lost"
    """No process of the run is alive, and how it ended was not recorded."""


LIVE = frozenset({
    RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.PAUSING, RunState.PAUSED,
    RunState.STOPPING,
})  # fmt: skip
"""States of a run that has not ended."""


class RankState(str, Enum):
    """State of one rank."""

    STARTING = "starting"
    OK = "ok"
    RUNNING = "running"
    """The process runs but sends no telemetry, so nothing more is known."""
    WAITING = "waiting"
    """The rank makes no progress for longer than allowed because it waits for another rank."""
    STALLED = "stalled"
    PAUSED = "paused"
    DEAD = "dead"
    ENDED = "ended"
    UNKNOWN = "unknown"


class NodeState(str, Enum):
    """State of one machine of a run on several, as node 0 observes it."""

    JOINING = "joining"
    """Its agent has not connected yet."""
    CONNECTED = "connected"
    SILENT = "silent"
    """Its agent has not reported for some seconds, and the reason is not known yet."""
    UNREACHABLE = "unreachable"
    """Nothing answers at its address: the link is cut or the machine is down."""
    FROZEN = "frozen"
    """The machine answers but its agent does not run: it is stopped or starved."""
    AGENT_DEAD = "agent dead"
    """The machine answers, and no agent runs there."""
    GONE = "gone"
    """It was unreachable for longer than the limit, so its ranks count as lost."""
    ENDED = "ended"
    """Its engine has ended and all of its processes have exited."""


class NodeSnapshot(Struct, frozen=True, kw_only=True):
    """One machine of a run on several machines."""

    node: int
    """Number of the machine, from 0. Node 0 holds the run directory."""
    name: str
    """Name for display, unique within the run: the host name, or ``host#2`` for a second one."""
    host: str | None = None
    address: str | None = None
    state: NodeState = NodeState.JOINING
    ranks: tuple[int, ...] = ()
    link_age_s: float | None = None
    """Seconds since the last report of its agent; None for node 0 and before the first report."""
    clock_skew_s: float | None = None
    """Seconds by which its wall clock is ahead of node 0's."""
    note: str | None = None
    """Reason for the state in a few words: ``no answer from 10.0.0.2 for 12 s``."""
    cut_s: float | None = None
    """Seconds for which it could not be reached the last time; None if it always could."""
    restored_s: float | None = None
    """Seconds since the end of that."""


class JobSnapshot(Struct, frozen=True, kw_only=True):
    """The job of SLURM that a run runs in."""

    id: str
    nodes: int = 1
    node_names: str | None = None
    """Names of its nodes: ``n[07-08]``."""
    gpus: int | None = None
    """Number of GPUs of all nodes together; None if the job has requested none."""
    ends_at: float | None = None
    """Unix time of its time limit; None if it is unknown."""
    partition: str | None = None


class MetricValue(Struct, frozen=True, kw_only=True):
    """Last and best values of a metric. ``last`` may be NaN."""

    last: float
    step: int
    best_min: float | None = None
    best_max: float | None = None
    measured: bool = False
    """True if ltui has measured it; False if the program logs it."""


class Throughput(Struct, frozen=True, kw_only=True):
    """Current speed of a run; fractions are between 0 and 1."""

    samples_per_s: float | None = None
    """Samples per second of all ranks together over the last seconds."""
    best_samples_per_s: float | None = None
    steps_per_s: float | None = None
    data_wait_share: float | None = None
    """Fraction of the step spent waiting for data; a mean over the ranks."""
    fetch_share: float | None = None
    forward_share: float | None = None
    backward_share: float | None = None
    optimizer_share: float | None = None


class RankSnapshot(Struct, frozen=True, kw_only=True):
    """One rank of a run."""

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
    """Seconds since the rank's pulse last changed."""
    samples_per_s: float | None = None
    step_s: float | None = None
    """Median duration of the recent steps in seconds."""
    data_wait_share: float | None = None
    recent_step_s: tuple[float, ...] = ()
    """Durations of up to 32 recent steps in seconds, oldest first."""
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    exit_code: int | None = None
    note: str | None = None
    """Reason for the state in a few words: ``killed by SIGKILL``, ``telemetry off: ...``."""
    missed_records: int = 0
    """Number of records that were lost."""
    node: int = 0
    """Number of the machine on which it runs."""


class GpuProcessSnapshot(Struct, frozen=True, kw_only=True):
    """A process that uses memory of a GPU."""

    pid: int
    owner: str
    """``rank``, ``run`` (another process of this run), ``foreign``, ``display`` or ``unseen``.

    An ``unseen`` process is reported by the driver but not visible here, so its owner is unknown.
    """
    rank: int | None = None
    memory_bytes: int | None = None
    user: str | None = None
    name: str | None = None


NODE_GPU_STRIDE = 1_000_000
"""Difference between the numbers of the same GPU index on two neighbouring machines."""


class GpuSnapshot(GpuValues, frozen=True, kw_only=True):
    """One GPU or MIG slice, with the ranks and processes that use it."""

    ranks: tuple[int, ...] = ()
    label: str | None = None
    """Label for display if it is not ``index``: ``3/1`` is MIG slice 1 of GPU 3."""
    mig_parent: int | None = None
    """Index of the GPU that a MIG slice belongs to."""
    processes: tuple[GpuProcessSnapshot, ...] | None = None
    xid_code: int | None = None
    """Code of the last XID error; ``xid_at`` is when it was read."""
    xid_at: float | None = None
    node: int = 0
    """Number of the machine that it is in."""

    @property
    def number(self) -> int:
        """Number of the GPU within the run: its index on node 0, and unique over all machines."""
        return self.node * NODE_GPU_STRIDE + self.index


class Verdict(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a run: who causes it, why, and what to do.

    ``kind`` is usually a ``VerdictKind`` and ``level`` a ``VerdictLevel``. Both are plain strings,
    so that verdicts of other versions can be read.
    """

    kind: str
    level: str
    """``dead``, ``stalled``, ``slow`` or ``warning``."""
    culprits: tuple[int, ...] = ()
    """Ranks at fault; empty if no rank is."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait for the culprits."""
    nodes: tuple[int, ...] = ()
    """Machines at fault, if the cause is a machine or its link; empty otherwise."""
    place: str | None = None
    """Place in the code or phase of training."""
    cause: str
    remedy: str | None = None
    confidence: float = 1.0
    """Certainty of the cause, from 0 to 1."""
    began: float | None = None
    """Unix time in seconds."""
    ended: float | None = None
    """Unix time in seconds; None while the verdict is active."""
    evidence: dict[str, Any] = field(default_factory=dict)


class LimitKind(str, Enum):
    """What limits the speed of a run. The values are stored and must not change."""

    DATA = "data"
    HOST = "host"
    """Python and many small operators."""
    DEVICE = "device"
    """Computing: nothing else limits the speed."""
    COMMUNICATION = "communication"
    RANK = "rank"
    """Another rank that all others wait for."""
    VALIDATION = "validation"
    CHECKPOINTS = "checkpoints"
    UNKNOWN = "unknown"


class Limit(Struct, frozen=True, kw_only=True):
    """What limits the speed of a run, and how that is known."""

    kind: str
    """A ``LimitKind``; a plain string, so that limits of other versions can be read."""
    seconds: float | None = None
    """Seconds that it takes in each step."""
    share: float | None = None
    """Fraction of the time."""
    rank: int | None = None
    """The rank that others wait for."""
    evidence: tuple[str, ...] = ()

    @property
    def slows(self) -> bool:
        """Whether it is known, and a reason to change anything."""
        return self.kind not in (LimitKind.DEVICE, LimitKind.UNKNOWN)


def health_word(limit: Limit | None) -> str:
    """Return how a run without a verdict is called."""
    return "No rank stalls" if limit is not None and limit.slows else "Healthy"


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    """One checkpoint, as its manifest describes it."""

    path: str
    global_step: int
    epoch: int | None = None
    ok: bool | None = None
    """True if size and checksum match the manifest; None if that was not checked."""
    reason: str | None = None
    """``stop``, ``request``, ``periodic``, ``end``."""
    saved_at: float | None = None
    size_bytes: int | None = None
    weights: str | None = None
    """``finite``, ``NaN`` or ``inf``; None if the weights were not checked when it was saved."""
    attempt: int | None = None
    """The attempt that saved it; 0 if it was imported from another run."""
    fit: int | None = None
    """Number of the script's ``fit`` call that saved it."""
    superseded: bool = False
    """True if its step is no longer part of the run, which was resumed from an earlier step."""


class FreezeWarning(Struct, frozen=True, kw_only=True):
    """A property of the setup that may freeze the run or make its figures wrong."""

    what: str
    remedy: str | None = None


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """A run at one point in time."""

    id: str
    name: str
    state: RunState
    detail: str | None = None
    """Description of the state: ``stopped at step 1204, checkpoint verified``."""
    preset: str | None = None
    command: tuple[str, ...] | None = None
    """The user's command in a run started by ``ltui exec``."""
    program: str | None = None
    """What kind of program the command is, as ``PyTorch DDP``; None with Lightning's Trainer."""
    saves_checkpoints: bool | None = True
    """False if ltui cannot save a checkpoint of this program; None while that is not known."""
    stop_signal: str = "SIGTERM"
    """The signal that ends a program of which ltui cannot save a checkpoint."""
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
    """Seconds since this attempt started."""
    eta_s: float | None = None
    metrics: dict[str, MetricValue] = field(default_factory=dict)
    throughput: Throughput = Throughput()
    ranks: tuple[RankSnapshot, ...] = ()
    nodes: tuple[NodeSnapshot, ...] = ()
    """The machines of a run on several machines, by number; empty on one machine."""
    gpus: tuple[GpuSnapshot, ...] = ()
    gpu_note: str | None = None
    """Reason why there are no GPU readings: ``no NVIDIA driver on this machine``."""
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[CheckpointInfo, ...] = ()
    script_checkpoints: tuple[CheckpointInfo, ...] = ()
    """Existing checkpoints of the script's own callbacks (ModelCheckpoint).

    A resume does not use them. ``reason`` says by which metric they were kept.
    """
    history_note: str | None = None
    """Reason why the history is incomplete: ``disk full since 14:03``, ``records lost: 120``."""
    combined_values: int = 0
    """Logged values that were combined with others, because a step logged more than 1,000."""
    log_dir: str | None = None
    run_dir: str | None = None
    taken_at: float | None = None
    flops_per_batch: float | None = None
    """Floating-point operations of one rank per batch; counted only if LTUI_COUNT_FLOPS is set."""
    model_flop_utilisation: float | None = None
    """Fraction from 0 to 1; None unless the count and the peak of every device are known."""
    changes: tuple[str, ...] = ()
    """Settings that ``--set`` changed for this attempt: ``trainer.max_epochs=60``."""
    restarted_because: str | None = None
    """Reason for an automatic restart; None if a user started this attempt."""
    stops: tuple[str, ...] = ()
    """Pending stop conditions: ``at step 500``, ``when val/loss < 0.2``."""
    cautions: tuple[FreezeWarning, ...] = ()
    checkpoint_seconds: tuple[float, ...] = ()
    """How long the last checkpoints took to save, oldest first, those of earlier attempts too."""
    limit: Limit | None = None
    """What limits the speed in the last half minute, of an ended run for the longest time; None if
    too little was measured."""
    job: JobSnapshot | None = None
    """The SLURM job that the run runs in; None outside of one."""


HEAD_FIELDS = (
    "id", "name", "state", "detail", "preset", "command", "attempt", "created_at", "started_at",
    "ended_at", "exit_code", "supervisor_pid", "world_size", "epoch", "global_step", "max_steps",
    "max_epochs", "elapsed_s", "eta_s", "metrics", "throughput", "run_dir",
)  # fmt: skip
"""Fields of each run in ``ltui runs --json``."""


def head_json(snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the ``HEAD_FIELDS`` of a snapshot as plain JSON values."""
    return {name: to_json(getattr(snapshot, name)) for name in HEAD_FIELDS}


def snapshot_from_json(document: dict[str, Any]) -> RunSnapshot:
    """Return the snapshot that ``to_json`` wrote as ``document``; unknown keys are ignored.

    Raise ``ValueError`` if a required field is missing or has the wrong form.
    """
    try:
        return from_json(RunSnapshot, document, tolerant=True)
    except ValueError as error:
        raise ValueError(f"not a run snapshot: {error.__cause__}") from error


class Event(Struct, frozen=True):
    """Something that happened in a run, for example a verdict or a saved checkpoint."""

    t: float
    """Unix time."""
    kind: str
    text: str
    """A sentence for people."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, which must be serialisable as JSON."""
    rank: int | None = None
    """The rank that reported the event. None for an event of the supervisor."""
    seq: int | None = None
    """Sequence number of the record in the queue of that rank."""
