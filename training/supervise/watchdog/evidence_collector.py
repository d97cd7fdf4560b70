"""What the loop knows beside pulses: exits, workers, silent ranks, the last closer look; and what
is kept of it for later.

Used by the supervisor's loop alone; closer looks and exits have their own threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ltui.training.diagnosis.evidence import Diagnosis, Evidence, HostEvidence
from ltui.training.diagnosis.judge import STOPPED_AFTER_S, Judgement
from ltui.training.diagnosis.rules.deaths import Death
from ltui.training.diagnosis.rules.diagnosis_document import build_diagnosis
from ltui.training.diagnosis.rules.judge_input import BEFORE_TRAINING, verdict_key
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.queue_poller import QueuePoll
from ltui.training.process.exit_statuses import ExitWatch
from ltui.training.process.identity import ProcessIdentity, is_alive, is_stopped
from ltui.training.process.machine_memory import oom_kills, read_host
from ltui.training.process.process_activity import LOADER_NAME, entry_of
from ltui.training.process.rank_usage import ProcessTable
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunSnapshot, Verdict, to_json
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.watchdog.death_evidence import describe_death
from ltui.training.supervise.watchdog.evidence_thread import EvidenceThread
from ltui.training.supervise.watchdog.gather_evidence import (
    CollectorCache,
    EvidenceRequest,
    RankTarget,
    write_diagnosis,
)
from ltui.training.tensor_queue.record_types import PulseState

_STILL_NS = 800_000_000
"""Workers of a rank that stands still so long are looked at."""
_OOM_S = 15.0
_GRAVE = ("stalled", "dead")
_KEPT_COLLECTIVES = 24
_REWRITTEN = 6
"""So often a kept diagnosis is renewed while its verdict stands."""


@dataclass(slots=True)
class _Kept:
    path: Path | None
    evidence: Evidence | None
    times: int = 1


@dataclass(slots=True)
class _Rank:
    """What is remembered of a rank's processes."""

    pid: int
    since_s: float
    start_ticks: int
    children: tuple[int, ...] = ()
    loaders: frozenset[int] = field(default_factory=frozenset)
    held_since_s: float | None = None


class EvidenceCollector:
    """One attempt's evidence, from tick to tick."""

    def __init__(self, run_dir: RunDir, attempt: int, woken: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._taker = EvidenceThread()
        self._exits = ExitWatch(woken)
        self._ranks: dict[int, _Rank] = {}
        self._deaths: dict[int, Death] = {}
        self._oom_before = self._oom_lately = oom_kills()
        self._oom_at_s = time.monotonic()
        self._dying = False
        self._names: dict[int, str] = {}
        self._memory = CollectorCache()
        self._kept: dict[str, _Kept] = {}
        self._host: HostEvidence | None = None

    # -- every second ----------------------------------------------------------------------------

    def update_processes(self, table: ProcessTable, marks: Mapping[int, ProcessIdentity]) -> None:
        """``marks``: the ranks' processes, with and without a pulse."""
        self._forget_old_kills()
        ranks = {mark.pid for mark in marks.values()}
        self._host = read_host(min(ranks, default=None), self._oom_before)
        for rank, mark in marks.items():
            known = self._ranks.get(rank)
            if known is None or known.pid != mark.pid:
                known = self._ranks[rank] = _Rank(mark.pid, time.monotonic(), mark.start_ticks)
                self._exits.add(mark.pid)
            below = [p for p in table.tree(mark.pid, ranks) if p != mark.pid]
            known.children = tuple(below)
            known.loaders = frozenset(p for p in below if self._name(p) == LOADER_NAME)

    def children(self, rank: int) -> tuple[int, ...]:
        """Processes below the rank's own, without those of ranks that it started."""
        known = self._ranks.get(rank)
        return known.children if known is not None else ()

    def _name(self, pid: int) -> str:
        name = self._names.get(pid)
        # Torch names a worker only after the fork.
        if name is None or not name.startswith("pt_"):
            entry = entry_of(pid)
            name = self._names[pid] = entry.name if entry is not None else ""
        return name

    # -- every tick ------------------------------------------------------------------------------

    def judging(
        self, sight: QueuePoll, *, failures: Iterable[WorkerFailure] = (), may_look: bool = True
    ) -> dict[str, Any]:
        """What ``judge`` is told beside pulses and fold."""
        for pulse in sight.pulses.values():
            if pulse is not None and pulse.pid > 0:
                self._exits.add(pulse.pid)
        failed = {f.rank: f for f in failures}
        for rank in sight.dead_ranks:
            pulse = sight.pulses.get(rank)
            if pulse is not None:
                self._deaths[rank] = describe_death(
                    self._run_dir,
                    self._attempt,
                    rank,
                    pulse.pid,
                    self._exits.status(pulse.pid),
                    failed,
                )
        silent = {
            rank: time.monotonic() - known.since_s
            for rank, known in self._ranks.items()
            if sight.pulses.get(rank) is None and is_alive(known.pid, known.start_ticks)
        }
        self._dying = bool(sight.dead_ranks) or any(
            p is not None and p.outcome.name == "RAISED" for p in sight.pulses.values()
        )
        return {
            "dead": {r: self._deaths[r].how for r in sight.dead_ranks if r in self._deaths},
            "deaths_told": self._deaths,
            "held": {**sight.stopped_pids, **self._held_silent(silent)},
            "held_workers": self._held_workers(sight.pulses),
            "silent": silent,
            "oom_kills": self._oom_kills() if self._dying else None,
            "evidence": self._taker.evidence,
            "host": self._host,
            "closer": may_look and self._taker.error is None,
        }

    def _held_silent(self, silent: Collection[int]) -> dict[int, int]:
        """Ranks without telemetry of which a process has been stopped for a second: its pid.

        The rank's own process, or one that it started: the command may be a shell script."""
        found = {}
        for rank in silent:
            known = self._ranks[rank]
            pid = next((p for p in (known.pid, *known.children) if is_stopped(p)), None)
            if pid is None:
                known.held_since_s = None
                continue
            known.held_since_s = known.held_since_s or time.monotonic()
            if time.monotonic() - known.held_since_s > STOPPED_AFTER_S:
                found[rank] = pid
        return found

    def _held_workers(self, pulses: Mapping[int, PulseState | None]) -> dict[int, tuple[int, ...]]:
        now_ns = time.monotonic_ns()
        found = {}
        for rank, known in self._ranks.items():
            pulse = pulses.get(rank)
            if pulse is None or now_ns - pulse.changed_ns < _STILL_NS:
                continue
            held = tuple(pid for pid in known.children if is_stopped(pid))
            if held:
                found[rank] = held
        return found

    def _forget_old_kills(self) -> None:
        """The kernel counts for the whole machine: only kills of the last moments, up to half a
        minute, say something of a rank that dies."""
        now_s = time.monotonic()
        if not self._dying and now_s - self._oom_at_s > _OOM_S:
            self._oom_before, self._oom_lately, self._oom_at_s = (
                self._oom_lately,
                oom_kills(),
                now_s,
            )

    def _oom_kills(self) -> int | None:
        now = oom_kills()
        return None if now is None or self._oom_before is None else max(0, now - self._oom_before)

    def update(
        self, judgement: Judgement, sight: QueuePoll, fold: FoldState, snapshot: RunSnapshot
    ) -> None:
        """Take a closer look where one is due, keep what is grave, answer who asked."""
        live = [p for p in sight.pulses.values() if p is not None]
        trains = bool(live) and all(p.phase not in BEFORE_TRAINING for p in live)
        self._taker.look(
            suspicious=bool(judgement.suspects),
            training=trains and len(live) > 1,
            question=lambda: self._question(sight, fold, snapshot),
        )
        self._keep(judgement, snapshot)
        self._taker.answer(
            lambda: {"ok": True, "diagnosis": self.build_diagnosis(snapshot).to_document()}
        )

    def request_diagnosis(self) -> Future[dict[str, Any]]:
        """A diagnosis as the answer to a control command."""
        return self._taker.ask()

    def build_diagnosis(self, snapshot: RunSnapshot, ended: str | None = None) -> Diagnosis:
        """Of this moment, with the last closer look."""
        return build_diagnosis(
            self._run_dir.id,
            self._attempt,
            time.time(),
            snapshot.verdicts,
            self._taker.evidence,
            snapshot.ranks,
            ended,
        )

    def close(self) -> None:
        self._taker.close()
        self._exits.close()

    def _question(
        self, sight: QueuePoll, fold: FoldState, snapshot: RunSnapshot
    ) -> EvidenceRequest:
        pids = {r: p.pid for r, p in sight.pulses.items() if p is not None and p.pid > 0}
        pids = {**{r: known.pid for r, known in self._ranks.items()}, **pids}
        gpus = {rank: gpu for gpu in snapshot.gpus for rank in gpu.ranks}
        targets = []
        for rank, pid in sorted(pids.items()):
            folded = fold.ranks.get(rank)
            event = folded.exception if folded is not None else None
            death = self._deaths.get(rank)
            gpu = to_json(gpus[rank]) if rank in gpus else None
            targets.append(
                RankTarget(
                    rank=rank,
                    pid=pid,
                    pulse=sight.pulses.get(rank),
                    epoch_batches=folded.epoch_batches if folded is not None else {},
                    exception=dict(event.fields) if event is not None else None,
                    how_ended=death.how if death is not None else None,
                    gpu=gpu,
                )
            )
        return EvidenceRequest(
            run_dir=self._run_dir,
            attempt=self._attempt,
            targets=tuple(targets),
            known_workers={r: known.loaders for r, known in self._ranks.items()},
            oom_kills_before=self._oom_before,
            memory=self._memory,
        )

    # -- what is kept ------------------------------------------------------------------------------

    def _keep(self, judgement: Judgement, snapshot: RunSnapshot) -> None:
        over = {verdict_key(v): v for v in judgement.ended}
        for verdict in (*judgement.verdicts, *judgement.ended):
            if verdict.level in _GRAVE:
                self._keep_one(verdict, snapshot, over=verdict_key(verdict) in over)

    def _keep_one(self, verdict: Verdict, snapshot: RunSnapshot, *, over: bool) -> None:
        key, evidence = verdict_key(verdict), self._taker.evidence
        known = self._kept.get(key)
        if known is None:
            found = self._document(verdict, snapshot)
            self._kept[key] = _Kept(write_diagnosis(self._run_dir, found), evidence)
            return
        renewed = known.evidence is not evidence and known.times < _REWRITTEN
        if (renewed or over) and known.path is not None:
            known.evidence, known.times = evidence, known.times + 1
            write_diagnosis(self._run_dir, self._document(verdict, snapshot), known.path)
        if over:
            del self._kept[key]

    def _document(self, verdict: Verdict, snapshot: RunSnapshot) -> Diagnosis:
        others = tuple(v for v in snapshot.verdicts if verdict_key(v) != verdict_key(verdict))
        return build_diagnosis(
            self._run_dir.id,
            self._attempt,
            time.time(),
            (verdict, *others),
            _shortened(self._taker.evidence),
            snapshot.ranks,
        )


def _shortened(evidence: Evidence | None) -> Evidence | None:
    """Without the collectives of long ago, which judging needs and reading does not."""
    if evidence is None:
        return None
    ranks = {
        r: replace(e, collectives=e.collectives[-_KEPT_COLLECTIVES:])
        for r, e in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)
