"""Collects what the judge needs besides pulses: exits, workers, silent ranks and evidence.

Only the supervisor's loop uses it. Rounds of evidence and exits are observed in threads of their
own, so that the loop never waits. While a run is suspicious, rounds follow each other at growing
intervals. Now and then evidence of a healthy run is collected too, to compare the call sites of its
collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import Struct, field

from ltui.training.diagnosis.evidence import Diagnosis, Evidence, HostEvidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import BEFORE_TRAINING, Death, verdict_key
from ltui.training.diagnosis.rules.stopped_processes import STOPPED_AFTER_S
from ltui.training.diagnosis.sample_report import SampleReport
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.rank_queue_poller import QueuePoll, local_processes
from ltui.training.nodes.messages import RankObservations
from ltui.training.process.identity import (
    ExitWatch,
    ProcessIdentity,
    ProcessTable,
    is_alive,
    is_stopped,
)
from ltui.training.process.process_activity import LOADER_NAME, oom_kills, read_host
from ltui.training.shared.record_types import Outcome, PulseState
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunSnapshot, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.gather_evidence import (
    CollectorCache,
    EvidenceRequest,
    RankTarget,
    collect_evidence,
)
from ltui.training.supervise.health_monitor import (
    DiagnosisWriter,
    build_diagnosis,
    describe_death,
    shortened,
)

_STILL_NS = 800_000_000
"""Nanoseconds without progress after which it is checked whether a rank's workers are stopped."""
_OOM_PERIOD_S = 15.0
"""Seconds between two readings of the out-of-memory count while no rank dies."""

_SAMPLES_KEPT_S = 120.0
"""Seconds for which samples of ranks are part of new diagnoses."""


class _RankProcesses(Struct):
    """The processes of one rank."""

    pid: int
    first_seen_s: float
    """Monotonic seconds."""
    start_ticks: int
    children: tuple[int, ...] = ()
    loaders: frozenset[int] = field(default_factory=frozenset)
    """Children that are DataLoader workers."""
    stopped_since_s: float | None = None
    """Monotonic seconds since when one of the processes is stopped."""


class EvidenceCollector:
    """Collects the input of the judge for one attempt, and the evidence of its diagnoses."""

    def __init__(self, run_dir: RunDir, attempt: int, on_exit: Callable[[], None]) -> None:
        """``on_exit`` is called from another thread when the process of a rank ends."""
        self._run_dir = run_dir
        self._attempt = attempt
        self.rounds = EvidenceThread()
        self._exits = ExitWatch(on_exit)
        self._ranks: dict[int, _RankProcesses] = {}
        self._deaths: dict[int, Death] = {}
        self._oom_before = self._oom_recent = oom_kills()
        self._oom_read_s = time.monotonic()
        self._rank_is_dying = False
        self._cache = CollectorCache()
        self._writer = DiagnosisWriter(run_dir)
        self.samples: SampleReport | None = None
        """The last samples of ranks. A diagnosis contains them for ``_SAMPLES_KEPT_S``."""
        self.host: HostEvidence | None = None
        """The condition of this machine at the last sample."""

    # -- every second ----------------------------------------------------------------------------

    def update_processes(
        self, table: ProcessTable, identities: Mapping[int, ProcessIdentity]
    ) -> None:
        """Read the machine and the children of ranks.

        ``identities`` are the processes of all ranks, with and without a pulse.
        """
        self._forget_old_oom_kills()
        rank_pids = {identity.pid for identity in identities.values()}
        self.host = read_host(min(rank_pids, default=None), self._oom_before)
        for rank, identity in identities.items():
            processes = self._ranks.get(rank)
            if processes is None or processes.pid != identity.pid:
                processes = _RankProcesses(identity.pid, time.monotonic(), identity.start_ticks)
                self._ranks[rank] = processes
                self._exits.add(identity.pid)
            children = [p for p in table.tree(identity.pid, rank_pids) if p != identity.pid]
            processes.children = tuple(children)
            processes.loaders = frozenset(
                pid for pid in children if table.entries[pid].name == LOADER_NAME
            )

    def workers_of(self, rank: int) -> tuple[int, ...]:
        """Return the pids of the DataLoader workers of a rank."""
        processes = self._ranks.get(rank)
        return () if processes is None else tuple(sorted(processes.loaders))

    # -- every tick ------------------------------------------------------------------------------

    def observe(self, poll: QueuePoll, failures: Iterable[WorkerFailure] = ()) -> RankObservations:
        """Return what is observed of the ranks of this machine."""
        self._observe_deaths(poll, failures)
        silent_s = {
            rank: time.monotonic() - processes.first_seen_s
            for rank, processes in self._ranks.items()
            if poll.pulses.get(rank) is None and is_alive(processes.pid, processes.start_ticks)
        }
        return RankObservations(
            dead=frozenset(r for r in poll.dead_ranks if r in self._deaths),
            deaths=dict(self._deaths),
            stopped_pids={**poll.stopped_pids, **self._stopped_silent_ranks(silent_s)},
            stopped_workers=self._stopped_workers(poll.pulses),
            silent_s=silent_s,
            oom_kills=self._recent_oom_kills() if self._rank_is_dying else None,
        )

    def _observe_deaths(self, poll: QueuePoll, failures: Iterable[WorkerFailure]) -> None:
        """Read how the processes of dead ranks ended."""
        for process in local_processes(poll.pulses).values():
            self._exits.add(process.pid)
        failure_by_rank = {f.rank: f for f in failures}
        for rank in poll.dead_ranks:
            pulse = poll.pulses.get(rank)
            if pulse is not None:
                self._deaths[rank] = describe_death(
                    self._run_dir,
                    self._attempt,
                    rank,
                    pulse.pid,
                    self._exits.status(pulse.pid),
                    failure_by_rank,
                )
        self._rank_is_dying = bool(poll.dead_ranks) or any(
            p is not None and p.outcome is Outcome.RAISED for p in poll.pulses.values()
        )

    def _stopped_silent_ranks(self, silent: Collection[int]) -> dict[int, int]:
        """Return rank -> pid of ranks without telemetry of which a process has been stopped.

        The process is the rank's own or one that it started, because the command of a run may be a
        shell script.
        """
        stopped = {}
        for rank in silent:
            processes = self._ranks[rank]
            pids = (processes.pid, *processes.children)
            pid = next((p for p in pids if is_stopped(p)), None)
            if pid is None:
                processes.stopped_since_s = None
                continue
            processes.stopped_since_s = processes.stopped_since_s or time.monotonic()
            if time.monotonic() - processes.stopped_since_s > STOPPED_AFTER_S:
                stopped[rank] = pid
        return stopped

    def _stopped_workers(
        self, pulses: Mapping[int, PulseState | None]
    ) -> dict[int, tuple[int, ...]]:
        """Return rank -> pids of stopped children, of ranks that make no progress."""
        now_ns = time.monotonic_ns()
        stopped_by_rank = {}
        for rank, processes in self._ranks.items():
            pulse = pulses.get(rank)
            if pulse is None or now_ns - pulse.changed_ns < _STILL_NS:
                continue
            stopped = tuple(pid for pid in processes.children if is_stopped(pid))
            if stopped:
                stopped_by_rank[rank] = stopped
        return stopped_by_rank

    def _forget_old_oom_kills(self) -> None:
        """Move the start of the period in which out-of-memory kills count.

        The kernel counts for the whole machine. So only kills of the last half minute indicate why
        a rank died.
        """
        now_s = time.monotonic()
        if not self._rank_is_dying and now_s - self._oom_read_s > _OOM_PERIOD_S:
            self._oom_before, self._oom_recent = self._oom_recent, oom_kills()
            self._oom_read_s = now_s

    def _recent_oom_kills(self) -> int | None:
        now = oom_kills()
        return None if now is None or self._oom_before is None else max(0, now - self._oom_before)

    def update(
        self,
        judgement: Judgement,
        poll: QueuePoll,
        fold: FoldState,
        snapshot: RunSnapshot,
        *,
        of_all: Evidence | None = None,
        complete_since: Callable[[float], bool] | None = None,
    ) -> None:
        """Start a round of evidence if one is due, store diagnoses and answer requests for one.

        On several machines, ``of_all`` is the evidence of all, and ``complete_since`` tells whether
        it contains a round of each machine that began after a monotonic time in seconds.
        """
        live = [p for p in poll.pulses.values() if p is not None]
        trains = bool(live) and all(p.phase not in BEFORE_TRAINING for p in live)
        self.rounds.start_if_due(
            suspicious=bool(judgement.suspects),
            training=trains and len(live) > 1,
            make_request=lambda: self._request(poll, fold, snapshot),
        )

        evidence = self.rounds.evidence if of_all is None else of_all

        def diagnose(verdict: Verdict) -> Diagnosis:
            """Return the diagnosis of one verdict, followed by the others."""
            others = (v for v in snapshot.verdicts if verdict_key(v) != verdict_key(verdict))
            return self._diagnose((verdict, *others), shortened(evidence), snapshot)

        self._writer.update(judgement, evidence, diagnose)
        self.rounds.answer(
            lambda: self._diagnose(snapshot.verdicts, evidence, snapshot), complete_since
        )

    def close(self) -> None:
        self.rounds.close()
        self._exits.close()

    def _diagnose(
        self, verdicts: Sequence[Verdict], evidence: Evidence | None, snapshot: RunSnapshot
    ) -> Diagnosis:
        now_s, samples = time.time(), self.samples
        if samples is not None and now_s - samples.taken_at > _SAMPLES_KEPT_S:
            samples = None
        return build_diagnosis(snapshot, now_s, verdicts, evidence, samples)

    def _request(self, poll: QueuePoll, fold: FoldState, snapshot: RunSnapshot) -> EvidenceRequest:
        """Return a request for evidence of all ranks."""
        pids = {rank: processes.pid for rank, processes in self._ranks.items()}
        pids |= {rank: process.pid for rank, process in local_processes(poll.pulses).items()}
        gpus = {rank: gpu for gpu in snapshot.gpus for rank in gpu.ranks}
        targets = []
        for rank, pid in sorted(pids.items()):
            rank_fold = fold.ranks.get(rank)
            event = rank_fold.exception if rank_fold is not None else None
            death = self._deaths.get(rank)
            targets.append(
                RankTarget(
                    rank=rank,
                    pid=pid,
                    pulse=poll.pulses.get(rank),
                    epoch_batches=rank_fold.epoch_batches if rank_fold is not None else {},
                    exception=dict(event.fields) if event is not None else None,
                    how_ended=death.text if death is not None else None,
                    gpu=to_json(gpus[rank]) if rank in gpus else None,
                )
            )
        return EvidenceRequest(
            run_dir=self._run_dir,
            attempt=self._attempt,
            targets=tuple(targets),
            known_workers={r: processes.loaders for r, processes in self._ranks.items()},
            oom_kills_before=self._oom_before,
            cache=self._cache,
        )


_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between the end of a round and the next one, by the number of rounds so far in which the
run was suspicious."""
_PATIENCE_S = 6.0
"""Seconds that a request for a diagnosis waits for the evidence of other machines."""
_FIRST_HEALTHY_ROUND_S, _HEALTHY_ROUND_PERIOD_S = 20.0, 300.0
"""Seconds of training before the first round of a healthy run, and between two such rounds."""


class EvidenceThread:
    """Runs one round of evidence collection at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.evidence: Evidence | None = None
        """The evidence of the last complete round."""
        self.error: str | None = None
        """The exception of a round that failed; verdicts then do without evidence."""
        self._suspicious_rounds = 0
        self._ended_s = 0.0
        self._began_s = 0.0
        self._healthy_due_s: float | None = None
        self._requests: list[tuple[float, Future[dict[str, Any]]]] = []
        """(monotonic second of the request, its future answer)."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def diagnosis_requested(self) -> bool:
        return bool(self._requests)

    def request_diagnosis(self) -> Future[dict[str, Any]]:
        """Return a future that ``answer`` fulfils after a round that begins from now on."""
        future: Future[dict[str, Any]] = Future()
        self._requests.append((time.monotonic(), future))
        return future

    def start_if_due(
        self, *, suspicious: bool, training: bool, make_request: Callable[[], EvidenceRequest]
    ) -> None:
        """Start a round if one is due."""
        now_s = time.monotonic()
        if not suspicious:
            self._suspicious_rounds = 0
        if self.busy:
            return
        due = any(requested_s > self._began_s for requested_s, _ in self._requests)
        if suspicious:
            rounds = min(self._suspicious_rounds, len(_PAUSES_S) - 1)
            due = due or now_s - self._ended_s >= _PAUSES_S[rounds]
        elif training:
            if self._healthy_due_s is None:
                self._healthy_due_s = now_s + _FIRST_HEALTHY_ROUND_S
            due = due or now_s >= self._healthy_due_s
        if not due:
            return
        self._suspicious_rounds += suspicious
        self._healthy_due_s = now_s + _HEALTHY_ROUND_PERIOD_S
        self._began_s = now_s
        self._thread = threading.Thread(
            target=self._collect, args=(make_request(),), name="evidence", daemon=True
        )
        self._thread.start()

    def answer(
        self,
        make_diagnosis: Callable[[], Diagnosis],
        complete_since: Callable[[float], bool] | None,
    ) -> None:
        """Fulfil the requests that are older than the last complete round.

        A request waits some seconds for the other machines too, until ``complete_since`` it.
        """
        if self.busy or not self._requests:
            return
        late_s = time.monotonic() - _PATIENCE_S
        entries = [
            entry
            for entry in self._requests
            if entry[0] <= self._began_s
            and (entry[0] < late_s or complete_since is None or complete_since(entry[0]))
        ]
        due = [future for _, future in entries]
        self._requests = [entry for entry in self._requests if entry not in entries]
        if due:
            answer = {"ok": True, "diagnosis": make_diagnosis().to_document()}
            for future in due:
                future.set_result(answer)

    def close(self) -> None:
        """Refuse the open requests, without waiting for a round."""
        requests, self._requests = self._requests, []
        for _, future in requests:
            future.set_exception(ValueError("the run has just ended."))

    def _collect(self, request: EvidenceRequest) -> None:
        try:
            self.evidence = collect_evidence(request)
        except Exception as error:  # noqa: BLE001  (the top of the thread: verdicts do without)
            self.error = f"{type(error).__name__}: {error}"
        self._ended_s = time.monotonic()
