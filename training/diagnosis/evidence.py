"""Evidence: the state of every rank when a run is suspicious, and the diagnosis from it. Pure.

``training/supervise/gather_evidence.py`` collects it and the rules here read it.
It is stored as JSON by field name (``json_codec``), so fields
keep their names. A missing value is ``None``, and ``missing`` contains a sentence that says why.
An agent of another machine sends the document of its shortened evidence. Its times are those of its
own clocks; ``merge_evidence`` moves them to the clocks of node 0, which the judge uses.
Names that end in ``_at`` are unix times in seconds, ``_s`` are seconds, and shares are fractions
from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.diagnosis.sample_report import SampleReport
from ltui.training.json_codec import from_json, to_json
from ltui.training.state.run_snapshot import Verdict

D = TypeVar("D", bound="_Document")


class _Document(Struct, frozen=True, kw_only=True):
    """What is stored, or sent to another machine, as a JSON document."""

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_document(cls: type[D], document: Mapping[str, Any]) -> D:
        """Return what a JSON document holds; raise ``ValueError`` for any other document."""
        return from_json(cls, document, tolerant=True)


class Frame(Struct, frozen=True, kw_only=True):
    """One frame of a stack: ``function`` at ``file``:``line``."""

    file: str
    line: int
    function: str


class ThreadStack(Struct, frozen=True, kw_only=True):
    """The stack of one thread, innermost call first."""

    name: str
    main: bool = False
    frames: tuple[Frame, ...] = ()
    source: str = "thread"
    """Reader of the stack: ``thread`` (heartbeat), ``signal`` (faulthandler) or ``py-spy``."""
    native_id: int | None = None
    """The kernel's id of the thread."""


class ProcessActivity(Struct, frozen=True, kw_only=True):
    """The activity of one process during a sampling interval, from ``/proc``."""

    pid: int
    name: str | None = None
    """``comm``; DataLoader workers are ``pt_data_worker``."""
    state: str | None = None
    """``R``, ``S``, ``D``, ``T``, ``t`` or ``Z``; None if the process is gone."""
    exiting: bool = False
    """True if it has ended and the kernel frees its memory and devices."""
    wait_channel: str | None = None
    """Kernel function in which the main thread waits; None if the kernel does not show it."""
    interval_s: float | None = None
    """Seconds between the two samples from which the next five values are computed."""
    cpu_share: float | None = None
    """Fraction of one core that all threads together used."""
    switches: int | None = None
    """Context switches of the main thread."""
    run_delay_share: float | None = None
    """Fraction of time in which the main thread was ready but had no processor."""
    read_bytes: int | None = None
    written_bytes: int | None = None
    rss_bytes: int | None = None
    signals_caught: tuple[str, ...] = ()
    signals_pending: tuple[str, ...] = ()

    @property
    def frozen(self) -> bool | None:
        """True if it neither switched, computed, moved bytes nor waited for a processor.

        None if that is unknown.
        """
        if self.switches is None or self.cpu_share is None or self.interval_s is None:
            return None
        moved = (self.read_bytes or 0) + (self.written_bytes or 0)
        # A process that waits for a worker or in poll wakes up every few seconds.
        still = self.switches <= self.interval_s // 4 and self.cpu_share < 0.02 and moved == 0
        return still and self.state != "R"

    @property
    def starved(self) -> bool:
        """True if it was ready to run for much of the time but had no processor."""
        if (self.run_delay_share or 0.0) > 0.3:
            return True
        # The kernel counts a wait for a processor only when it is over.
        return self.state == "R" and self.switches == 0 and (self.cpu_share or 0.0) < 0.02


class WorkerEvidence(Struct, frozen=True, kw_only=True):
    """A DataLoader worker, or another child of a rank."""

    process: ProcessActivity
    stacks: tuple[ThreadStack, ...] = ()
    loader: bool = True
    """True if torch's DataLoader started it."""
    gone: bool = False
    exit_reason: str | None = None


class Collective(Struct, frozen=True, kw_only=True):
    """One entry of PyTorch's flight recorder: a collective that a rank enqueued."""

    group: str
    seq: int
    op: str
    """Name of the operation without the back end: ``all_reduce``, ``broadcast``."""
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    retired: bool = False
    """True if the recorder shows it as complete."""
    p2p: bool = False
    call_site: Frame | None = None
    """The innermost call outside of torch and Lightning, if there is one."""
    frames: tuple[Frame, ...] = ()
    """The innermost frame first."""


class RankEvidence(Struct, frozen=True, kw_only=True):
    """Everything that was observed of one rank."""

    rank: int
    node: int = 0
    """Number of the machine on which it runs."""
    taken_ns: int | None = None
    """CLOCK_MONOTONIC of node 0 at the end of its machine's round; None: ``Evidence.taken_ns``."""
    pid: int | None = None
    alive: bool | None = None
    how_ended: str | None = None
    """``killed by SIGKILL``, ``exit code 3``; None while it runs, or if unknown."""
    phase: str | None = None
    epoch: int | None = None
    batch: int | None = None
    global_step: int | None = None
    still_s: float | None = None
    """Seconds since the pulse last changed."""
    outcome: str | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    """epoch -> batches completed in it, for the last epochs."""
    barrier: str | None = None
    """Lightning's name of the barrier in which the rank waits."""
    beat_age_s: float | None = None
    """Seconds since the rank's heartbeat thread last ran; large if something holds the GIL."""
    joined: bool | None = None
    """True if ``init_process_group`` has returned in this process."""
    process: ProcessActivity | None = None
    stacks: tuple[ThreadStack, ...] = ()
    earlier_stacks: tuple[ThreadStack, ...] = ()
    """The main thread shortly before, to see whether it stays on one line."""
    workers: tuple[WorkerEvidence, ...] = ()
    last_enqueued: Mapping[str, int] = field(default_factory=dict)
    """process group -> sequence number of the last collective that the rank enqueued."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """process group -> its ranks, for the groups of which the rank is a member."""
    collectives: tuple[Collective, ...] = ()
    """The last collectives that the rank enqueued, the oldest first."""
    exception: Mapping[str, Any] | None = None
    """``type``, ``message`` and ``traceback`` of the exception that the rank reported."""
    unacknowledged_bytes: int | None = None
    """Bytes that were sent to peers and not acknowledged."""
    retransmits: int | None = None
    gpu: Mapping[str, Any] | None = None
    log_tail: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Sentences that say what could not be collected from this rank, and why."""

    @property
    def main_stack(self) -> ThreadStack | None:
        return next((s for s in self.stacks if s.main), None)


class HostEvidence(Struct, frozen=True, kw_only=True):
    """The machine on which the ranks run."""

    host: str | None = None
    cores: int | None = None
    load: float | None = None
    """Mean number of runnable processes in the last minute."""
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Memory limit of the control group of the ranks."""
    memory_used_bytes: int | None = None
    """Memory that counts against ``memory_limit_bytes``."""
    oom_kills: int | None = None
    """Out-of-memory kills in the last half minute, by the kernel or else by the control group."""
    shm_free_bytes: int | None = None
    shm_total_bytes: int | None = None


class Evidence(_Document, frozen=True, kw_only=True):
    """The result of one round of evidence collection."""

    taken_at: float
    taken_ns: int
    """CLOCK_MONOTONIC at the end of the round."""
    ranks: Mapping[int, RankEvidence] = field(default_factory=dict)
    host: HostEvidence = HostEvidence()
    missing: tuple[str, ...] = ()
    """Sentences about all ranks: ``no permission to ptrace: ...``, each with a remedy."""
    hosts: Mapping[int, HostEvidence] = field(default_factory=dict)
    """node -> the condition of that machine, of a run on several machines."""

    def taken_of(self, rank: int) -> int:
        """Return the CLOCK_MONOTONIC at the end of the round in which the rank was observed."""
        rank_evidence = self.ranks.get(rank)
        own_ns = rank_evidence.taken_ns if rank_evidence is not None else None
        return self.taken_ns if own_ns is None else own_ns


class StackGroup(Struct, frozen=True, kw_only=True):
    """Processes whose main threads have the same stack."""

    who: tuple[str, ...]
    """Names of the processes: ``rank 0``, ``worker 4711 of rank 1``."""
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]


class CollectivePosition(Struct, frozen=True, kw_only=True):
    """How far one rank is in the sequence of collectives of one process group."""

    rank: int
    group: str
    last_enqueued: int | None = None
    last_done: int | None = None
    waits_in: Collective | None = None
    """The oldest collective that the rank enqueued and that is not complete."""
    barrier: str | None = None


class Diagnosis(_Document, frozen=True, kw_only=True):
    """The diagnosis of a run, which ``ltui diagnose`` prints."""

    run: str
    attempt: int
    taken_at: float
    headline: str
    """The most severe verdict's cause, or a sentence about the health of the ranks."""
    verdicts: tuple[Verdict, ...] = ()
    evidence: Evidence | None = None
    """None if only the stored history of the run is available."""
    wavefront: tuple[CollectivePosition, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    samples: SampleReport | None = None
    """The last samples of a slow and a normal rank, if they were taken."""
    missing: tuple[str, ...] = ()


_COLLECTIVES = 64
"""Collectives of each rank that are sent, the last ones, and all that are not complete."""
_FRAMES, _THREADS = 64, 8
"""Innermost frames of a stack, and threads of a process, that are sent."""


def shorten_for_link(evidence: Evidence) -> Evidence:
    """Return the evidence without what the judge does not need, to send it to node 0.

    The stack of every recorded collective makes most of it; the line of the call remains. What
    several ranks report alike, the members of process groups, is sent once.
    """
    sent: set[tuple[str, tuple[int, ...]]] = set()
    ranks = {}
    for rank, rank_evidence in evidence.ranks.items():
        groups = {}
        for group, members in rank_evidence.groups.items():
            groups[group] = () if (group, members) in sent else members
            sent.add((group, members))
        ranks[rank] = replace(
            rank_evidence,
            groups=groups,
            collectives=_last_collectives(rank_evidence.collectives),
            stacks=_short_stacks(rank_evidence.stacks),
            earlier_stacks=_short_stacks(rank_evidence.earlier_stacks),
            workers=tuple(
                replace(w, stacks=_short_stacks(w.stacks)) for w in rank_evidence.workers
            ),
        )
    return replace(evidence, ranks=ranks)


def _last_collectives(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    older = max(0, len(collectives) - _COLLECTIVES)
    kept = (*(c for c in collectives[:older] if not c.retired), *collectives[older:])
    return tuple(replace(c, frames=()) for c in kept)


def _short_stacks(stacks: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
    """Return the main thread and the first others, with their innermost frames."""
    main_first = sorted(stacks, key=lambda stack: not stack.main)
    return tuple(replace(s, frames=s.frames[:_FRAMES]) for s in main_first[:_THREADS])


def merge_evidence(
    parts: Mapping[int, Evidence],
    clock_offsets_ns: Mapping[int, int] | None = None,
    wall_offsets_s: Mapping[int, float] | None = None,
    names: Mapping[int, str] | None = None,
) -> Evidence:
    """Return the evidence of all machines as one; ``parts`` is node -> what was collected there.

    ``clock_offsets_ns`` and ``wall_offsets_s`` are what to add to a machine's CLOCK_MONOTONIC and
    unix times, ``names`` the names of machines for sentences. Each rank keeps the time of its own
    machine's round. If two parts contain one rank, the newer one counts.
    """
    if not parts:
        raise ValueError("there is no evidence to merge")
    clock_offsets_ns, wall_offsets_s = clock_offsets_ns or {}, wall_offsets_s or {}
    ranks: dict[int, RankEvidence] = {}
    missing: list[str] = []
    taken_ns = {node: p.taken_ns + clock_offsets_ns.get(node, 0) for node, p in parts.items()}
    for node in sorted(parts, key=lambda n: taken_ns[n]):
        for rank, rank_evidence in parts[node].ranks.items():
            ranks[rank] = replace(rank_evidence, node=node, taken_ns=taken_ns[node])
    for node, part in sorted(parts.items()):
        name = (names or {}).get(node)
        missing += [f"{name}: {sentence}" if name else sentence for sentence in part.missing]
    newest = max(parts, key=lambda n: taken_ns[n])
    return Evidence(
        taken_at=parts[newest].taken_at + wall_offsets_s.get(newest, 0.0),
        taken_ns=taken_ns[newest],
        ranks=dict(sorted(ranks.items())),
        host=parts[0].host if 0 in parts else HostEvidence(),
        hosts={node: part.host for node, part in sorted(parts.items())},
        missing=tuple(dict.fromkeys(missing)),
    )
