"""What is known of every rank at one suspicious moment, and the diagnosis made of it. Pure.

``training/supervise/watchdog/gather_evidence.py`` fills these in, ``training/diagnosis/rules``
reads them, and they are kept as JSON (``run_snapshot.to_json``, ``json_decoder.from_json``).
Missing is ``None``; ``missing`` says in words why a value is missing. Times ending in
``_at`` are unix seconds, ``_s`` seconds, shares 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ltui.training.state.json_decoder import from_json
from ltui.training.state.run_snapshot import Verdict, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One call: ``function`` at ``file``:``line``."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack:
    """The stack of one thread, innermost call first."""

    name: str
    main: bool = False
    frames: tuple[Frame, ...] = ()
    source: str = "thread"
    """Who read it: ``thread`` (the rank's own witness), ``signal`` (faulthandler), ``py-spy``."""
    native_id: int | None = None
    """The kernel's number of the thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessActivity:
    """One process over a sampling interval, from ``/proc``."""

    pid: int
    name: str | None = None
    """``comm``; DataLoader workers are ``pt_data_worker``."""
    state: str | None = None
    """``R S D T t Z``; None where the process is gone."""
    wait_channel: str | None = None
    """Of the main thread, where the kernel tells."""
    interval_s: float | None = None
    """Between the two looks that the next five come from."""
    cpu_share: float | None = None
    """Of one core, all threads together."""
    switches: int | None = None
    """Context switches of the main thread."""
    run_delay_share: float | None = None
    """Time that the main thread was ready and had no processor."""
    read_bytes: int | None = None
    written_bytes: int | None = None
    rss_bytes: int | None = None
    signals_caught: tuple[str, ...] = ()
    signals_pending: tuple[str, ...] = ()

    @property
    def frozen(self) -> bool | None:
        """Neither switched nor computed nor moved bytes, nor waited for a processor; None where
        that is not known."""
        if self.switches is None or self.cpu_share is None or self.interval_s is None:
            return None
        moved = (self.read_bytes or 0) + (self.written_bytes or 0)
        # Who waits for a worker or in poll wakes every few seconds to look around.
        still = self.switches <= self.interval_s // 4 and self.cpu_share < 0.02 and moved == 0
        return still and self.state != "R"

    @property
    def starved(self) -> bool:
        """Ready for much of the time, and without a processor."""
        if (self.run_delay_share or 0.0) > 0.3:
            return True
        # The kernel counts a wait for a processor when it is over.
        return self.state == "R" and self.switches == 0 and (self.cpu_share or 0.0) < 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvidence:
    """A DataLoader worker, or another child of a rank."""

    process: ProcessActivity
    stacks: tuple[ThreadStack, ...] = ()
    loader: bool = True
    """Whether torch's DataLoader started it."""
    gone: bool = False
    exit_reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One entry of PyTorch's flight recorder."""

    group: str
    seq: int
    op: str
    """``all_reduce``, ``broadcast``, without the back end."""
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    retired: bool = False
    """Complete, as the recorder says it."""
    p2p: bool = False
    call_site: Frame | None = None
    """The innermost call outside of torch and Lightning; None where there is none."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence:
    """Everything known of one rank."""

    rank: int
    pid: int | None = None
    alive: bool | None = None
    how_ended: str | None = None
    """``killed by SIGKILL``, ``exit code 3``; None while it runs or where nobody knows."""
    phase: str | None = None
    epoch: int | None = None
    batch: int | None = None
    global_step: int | None = None
    still_s: float | None = None
    """Since the pulse last changed."""
    outcome: str | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    """Epoch -> batches done in it so far, of the last epochs."""
    barrier: str | None = None
    """Lightning's name of the barrier that the rank stands in now."""
    beat_age_s: float | None = None
    """Since the rank's own witness thread last ran; large: something holds the GIL."""
    joined: bool | None = None
    """Whether ``init_process_group`` has returned in this process."""
    process: ProcessActivity | None = None
    stacks: tuple[ThreadStack, ...] = ()
    earlier_stacks: tuple[ThreadStack, ...] = ()
    """The main thread a moment before, to tell one line from many."""
    workers: tuple[WorkerEvidence, ...] = ()
    last_enqueued: Mapping[str, int] = field(default_factory=dict)
    """Process group -> sequence number."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group -> its ranks, of the groups that the rank belongs to."""
    collectives: tuple[Collective, ...] = ()
    """The last ones, oldest first."""
    exception: Mapping[str, Any] | None = None
    """``type``, ``message``, ``traceback`` as it passed."""
    unacknowledged_bytes: int | None = None
    """Sent to peers and not acknowledged."""
    retransmits: int | None = None
    gpu: Mapping[str, Any] | None = None
    log_tail: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """What could not be had of this rank and why."""

    @property
    def main_stack(self) -> ThreadStack | None:
        return next((s for s in self.stacks if s.main), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvidence:
    """The machine that the ranks of an evidence run on."""

    host: str | None = None
    cores: int | None = None
    load: float | None = None
    """Runnable processes, mean of the last minute."""
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Of the control group of the ranks."""
    memory_used_bytes: int | None = None
    """Beside ``memory_limit_bytes``."""
    oom_kills: int | None = None
    """In the last half minute: the kernel's count, else the control group's."""
    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One round of looking closely."""

    taken_at: float
    taken_ns: int
    """CLOCK_MONOTONIC when the round ended."""
    ranks: Mapping[int, RankEvidence] = field(default_factory=dict)
    host: HostEvidence = HostEvidence()
    missing: tuple[str, ...] = ()
    """``py-spy is not installed``, ``no permission to ptrace: ...``: with how to allow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackGroup:
    """Threads or processes whose stacks are the same."""

    who: tuple[str, ...]
    """``rank 0``, ``worker 4711 of rank 1``."""
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePosition:
    """Where one rank stands among the collectives of one process group."""

    rank: int
    group: str
    last_enqueued: int | None
    last_done: int | None
    waits_in: Collective | None
    """The oldest that it enqueued and that is not complete."""
    barrier: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The document of ``ltui diagnose``."""

    run: str
    attempt: int
    taken_at: float
    headline: str
    """One sentence: the gravest verdict's cause, or that nothing is wrong and who is slowest."""
    verdicts: tuple[Verdict, ...] = ()
    evidence: Evidence | None = None
    """None where only what the store kept is known."""
    wavefront: tuple[CollectivePosition, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    missing: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Plain JSON values."""
        document = to_json(self)
        assert isinstance(document, dict)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Diagnosis:
        """Raises ``ValueError`` where it is none."""
        return from_json(cls, document)
