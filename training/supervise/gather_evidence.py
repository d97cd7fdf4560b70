"""Collect evidence of the ranks of a run, once something is suspicious.

``collect_evidence`` takes one to three seconds, so ``evidence_collector.py`` calls it in a thread
of its own. It requests answers from the ranks' heartbeat threads, measures what every process does
during an interval, reads stacks of ranks that do not answer, and reads workers, sockets and memory.
It needs no permissions beyond the user's. ``missing`` lists what could not be collected.

An answer is a JSON file for each rank with its stacks and its last collectives. The heartbeat table
contains a few of these facts for ranks that do not answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ltui.training.diagnosis.evidence import (
    Collective,
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.stack_frames import call_site
from ltui.training.lifecycle.elastic_log import log_tail
from ltui.training.process.identity import ProcessTable
from ltui.training.process.proc_files import ProcessEntry
from ltui.training.process.process_activity import (
    LOADER_NAME,
    ProcessCounters,
    activity_between,
    read_counters,
    read_host,
    unacknowledged_tcp,
)
from ltui.training.process.stack_dumps import PySpy, dump_by_signal
from ltui.training.shared.record_types import PulseState
from ltui.training.store.run_directory import RunDir, read_json
from ltui.training.supervise.health_monitor import evidence_dir
from ltui.training.tensor_queue.heartbeat_table import LATE_S, HeartbeatState, HeartbeatTable

INTERVAL_S = 0.9
"""Seconds between the two samples of what processes do."""
_ANSWER_TIMEOUT_S = 3.0
"""Seconds that a running heartbeat thread gets to answer. It checks for requests twice a second."""
_ANSWER_POLL_S = 0.03
_MAXIMUM_WORKERS = 8
"""Maximum number of workers of one rank whose stacks are read."""
_MAXIMUM_SPIED = 6
"""Maximum number of processes that py-spy reads in one round."""
_SETTLED_S = 0.2
"""Seconds without progress after which a sample of a process may serve in later rounds."""
_STACKS_TIMEOUT_S = 0.8
"""Seconds for which stacks are read in one round."""
_TAIL_LINES = 12
"""Number of lines that are kept of a rank's log."""


class RankTarget(Struct, frozen=True, kw_only=True):
    """A rank of which evidence is to be collected, and what the supervisor already has of it."""

    rank: int
    pid: int
    pulse: PulseState | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    exception: Mapping[str, Any] | None = None
    how_ended: str | None = None
    gpu: Mapping[str, Any] | None = None


class CollectorCache(Struct):
    """Values that are kept from one round to the next."""

    samples: dict[int, ProcessCounters] = field(default_factory=dict)
    """pid -> the first sample since its rank makes no progress. A long interval distinguishes a
    process that moves once in two seconds from one that is frozen."""
    stacks: dict[int, tuple[ThreadStack, ...]] = field(default_factory=dict)
    """pid -> stacks that were read by signal before its sample. Reading makes a process move, so it
    is not repeated while the process does nothing."""


class EvidenceRequest(Struct, frozen=True, kw_only=True):
    """The input of one round."""

    run_dir: RunDir
    attempt: int
    targets: Sequence[RankTarget]
    known_workers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """rank -> pids of DataLoader workers that existed a moment ago."""
    oom_kills_before: int | None = None
    """Count of out-of-memory kills at the start of the period that is reported."""
    cache: CollectorCache = field(default_factory=CollectorCache)


def collect_evidence(request: EvidenceRequest) -> Evidence:
    """Run one round. Processes that end and missing permissions raise no exception."""
    return _Round(request).run()


class _Round:
    """One round of evidence collection."""

    def __init__(self, request: EvidenceRequest) -> None:
        self.request = request
        self.cache = request.cache
        self.folder = evidence_dir(request.run_dir, request.attempt)
        self.heartbeats = HeartbeatTable(request.run_dir.queue_dir(request.attempt))
        self.spy = PySpy()
        self.spied = 0
        self.unreadable: dict[int, list[str]] = {}
        """pid -> why its stacks cannot be read."""

    def run(self) -> Evidence:
        number = self.heartbeats.last_request() + 1
        with contextlib.suppress(OSError):
            self.heartbeats.request_evidence(number)
        requested_s = time.monotonic()
        table = ProcessTable()
        workers = self._find_workers(table)
        heartbeats = self._read_heartbeats()
        threads = {t.pid: _heartbeat_thread(heartbeats[t.rank]) for t in self.request.targets}
        threads |= {e.pid: None for entries in workers.values() for e in entries}
        self._read_stacks(table.entries, workers, heartbeats)
        before = self._with_earlier_samples(_sample(threads), workers)
        time.sleep(INTERVAL_S)
        after = _sample(threads)
        activities = {pid: activity_between(pid, before[pid], after[pid]) for pid in threads}
        self._wait_for_answers(number, requested_s)
        heartbeats = self._read_heartbeats()
        ranks = {
            t.rank: self._rank_evidence(t, number, heartbeats[t.rank], activities, workers)
            for t in self.request.targets
        }
        living_pid = next((t.pid for t in self.request.targets if t.pid in table.entries), None)
        return Evidence(
            taken_at=time.time(),
            taken_ns=time.monotonic_ns(),
            ranks=ranks,
            host=read_host(living_pid, self.request.oom_kills_before),
            missing=(self.spy.note,) if self.spy.note else (),
        )

    def _find_workers(self, table: ProcessTable) -> dict[int, list[ProcessEntry]]:
        """Return rank -> its Python children, without those that are ranks themselves."""
        rank_pids = {t.pid for t in self.request.targets}
        return {
            t.rank: [
                e
                for e in table.descendants(t.pid, rank_pids - {t.pid})
                if e.name == LOADER_NAME or e.name.startswith(("python", "pt_"))
            ]
            for t in self.request.targets
        }

    def _with_earlier_samples(
        self,
        samples: Mapping[int, ProcessCounters | None],
        workers: Mapping[int, Sequence[ProcessEntry]],
    ) -> dict[int, ProcessCounters | None]:
        """Replace samples by those of earlier rounds if the rank has made no progress since."""
        earlier, result = self.cache.samples, dict(samples)
        for target in self.request.targets:
            settled_s = _changed_s(target) + _SETTLED_S
            for pid in (target.pid, *(e.pid for e in workers[target.rank])):
                old, new = earlier.get(pid), samples[pid]
                if old is not None and new is not None and old.at_s > settled_s:
                    result[pid] = old
                elif new is not None and new.at_s > settled_s:
                    earlier[pid] = new
        return result

    def _read_stacks(
        self,
        table: Mapping[int, ProcessEntry],
        workers: Mapping[int, Sequence[ProcessEntry]],
        heartbeats: Mapping[int, HeartbeatState | None],
    ) -> None:
        """Read stacks of workers and of ranks whose heartbeat thread does not run.

        Stacks of an earlier round are kept if the rank has made no progress since. This comes
        before the processes are sampled, because reading disturbs them.
        """
        cache = self.cache
        present = {t.pid for t in self.request.targets}
        present |= {e.pid for entries in workers.values() for e in entries}
        for pid in cache.samples.keys() - present:
            del cache.samples[pid]
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        stacks: dict[int, tuple[ThreadStack, ...]] = {}
        for target in self.request.targets:
            loaders = [e for e in workers[target.rank] if e.name == LOADER_NAME]
            entries = (loaders or workers[target.rank])[:_MAXIMUM_WORKERS]
            heartbeat = heartbeats[target.rank]
            if target.pid in table and not _is_running(heartbeat):
                entries = [table[target.pid], *entries]
            for entry in entries:
                pid, sample = entry.pid, cache.samples.get(entry.pid)
                unchanged = sample is not None and sample.at_s > _changed_s(target)
                if unchanged and cache.stacks.get(pid):
                    stacks[pid] = cache.stacks[pid]
                elif entry.state not in "ZX" and time.monotonic() < deadline:
                    own_heartbeat = heartbeat if pid == target.pid else None
                    stacks[pid], self.unreadable[pid] = self._dump_stacks(pid, own_heartbeat)
        cache.stacks = stacks

    def _wait_for_answers(self, number: int, requested_s: float) -> None:
        """Wait until all running heartbeat threads have answered, or the timeout."""
        deadline = requested_s + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            if not any(
                heartbeat is not None and heartbeat.answered < number and _is_running(heartbeat)
                for heartbeat in self._read_heartbeats().values()
            ):
                return
            time.sleep(_ANSWER_POLL_S)

    def _read_heartbeats(self) -> dict[int, HeartbeatState | None]:
        """Return rank -> the heartbeat of its process, not of the process before a restart."""
        heartbeats = self.heartbeats.read()
        return {
            t.rank: h if (h := heartbeats.get(t.rank)) is not None and h.pid == t.pid else None
            for t in self.request.targets
        }

    def _rank_evidence(
        self,
        target: RankTarget,
        number: int,
        heartbeat: HeartbeatState | None,
        activities: Mapping[int, ProcessActivity],
        workers: Mapping[int, Sequence[ProcessEntry]],
    ) -> RankEvidence:
        process = activities[target.pid]
        alive = process.state is not None and process.state != "Z"
        answer = _read_answer(self.folder, target.rank, number, heartbeat)
        missing = list(answer.get("missing") or ())
        stacks = _answered_stacks(answer)
        if not stacks and alive and _is_running(heartbeat):
            # It will have answered by the next round. Signals are only for threads that cannot
            # answer: a thread that runs Python meanwhile may not survive one.
            missing.append("its telemetry thread has not answered yet")
        elif not stacks and alive:
            stacks = self._current_stacks(process, heartbeat)
            missing += self.unreadable.get(target.pid, ())
        sockets = unacknowledged_tcp(target.pid) if alive else None
        known_workers = self.request.known_workers.get(target.rank, frozenset())
        return RankEvidence(
            rank=target.rank,
            pid=target.pid,
            alive=alive,
            how_ended=target.how_ended,
            **_pulse_facts(target.pulse),
            epoch_batches=dict(target.epoch_batches),
            **_answered_facts(answer, heartbeat),
            process=process,
            stacks=stacks,
            workers=self._worker_evidence(workers[target.rank], known_workers, activities),
            exception=target.exception,
            unacknowledged_bytes=sockets[0] if sockets else None,
            retransmits=sockets[1] if sockets else None,
            gpu=target.gpu,
            log_tail=self._log_tail(target.rank) if not alive or target.exception else (),
            missing=tuple(missing),
        )

    def _dump_stacks(
        self, pid: int, heartbeat: HeartbeatState | None
    ) -> tuple[tuple[ThreadStack, ...], list[str]]:
        """Read stacks by signal, else with py-spy; return them and why they cannot be read."""
        ours = heartbeat is None or heartbeat.signal_ours
        python_stands = heartbeat is not None and not _is_running(heartbeat)
        stacks = dump_by_signal(pid, self.folder, ours=ours, python_stands=python_stands)
        if not isinstance(stacks, str):
            return stacks, []
        reason = stacks
        if self.spied >= _MAXIMUM_SPIED:
            return (), [f"no stack of process {pid}: {reason}"]
        self.spied += 1
        stacks = self.spy.stacks(pid)
        if isinstance(stacks, str):
            return (), [f"no stack of process {pid}: {reason}; {stacks}"]
        return stacks, []

    def _current_stacks(
        self, process: ProcessActivity, heartbeat: HeartbeatState | None
    ) -> tuple[ThreadStack, ...]:
        """Return the stacks that were read before the process was sampled, if they still hold.

        If there are none, or if the process has continued since, read them now. The process is then
        sampled again from here on.
        """
        cache, pid = self.cache, process.pid
        stacks = cache.stacks.get(pid, ())
        if pid in self.unreadable and not stacks:
            return ()
        if stacks and (process.frozen or process.state in ("Z", "X", "T", "t", None)):
            return stacks
        cache.stacks[pid], self.unreadable[pid] = self._dump_stacks(pid, heartbeat)
        cache.samples.pop(pid, None)
        sample = read_counters(pid, time.monotonic(), _heartbeat_thread(heartbeat))
        if sample is not None:
            cache.samples[pid] = sample
        return cache.stacks[pid]

    def _worker_evidence(
        self,
        entries: Sequence[ProcessEntry],
        known_workers: frozenset[int],
        activities: Mapping[int, ProcessActivity],
    ) -> tuple[WorkerEvidence, ...]:
        """Return evidence of the living workers of a rank, and of those that are gone."""
        workers = []
        for entry in entries:
            process = activities[entry.pid]
            if process.state is None:
                continue
            stacks = self.cache.stacks.get(entry.pid, ())
            if stacks:
                stacks = self._current_stacks(process, None)
            ended = "zombie: it has ended, and its rank has not noticed"
            workers.append(
                WorkerEvidence(
                    process=process,
                    stacks=stacks,
                    # Torch names a worker some time after the fork.
                    loader=LOADER_NAME in (entry.name, process.name),
                    exit_reason=ended if process.state == "Z" else None,
                )
            )
        gone = known_workers - {e.pid for e in entries}
        workers += [
            WorkerEvidence(process=ProcessActivity(pid=pid), gone=True) for pid in sorted(gone)
        ]
        return tuple(workers)

    def _log_tail(self, rank: int) -> tuple[str, ...]:
        path = self.request.run_dir.rank_log_path(self.request.attempt, rank)
        return tuple(log_tail(path).splitlines()[-_TAIL_LINES:])


def _sample(threads: Mapping[int, int | None]) -> dict[int, ProcessCounters | None]:
    """Sample processes; ``threads`` maps a pid to its heartbeat thread, which does not count."""
    return {pid: read_counters(pid, time.monotonic(), thread) for pid, thread in threads.items()}


def _changed_s(target: RankTarget) -> float:
    """Return the monotonic second at which the rank last made progress."""
    return target.pulse.changed_ns / 1e9 if target.pulse is not None else 0.0


def _heartbeat_thread(heartbeat: HeartbeatState | None) -> int | None:
    return heartbeat.thread_id or None if heartbeat is not None else None


def _pulse_facts(pulse: PulseState | None) -> dict[str, Any]:
    """Return the fields of ``RankEvidence`` that come from the pulse."""
    if pulse is None:
        return {}
    return {
        "phase": pulse.phase.label,
        "epoch": pulse.epoch,
        "batch": pulse.batch,
        "global_step": pulse.global_step,
        "still_s": max(0.0, (time.monotonic_ns() - pulse.changed_ns) / 1e9),
        "outcome": pulse.outcome.name.lower(),
    }


_CALLER_FRAMES = 4
"""Number of frames that are kept of a collective besides its call site."""

Answer = Mapping[str, Any]
"""The document that a heartbeat thread wrote; empty if it has not answered."""


def _read_answer(folder: Path, rank: int, number: int, heartbeat: HeartbeatState | None) -> Answer:
    """Return the rank's answer to request ``number``; empty if there is none."""
    if heartbeat is None or heartbeat.answered < number:
        return {}
    document = read_json(folder / f"rank-{rank:05d}.json") or {}
    return document if document.get("question") else {}


def _is_running(heartbeat: HeartbeatState | None) -> bool:
    """Return True if the heartbeat thread of a rank runs."""
    return heartbeat is not None and _heartbeat_age_s(heartbeat) < LATE_S


def _heartbeat_age_s(heartbeat: HeartbeatState) -> float:
    """Return the seconds since the last heartbeat."""
    return max(0.0, (time.monotonic_ns() - heartbeat.beat_ns) / 1e9)


def _answered_stacks(answer: Answer) -> tuple[ThreadStack, ...]:
    """Return the stacks of the rank's threads."""
    return tuple(
        ThreadStack(
            name=str(t["name"]),
            main=bool(t["main"]),
            native_id=t.get("native_id"),
            frames=_frames(t["frames"]),
        )
        for t in answer.get("threads") or ()
    )


def _answered_facts(answer: Answer, heartbeat: HeartbeatState | None) -> dict[str, Any]:
    """Return the fields of ``RankEvidence`` that come from the answer or from the heartbeat."""
    joined = answer.get("joined", heartbeat.joined if heartbeat is not None else None)
    last_enqueued = answer.get("last_enqueued") or {}
    if not last_enqueued and heartbeat is not None and heartbeat.recorded:
        last_enqueued = {"0": heartbeat.enqueued} if heartbeat.enqueued >= 0 else {}
    earlier = answer.get("earlier_main")
    return {
        "barrier": heartbeat.barrier if heartbeat is not None else None,
        "beat_age_s": _heartbeat_age_s(heartbeat) if heartbeat is not None else None,
        "joined": None if joined is None else bool(joined),
        "earlier_stacks": (ThreadStack(name="MainThread", main=True, frames=_frames(earlier)),)
        if earlier
        else (),
        "last_enqueued": {str(group): int(number) for group, number in last_enqueued.items()},
        "groups": {str(g): tuple(ranks) for g, ranks in (answer.get("groups") or {}).items()},
        "collectives": tuple(_collective(entry) for entry in answer.get("collectives") or ()),
    }


def _collective(entry: Mapping[str, Any]) -> Collective:
    frames = _frames(entry.get("frames") or ())
    return Collective(
        group=str(entry["group"]),
        seq=int(entry["seq"]),
        op=str(entry["op"]),
        sizes=tuple(tuple(int(n) for n in size) for size in entry.get("sizes") or ()),
        dtypes=tuple(str(t) for t in entry.get("dtypes") or ()),
        retired=bool(entry.get("retired")),
        p2p=bool(entry.get("p2p")),
        call_site=call_site(frames),
        frames=frames[:_CALLER_FRAMES],
    )


def _frames(rows: Sequence[Sequence[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(file=str(f), line=int(n), function=str(c)) for f, n, c in rows)
