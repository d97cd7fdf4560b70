"""The current state of the attempt that a supervisor watches.

``LiveAttempt`` polls the queues, folds the records, and builds the snapshots. It does not act on
the run: requests are carried out in ``control_requests.py``, the end is handled in
``finish_attempt.py``.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from ltui.training.config.run_spec import RunSpec
from ltui.training.diagnosis.evidence import Evidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import JudgeInput
from ltui.training.gpu.flop_utilisation import BatchFlops
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.rank_queue_poller import QueuePoll, QueuePoller, local_processes
from ltui.training.lifecycle.restart_policy import RestartPolicy
from ltui.training.lifecycle.run_processes import (
    engine_identity,
    from_earlier_boot,
    kill_run_processes,
)
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.nodes.messages import merge_ranks
from ltui.training.process.identity import ProcessIdentity
from ltui.training.shared.record_types import Outcome, Phase, PulseState, RecordKind
from ltui.training.state.metric_name_patterns import THROUGHPUT, TRAIN_LOSS
from ltui.training.state.record_fold import FoldedEvent, fold_many
from ltui.training.state.run_snapshot import LIVE, MetricValue, RunSnapshot, RunState
from ltui.training.state.snapshot_from_fold import (
    ThroughputPoint,
    metrics,
    next_point,
    training_has_started,
)
from ltui.training.store.history_queries import has_two_losses
from ltui.training.store.history_writer import Batch, Sample, StoreWriter
from ltui.training.store.run_checkpoints import CheckpointCatalog, ScriptCheckpoints
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.engine_command import ShimWatch
from ltui.training.supervise.evidence_collector import EvidenceCollector
from ltui.training.supervise.health_monitor import HealthMonitor
from ltui.training.supervise.history_recorder import (
    HistoryRecorder,
    restore_fold,
    starting_progress,
    stored_snapshot,
    with_values,
)
from ltui.training.supervise.machine_readings import MachineMonitor
from ltui.training.supervise.run_folder import LogLimit, RunFolder
from ltui.training.supervise.snapshot_builder import build_snapshot
from ltui.training.supervise.speed.limit_meter import LimitMeter
from ltui.training.supervise.speed.profile_watch import ProfileWatch
from ltui.training.supervise.speed.sample_ranks import RankSampler
from ltui.training.supervise.stops import Stops

if TYPE_CHECKING:
    from ltui.training.supervise.remote_nodes import RemoteNodes


class LiveAttempt:
    """One attempt as its queues, processes and files show it now. Used by the loop's thread.

    ``snapshot`` is the newest snapshot. Other threads may read it, because it is only replaced.
    """

    snapshot: RunSnapshot
    pulses: Mapping[int, PulseState | None]

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        store: StoreWriter,
        number: int,
        plan: AttemptPlan,
        lock: int,
    ) -> None:
        """``lock`` is the file descriptor of the run lock, which this process holds."""
        self.run_dir, self.spec, self.store, self.lock = run_dir, spec, store, lock
        self.wake = threading.Event()
        """Set when a request or new evidence is there."""
        self.shim = ShimWatch(run_dir, number)
        self.start_shim: Callable[[RunSpec], subprocess.Popen[bytes]] | None = None
        """Starts the engine. Set if the run has to wait for other nodes or for GPUs before."""
        self.number, self.plan, self.recovered = number, plan, plan.recover
        self.changes, self.restarted_because = store.start_reason(number)
        self.previous = previous = stored_snapshot(run_dir)
        """The snapshot that the previous supervisor or attempt stored."""
        self.start = starting_progress(plan, previous)
        self.restarts = RestartPolicy(run_dir, spec, number)
        self.logs = LogLimit(run_dir, number)
        self.folder = RunFolder(run_dir)
        self.started_at = store.started_at(number) or time.time()
        self.queues = QueuePoller(run_dir.queue_dir(number), store.cursors(number))
        self.recorder = HistoryRecorder(store, number, self.queues)
        self.profiles = ProfileWatch(run_dir, number)
        self.fold = self.profiles.leave_out(restore_fold(run_dir, number, previous))
        self.has_logged = store.has_logged(number)
        """A rank of this attempt has sent a value that the program logs."""
        self._sends_telemetry = store.has_trained()
        """The program has trained before, so it will send telemetry."""
        self.stops = Stops(run_dir, number, signal.Signals[spec.stop_signal])
        # Without ranks, a user's command counts as rank 0, which is on the first machine.
        is_first = spec.nodes is None or spec.nodes.rank == 0
        is_rank = spec.command is not None and is_first
        self.machine = MachineMonitor(run_dir.id, run_dir.queue_dir(number), user_command=is_rank)
        self.nodes: RemoteNodes | None = None
        """The other machines; None on one machine and in an agent."""
        self.nodes_failure: str | None = None
        """Why the attempt cannot go on with the other machines, once that is the case."""
        if spec.nodes is not None and is_first:
            # Imported here because it loads pyzmq, which a run on one machine does not need.
            from ltui.training.supervise.remote_nodes import RemoteNodes

            self.nodes = RemoteNodes(run_dir, spec, number, plan)
        self.catalog = CheckpointCatalog(run_dir.checkpoints_dir, previous)
        self.script_checkpoints = ScriptCheckpoints(previous)
        self.flops: BatchFlops | None = None
        self.evidence = EvidenceCollector(run_dir, number, self.wake.set)
        self.samples = RankSampler(run_dir, number, self.evidence)
        self.evidence_of_all: Evidence | None = None
        """The evidence of all machines at the last judgement; None on one machine."""
        self._health, self.limits = HealthMonitor(), LimitMeter(run_dir.queue_dir(number))
        self._throughput: ThroughputPoint | None = None
        """The newest point of the throughput that was stored."""
        self._engine: ProcessIdentity | None = None
        self.state, self.pulses = RunState.STARTING, {}
        self.queued_because: str | None = None
        """Why the run still waits for GPUs. None if it does not wait."""
        self.rebooted = False
        """True if the machine was rebooted since the attempt was started."""
        self.last_seen_at: float | None = None
        """Unix time of the last snapshot of a previous supervisor of this attempt."""
        self._continue_from_history(ended=False)
        if plan.recover:
            self._restore(previous)
        else:
            self.stops.continue_from(plan.resume_step)

    def _restore(self, previous: RunSnapshot | None) -> None:
        """Continue where the previous supervisor of this attempt stopped."""
        self.stops.restore()
        if previous is not None:
            self.last_seen_at = previous.taken_at
            if previous.state in LIVE:
                self.state = previous.state
        self.rebooted = from_earlier_boot(self.run_dir)
        if self.restarts.requested is not None:
            self.stops.kill(time.monotonic())

    def _continue_from_history(self, *, ended: bool) -> None:
        """Take the values of metrics, and the marks of checkpoints, from the steps that count.

        A live attempt replaces the steps after its checkpoint before it has trained its first one.
        An attempt that has ended without a step has replaced none.
        """
        spans = self.store.spans(None if ended else self.number)
        self.catalog.set_spans(spans)
        self.fold = with_values(self.fold, self.store.stored_values(spans))

    def end(self) -> None:
        """Count the steps after the checkpoint again if the attempt has not trained any."""
        with contextlib.suppress(sqlite3.Error):
            if self.number > 1 and not self.store.has_trained(self.number):
                self._continue_from_history(ended=True)

    def begin(self, now_s: float) -> QueuePoll:
        """Poll the queues for the first time and build the first snapshot."""
        self.stops.plan()
        poll = self.poll()
        if self.recovered and self.state is RunState.STARTING:
            # The previous supervisor may have died before it recorded that training had started.
            self.update_state(now_s)
        self.build_snapshot(self.judge(poll), now_s)
        return poll

    # -- queues --------------------------------------------------------------------------------

    def poll(self) -> QueuePoll:
        """Poll the queues, fold the new records, and handle the new events."""
        poll = self.queues.poll()
        self.pulses = poll.pulses
        seen = self.fold.events_seen
        self.fold = fold_many(self.fold, poll.polls)
        records = (record for rank in poll.polls.values() for record in rank.records)
        self.has_logged = self.has_logged or any(r.kind == RecordKind.METRICS for r in records)
        self.stops.check_metrics(self.fold, poll.polls)
        new_events = self.fold.events_seen - seen
        for event in self.fold.events[len(self.fold.events) - new_events :]:
            self._handle(event)
        return poll

    def _handle(self, event: FoldedEvent) -> None:
        if event.kind == "checkpoint_saved":
            self.catalog.saved(event.fields.get("seconds"))
            self.stops.checkpoint_saved()
        elif event.kind == "script_checkpoint":
            self.script_checkpoints.add(event.fields)
        elif event.kind == "resumed":
            self._record_resumed_step(event.fields.get("global_step"))
        elif event.kind == "steering_off":
            self.stops.pause_failed(event.text)
        elif event.kind == "flops":
            self.flops = BatchFlops.from_event(event.fields) or self.flops
        elif event.kind == "checkpoint_failed" and event.fields.get("reason") == "stop":
            # The ranks continue to train rather than lose their progress, so the stop ends too.
            step, epoch = event.fields.get("step"), event.fields.get("epoch")
            self.stops.stop_failed(event.text, step or 0, epoch or 0)
        elif event.kind == "checkpoint_failed" and event.fields.get("reason") == "request":
            self.stops.save_failed(event.text)

    def _record_resumed_step(self, step: Any) -> None:
        """Record the step at which the ranks actually resumed."""
        if isinstance(step, int):
            self.recorder.write(self.store.set_resumed_step, self.number, step)
            if self.start is not None and step != self.start.global_step:
                with contextlib.suppress(sqlite3.Error):
                    self._continue_from_history(ended=False)

    # -- facts ---------------------------------------------------------------------------------

    def has_pulses(self) -> bool:
        """Return True if at least one rank has a pulse."""
        return any(pulse is not None for pulse in self.pulses.values())

    def furthest_step(self) -> int | None:
        """Return the highest global step of all ranks, or None if there is no pulse.

        Until its first step, a rank of a resumed attempt stands at step 0.
        """
        steps = [p.global_step for p in self.pulses.values() if p is not None]
        if not steps:
            return None
        return max(*steps, 0 if self.start is None else self.start.global_step or 0)

    def have_stopped(self) -> bool:
        """Return True if all ranks have stopped together, with their checkpoint."""
        pulses = [pulse for pulse in self.pulses.values() if pulse is not None]
        return bool(pulses) and all(pulse.outcome is Outcome.STOPPED for pulse in pulses)

    def can_stop_together(self) -> bool:
        """Return True if the ranks can agree on a step at which they save and stop.

        At least one rank must send telemetry.
        """
        if self.coordination_error() is not None or not self.fold.saves_checkpoints:
            return False
        return any(p is not None and p.telemetry_ok for p in self.pulses.values())

    def coordination_error(self) -> str | None:
        """Return why the ranks cannot act together, or None if they can."""
        errors = (rank.steering_error for _, rank in sorted(self.fold.ranks.items()))
        # A stop with a checkpoint concerns the ranks alone.
        others = None if self.fold.saves_checkpoints else self.machine.others.error
        return next((error for error in errors if error is not None), others)

    def engine(self) -> ProcessIdentity | None:
        """Return the process of the engine, or None if it has not been started."""
        if self._engine is None:
            self._engine = engine_identity(self.run_dir, self.number)
        return self._engine

    def local_ranks(self) -> list[int]:
        """Return the ranks of this machine that have a process."""
        return sorted(self.machine.rank_processes)

    # -- readings and judgement ----------------------------------------------------------------

    def sample_machine(self, now_s: float) -> Batch:
        """Return new process and GPU readings, once a second."""
        batch = self.machine.sample(self.snapshot, self.pulses, self.engine(), now_s)
        if batch is None:
            return Batch()
        assert self.machine.table is not None
        self.evidence.update_processes(self.machine.table, self.machine.rank_processes)
        self.folder.leave_if_gone(self.kill_processes)
        batch.events += self.logs.update(time.monotonic())
        return batch

    def kill_processes(self) -> list[int]:
        """Kill all processes of the attempt on this machine. Return the pids of those that ran."""
        # After a reboot another process may have the same pid and even the same start time.
        known = [] if self.rebooted else list(local_processes(self.pulses).values())
        if (engine := self.engine()) is not None:
            known.append(engine)
        return kill_run_processes(self.run_dir, known)

    def throughput_samples(self) -> list[Sample]:
        """Return the throughput as rows of the history if a new point is due."""
        point = next_point(self.fold, self.pulses.keys(), self._throughput)
        if point is None:
            return []
        self._throughput = point
        # The time of the record is as unique as its number, which the fold does not keep.
        return [
            (rank, point.t_ns, THROUGHPUT, point.step, point.epoch, point.wall_s, rate)
            for rank, rate in point.rates.items()
        ]

    def judge(self, poll: QueuePoll, failures: Sequence[WorkerFailure] = ()) -> Judgement:
        """Return the judgement on the health of the ranks."""
        ranks, nodes = self.evidence.observe(poll, failures), self.nodes
        gpu_verdicts, evidence = self.machine.gpu_verdicts, self.evidence.rounds.evidence
        usage = dict(self.machine.readings)
        if nodes is not None:
            ranks = merge_ranks([ranks, *nodes.reports.rank_observations()])
            gpu_verdicts += nodes.reports.gpu_verdicts()
            evidence = self.evidence_of_all = nodes.merged_evidence(evidence)
            usage |= nodes.reports.usage()
        inputs = JudgeInput(
            **asdict(ranks),
            policy=self.spec.stall,
            history=self._health.history,
            pulses=poll.pulses,
            fold=self.fold,
            cpu_delays={r: u.delay_share for r, u in usage.items() if u.delay_share is not None},
            evidence=evidence,
            evidence_expected=self.evidence.rounds.error is None,
            host=self.evidence.host,
            nodes=() if nodes is None else nodes.snapshots(self.local_ranks()),
            hosts={} if nodes is None else nodes.reports.hosts(self.evidence.host),
            gpu_verdicts=gpu_verdicts,
            checkpoints=self.catalog.checkpoints(),
            now_ns=time.monotonic_ns(),
            now_s=time.time(),
        )
        ending = self.stops.escalation is not None
        return self.samples.explain(self._health.judge(inputs, end_requested=ending), self)

    def update_diagnoses(self, judgement: Judgement, poll: QueuePoll) -> None:
        """Collect evidence if that is due, and store and answer diagnoses."""
        nodes = self.nodes
        if nodes is not None and (judgement.suspects or self.evidence.rounds.diagnosis_requested):
            nodes.request_evidence()
        self.evidence.update(
            judgement,
            poll,
            self.fold,
            self.snapshot,
            of_all=self.evidence_of_all,
            complete_since=None if nodes is None else nodes.reports.has_evidence_since,
        )

    def last_poll(self) -> QueuePoll:
        """Return the last pulses as the poll of an attempt whose processes have all exited.

        Ranks that did not finish their training are then dead.
        """
        dead = frozenset(
            rank
            for rank, pulse in self.pulses.items()
            if pulse is not None and pulse.outcome is Outcome.RUNNING
        )
        unknown = frozenset() if self.nodes is None else self.nodes.silent_ranks()
        return QueuePoll({}, self.pulses, dead - unknown)

    # -- state and snapshot --------------------------------------------------------------------

    def update_state(self, now_s: float) -> None:
        """Derive the state of the run from pulses, processes and requests."""
        if self.queued_because is not None:
            self.state = RunState.QUEUED
            return
        state = RunState.RUNNING if self._is_training(now_s) else RunState.STARTING
        self.state = self.stops.state(self.pulses, state)

    def _is_training(self, now_s: float) -> bool:
        pulses = [p for p in self.pulses.values() if p is not None]
        if pulses:
            began = self.state not in (RunState.STARTING, RunState.QUEUED)
            begun = began and any(p.phase is not Phase.STARTING for p in pulses)
            return begun or training_has_started(pulses)
        # A program that has trained before is starting until it sends telemetry again.
        if self.spec.command is None or self._sends_telemetry:
            return False
        return self.has_logged or self.machine.program.runs(now_s - self.started_at)

    def build_snapshot(self, judgement: Judgement, now_s: float) -> RunSnapshot:
        """Build a snapshot, store it in ``snapshot``, and return it."""
        gpus, others = self.machine.gpu_view.gpus, {}
        if self.nodes is not None:
            gpus, others = gpus + self.nodes.reports.gpus(), self.nodes.reports.activity()
        trains = self.state is RunState.RUNNING and not judgement.is_blocked
        self.limits.update(time.monotonic(), trains, self.pulses, self.fold, gpus, others)
        self.snapshot = build_snapshot(self, judgement, now_s, time.monotonic_ns())
        return self.snapshot

    def shown_metrics(self, now_s: float) -> dict[str, MetricValue]:
        """Return the newest values, without ``train/loss`` if the program logs the same loss."""
        newest = metrics(self.fold)
        if self.recorder.logs_step_loss(now_s) and has_two_losses(newest):
            del newest[TRAIN_LOSS]
        return newest

    def close(self) -> None:
        """Stop all threads and close all files of the attempt, except the store."""
        self.machine.gpus.stop()
        if self.nodes is not None:
            self.nodes.close()
        self.evidence.close()
        self.profiles.close()
        self.queues.close()
        self.stops.close()
        self.folder.close()
