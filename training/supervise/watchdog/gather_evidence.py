"""Looking closely at the ranks of a run, once something is suspicious; and what was kept of it.

``gather`` takes one to three seconds and is called in a thread of its own (``evidence_taker.py``).
It asks the ranks' witnesses, counts what every process does over an interval, reads stacks where no
witness answered, and looks at workers, sockets and memory. It needs no rights beyond the user's;
what it could not have stands in ``missing``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.diagnosis.evidence import (
    Collective,
    Diagnosis,
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.rules.stack_frames import call_site
from ltui.training.process.machine_memory import read_host, unacknowledged_tcp
from ltui.training.process.process_activity import (
    LOADER_NAME,
    ProcessCounters,
    ProcessEntry,
    activity_between,
    descendants,
    process_table,
    read_counters,
)
from ltui.training.process.stack_dumps import PySpy, dump_by_signal
from ltui.training.store.run_directory import RunDir
from ltui.training.tensor_queue.heartbeat_table import HeartbeatState, HeartbeatTable
from ltui.training.tensor_queue.record_types import PulseState

INTERVAL_S = 0.9
"""Between the two looks at what processes do."""
_ANSWER_S = 3.0
"""What a witness that lives gets to answer: it looks for questions twice a second."""
_SILENT_S = 1.6
"""A beat older than this means that the witness does not run."""
_WORKERS = 8
"""Workers of one rank whose stacks are read."""
_SPIED = 6
_SETTLED_S = 0.2
_READING_S = 0.8
"""What the workers' stacks may take of a round."""
_TAIL_LINES = 12
_CALLERS = 4
"""Frames told of a collective, beside its call site."""
_KEPT_MOST = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTarget:
    """A rank to look at."""

    rank: int
    pid: int
    pulse: PulseState | None = None
    epoch_batches: Mapping[int, int] = field(default_factory=dict)
    exception: Mapping[str, Any] | None = None
    how_ended: str | None = None
    gpu: Mapping[str, Any] | None = None


@dataclass(slots=True)
class CollectorCache:
    """Kept from round to round."""

    samples: dict[int, ProcessCounters] = field(default_factory=dict)
    """pid -> first sample since its rank stands still, so that what moves once in two seconds is
    told from what is frozen."""
    stacks: dict[int, tuple[ThreadStack, ...]] = field(default_factory=dict)
    """pid -> what was read of it by signal before its sample: the reading itself makes a process
    move, so it is not done again while the process stands still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRequest:
    """What one round is asked to look at."""

    run_dir: RunDir
    attempt: int
    targets: Sequence[RankTarget]
    known_workers: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """rank -> pids of DataLoader workers seen a moment ago."""
    oom_kills_before: int | None = None
    memory: CollectorCache = field(default_factory=lambda: CollectorCache())


def collect_evidence(question: EvidenceRequest) -> Evidence:
    """One round. Raises nothing that a process's end or a missing right can cause."""
    return _Round(question).take()


class _Round:
    def __init__(self, question: EvidenceRequest) -> None:
        self.question = question
        self.folder = question.run_dir.path / "evidence" / str(question.attempt)
        self.board = HeartbeatTable(question.run_dir.queue_dir(question.attempt))
        self.spy = PySpy()
        self.spied = 0
        self.why: dict[int, list[str]] = {}
        """pid -> why its stacks can't be had."""

    def take(self) -> Evidence:
        number = self.board.last_request() + 1
        with contextlib.suppress(OSError):
            self.board.request_evidence(number)
        asked_s = time.monotonic()
        table = process_table()
        workers = self._workers(table)
        witnesses = self.board.read()
        pids = {
            t.pid: self._witness_thread(_witness_of(t, witnesses)) for t in self.question.targets
        }
        pids |= {e.pid: None for found in workers.values() for e in found}
        self._read_stacks(table, workers, witnesses)
        before = {pid: read_counters(pid, time.monotonic(), thread) for pid, thread in pids.items()}
        before = self._earlier(before, workers)
        time.sleep(INTERVAL_S)
        after = {pid: read_counters(pid, time.monotonic(), thread) for pid, thread in pids.items()}
        sights = {pid: activity_between(pid, before[pid], after[pid]) for pid in pids}
        self._wait_for_answers(number, asked_s)
        witnesses = self.board.read()
        ranks = {
            target.rank: self._rank(target, number, _witness_of(target, witnesses), sights, workers)
            for target in self.question.targets
        }
        first = next((t.pid for t in self.question.targets if t.pid in table), None)
        missing = (self.spy.note,) if self.spy.note else ()
        return Evidence(
            taken_at=time.time(),
            taken_ns=time.monotonic_ns(),
            ranks=ranks,
            host=read_host(first, self.question.oom_kills_before),
            missing=missing,
        )

    def _earlier(
        self,
        fresh: Mapping[int, ProcessCounters | None],
        workers: Mapping[int, Sequence[ProcessEntry]],
    ) -> dict[int, ProcessCounters | None]:
        """``fresh``, or an older sample of processes whose rank has not moved since it."""
        memory, found = self.question.memory.samples, dict(fresh)
        for target in self.question.targets:
            since_s = target.pulse.changed_ns / 1e9 if target.pulse is not None else 0.0
            for pid in (target.pid, *(e.pid for e in workers[target.rank])):
                old, new = memory.get(pid), fresh[pid]
                if old is not None and new is not None and old.at_s > since_s + _SETTLED_S:
                    found[pid] = old
                elif new is not None and new.at_s > since_s + _SETTLED_S:
                    memory[pid] = new
        return found

    def _read_stacks(
        self,
        table: Mapping[int, ProcessEntry],
        workers: Mapping[int, Sequence[ProcessEntry]],
        witnesses: Mapping[int, HeartbeatState],
    ) -> None:
        """Stacks of workers and of ranks without a living witness, where none are known of this
        stillness. Before the watch, which the reading would disturb."""
        memory = self.question.memory
        present = {t.pid for t in self.question.targets}
        present |= {e.pid for found in workers.values() for e in found}
        for pid in memory.samples.keys() - present:
            del memory.samples[pid]
        deadline = time.monotonic() + _READING_S
        stacks: dict[int, tuple[ThreadStack, ...]] = {}
        for target in self.question.targets:
            since_s = target.pulse.changed_ns / 1e9 if target.pulse is not None else 0.0
            loaders = [e for e in workers[target.rank] if e.name == LOADER_NAME]
            entries = (loaders or workers[target.rank])[:_WORKERS]
            witness = _witness_of(target, witnesses)
            if target.pid in table and not _lives(witness):
                entries = [table[target.pid], *entries]
            for entry in entries:
                known = memory.samples.get(entry.pid)
                if known is not None and known.at_s > since_s and memory.stacks.get(entry.pid):
                    stacks[entry.pid] = memory.stacks[entry.pid]
                elif entry.state not in "ZX" and time.monotonic() < deadline:
                    of_rank = witness if entry.pid == target.pid else None
                    stacks[entry.pid], self.why[entry.pid] = self._stacks(entry.pid, of_rank)
        memory.stacks = stacks

    def _workers(self, table: Mapping[int, ProcessEntry]) -> dict[int, list[ProcessEntry]]:
        """rank -> its children, but those that are ranks themselves."""
        ranks = {t.pid for t in self.question.targets}
        return {
            t.rank: [
                e
                for e in descendants(table, t.pid, ranks - {t.pid})
                if e.name == LOADER_NAME or e.name.startswith(("python", "pt_"))
            ]
            for t in self.question.targets
        }

    @staticmethod
    def _witness_thread(state: HeartbeatState | None) -> int | None:
        return state.thread_id or None if state is not None else None

    def _wait_for_answers(self, number: int, asked_s: float) -> None:
        deadline = asked_s + _ANSWER_S
        pids = {t.rank: t.pid for t in self.question.targets}
        while time.monotonic() < deadline:
            waited_for = [
                s
                for rank, s in self.board.read().items()
                if s.answered < number and pids.get(rank) == s.pid and _lives(s)
            ]
            if not waited_for:
                return
            time.sleep(0.03)

    def _rank(
        self,
        target: RankTarget,
        number: int,
        witness: HeartbeatState | None,
        sights: Mapping[int, ProcessActivity],
        workers: Mapping[int, Sequence[ProcessEntry]],
    ) -> RankEvidence:
        process = sights[target.pid]
        alive = process.state is not None and process.state != "Z"
        answer = self._answer(target.rank, number, witness)
        missing = list(answer.get("missing") or ())
        stacks = _stacks_of(answer)
        if not stacks and alive and _lives(witness):
            # It will have answered by the next round. A signal is for those that can't: a thread
            # that runs Python meanwhile may not survive it.
            missing.append("its telemetry thread has not answered yet")
        elif not stacks and alive:
            stacks = self._read_before(process, witness)
            missing += self.why.get(target.pid, ())
        entries = tuple(_collective(entry) for entry in answer.get("collectives") or ())
        sockets = unacknowledged_tcp(target.pid) if alive else None
        known = self.question.known_workers.get(target.rank, frozenset())
        return RankEvidence(
            rank=target.rank,
            pid=target.pid,
            alive=alive,
            how_ended=target.how_ended,
            **_place(target.pulse),
            epoch_batches=dict(target.epoch_batches),
            barrier=witness.barrier if witness is not None else None,
            beat_age_s=_beat_age_s(witness) if witness is not None else None,
            joined=_joined(answer, witness),
            process=process,
            stacks=stacks,
            earlier_stacks=_earlier_main(answer),
            workers=self._look_at_workers(workers[target.rank], known, sights),
            last_enqueued=_last_enqueued(answer, witness),
            groups={str(g): tuple(of) for g, of in (answer.get("groups") or {}).items()},
            collectives=entries,
            exception=target.exception,
            unacknowledged_bytes=sockets[0] if sockets else None,
            retransmits=sockets[1] if sockets else None,
            gpu=target.gpu,
            log_tail=self._log_tail(target.rank) if not alive or target.exception else (),
            missing=tuple(missing),
        )

    def _answer(self, rank: int, number: int, witness: HeartbeatState | None) -> dict[str, Any]:
        if witness is None or witness.answered < number:
            return {}
        try:
            document = json.loads((self.folder / f"rank-{rank:05d}.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) and document.get("question") else {}

    def _stacks(
        self, pid: int, witness: HeartbeatState | None
    ) -> tuple[tuple[ThreadStack, ...], list[str]]:
        ours = witness is None or witness.signal_ours
        found = dump_by_signal(pid, self.folder, ours=ours)
        if not isinstance(found, str):
            return found, []
        if self.spied >= _SPIED:
            return (), [f"no stack of process {pid}: {found}"]
        self.spied += 1
        spied = self.spy.stacks(pid)
        if isinstance(spied, str):
            return (), [f"no stack of process {pid}: {found}; {spied}"]
        return spied, []

    def _read_before(
        self, process: ProcessActivity, witness: HeartbeatState | None
    ) -> tuple[ThreadStack, ...]:
        """The stacks read before the watch. Where there are none, or where the process has gone on
        since, it is read now and watched anew from here."""
        memory, pid = self.question.memory, process.pid
        known = memory.stacks.get(pid, ())
        if pid in self.why and not known:
            return ()
        if known and (process.frozen or process.state in ("Z", "X", "T", "t", None)):
            return known
        memory.stacks[pid], self.why[pid] = self._stacks(pid, witness)
        memory.samples.pop(pid, None)
        now = read_counters(pid, time.monotonic(), self._witness_thread(witness))
        if now is not None:
            memory.samples[pid] = now
        return memory.stacks[pid]

    def _look_at_workers(
        self,
        entries: Sequence[ProcessEntry],
        known: frozenset[int],
        sights: Mapping[int, ProcessActivity],
    ) -> tuple[WorkerEvidence, ...]:
        found = []
        for entry in entries:
            process = sights[entry.pid]
            if process.state is None:
                continue
            # Torch names a worker some time after the fork.
            loader = LOADER_NAME in (entry.name, process.name)
            stacks = self.question.memory.stacks.get(entry.pid, ())
            if stacks:
                stacks = self._read_before(process, None)
            reason = (
                "zombie: it has ended, and its rank has not noticed"
                if process.state == "Z"
                else None
            )
            found.append(
                WorkerEvidence(process=process, stacks=stacks, loader=loader, exit_reason=reason)
            )
        present = {e.pid for e in entries}
        found += [
            WorkerEvidence(process=ProcessActivity(pid=pid), gone=True)
            for pid in sorted(known - present)
        ]
        return tuple(found)

    def _log_tail(self, rank: int) -> tuple[str, ...]:
        path = self.question.run_dir.rank_log_path(self.question.attempt, rank)
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        return tuple(text.splitlines()[-_TAIL_LINES:])


def _witness_of(
    target: RankTarget, witnesses: Mapping[int, HeartbeatState]
) -> HeartbeatState | None:
    """None where it is another process's, of the rank before a restart."""
    witness = witnesses.get(target.rank)
    return witness if witness is not None and witness.pid == target.pid else None


def _lives(state: HeartbeatState | None) -> bool:
    return state is not None and _beat_age_s(state) < _SILENT_S


def _beat_age_s(state: HeartbeatState) -> float:
    return max(0.0, (time.monotonic_ns() - state.beat_ns) / 1e9)


def _place(pulse: PulseState | None) -> dict[str, Any]:
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


def _joined(answer: Mapping[str, Any], witness: HeartbeatState | None) -> bool | None:
    if "joined" in answer:
        return bool(answer["joined"])
    return witness.joined if witness is not None else None


def _last_enqueued(answer: Mapping[str, Any], witness: HeartbeatState | None) -> dict[str, int]:
    told = answer.get("last_enqueued")
    if told:
        return {str(group): int(number) for group, number in told.items()}
    if witness is not None and witness.enqueued >= 0 and witness.recorded:
        return {"0": witness.enqueued}
    return {}


def _frames(rows: Sequence[Sequence[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(file=str(f), line=int(n), function=str(c)) for f, n, c in rows)


def _stacks_of(answer: Mapping[str, Any]) -> tuple[ThreadStack, ...]:
    return tuple(
        ThreadStack(
            name=str(t["name"]),
            main=bool(t["main"]),
            native_id=t.get("native_id"),
            frames=_frames(t["frames"]),
        )
        for t in answer.get("threads") or ()
    )


def _earlier_main(answer: Mapping[str, Any]) -> tuple[ThreadStack, ...]:
    rows = answer.get("earlier_main")
    return (ThreadStack(name="MainThread", main=True, frames=_frames(rows)),) if rows else ()


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
        frames=frames[:_CALLERS],
    )


# -- what is kept ------------------------------------------------------------------------------


def evidence_dir(run_dir: RunDir, attempt: int) -> Path:
    return run_dir.path / "evidence" / str(attempt)


def write_diagnosis(run_dir: RunDir, diagnosis: Diagnosis, path: Path | None = None) -> Path | None:
    """Write the diagnosis beside those kept before (or over ``path``); None where it can't be."""
    folder = evidence_dir(run_dir, diagnosis.attempt)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path is None:
            number = max((int(p.stem) for p in _kept_files(folder)), default=0) + 1
            if number > _KEPT_MOST:
                return None
            path = folder / f"{number:03d}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(diagnosis.to_document()), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        return None
    return path


def read_diagnoses(run_dir: RunDir, attempt: int | None = None) -> list[Diagnosis]:
    """The diagnoses of an attempt (of all, where None is given), the oldest first."""
    root = run_dir.path / "evidence"
    folders = [root / str(attempt)] if attempt is not None else sorted(
        (p for p in root.glob("*") if p.name.isdigit()), key=lambda p: int(p.name)
    )  # fmt: skip
    found = []
    for folder in folders:
        for path in _kept_files(folder):
            try:
                found.append(Diagnosis.from_document(json.loads(path.read_bytes())))
            except (OSError, ValueError):
                continue
    return found


def _kept_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.json") if p.stem.isdigit())
