"""The supervisor's loop: look at the queues, fold, judge, do what was asked, write it all down.

One thread does this four times a second. The control server and the GPU sampler have their own
threads and share only finished values with it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from ltui.training.config.defaults import STOP_TIMEOUT_S
from ltui.training.config.run_spec import RunSpec
from ltui.training.diagnosis.judge import Judgement
from ltui.training.gpu.flop_utilisation import BatchFlops
from ltui.training.lifecycle.attempt_plan import AttemptPlan
from ltui.training.lifecycle.classify_end import AttemptEnd, EndFacts, with_verdict_cause
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.kill_processes import kill_run_processes
from ltui.training.lifecycle.pending_stops import PendingStopStore, delete_pending_stops
from ltui.training.lifecycle.queue_poller import QueuePoll, QueuePoller
from ltui.training.lifecycle.shim_files import (
    EngineExit,
    engine_exit,
    engine_identity,
    from_earlier_boot,
    shim_identity,
)
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity
from ltui.training.state.record_fold import FoldState, fold_many
from ltui.training.state.run_event import Event
from ltui.training.state.run_snapshot import (
    LIVE,
    RunSnapshot,
    RunState,
)
from ltui.training.state.snapshot_parts import metrics, training_has_started
from ltui.training.state.stop_conditions import StopCondition
from ltui.training.state.verdict_tracker import headline
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise import command_checks
from ltui.training.supervise.checkpoint_catalog import CheckpointCatalog
from ltui.training.supervise.control_server import ControlServer
from ltui.training.supervise.gpu_wait import GpuQueue
from ltui.training.supervise.history_recorder import HistoryRecorder
from ltui.training.supervise.machine_readings import READINGS_S, MachineMonitor
from ltui.training.supervise.previous_attempt import (
    restore_fold,
    starting_progress,
    stored_snapshot,
    stored_state,
)
from ltui.training.supervise.record_end import EndRecorder, determine_end, final_snapshot
from ltui.training.supervise.restart_policy import RestartPolicy
from ltui.training.supervise.script_checkpoints import ScriptCheckpoints
from ltui.training.supervise.snapshot_builder import SnapshotInputs, build_snapshot
from ltui.training.supervise.stop_controller import StopController
from ltui.training.supervise.watchdog.evidence_collector import EvidenceCollector
from ltui.training.supervise.watchdog.health_monitor import HealthMonitor
from ltui.training.supervise.watchdog.verdict_events import (
    VerdictNotifier,
    read_stored_verdicts,
)
from ltui.training.tensor_queue.queue_reader import Poll
from ltui.training.tensor_queue.record_types import Outcome, PulseState

TICK_S = 0.25
SNAPSHOT_S = 1.0
ANSWER_STOP_S = 5.0
"""Ranks that can still agree on a step get so long to save, before force ends a stalled run."""
LAST_CALLS_S = 2.0
"""So long the end of a run waits for calls under way, so that what came of them is recorded."""


class Supervisor:
    """One attempt of one run, from its start (or adoption) to its recorded end."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        store: StoreWriter,
        attempt: int,
        *,
        lock: int,
        plan: AttemptPlan,
    ) -> None:
        self.run_dir = run_dir
        self.spec = spec
        self.attempt = attempt
        self.shim_process: subprocess.Popen[bytes] | None = None
        self._shim: ProcessIdentity | None = None
        self._engine: ProcessIdentity | None = None
        self._store = store
        self.lock = lock
        self._adopted = plan.recover
        self._changes, self._reason = store.start_reason(attempt)
        before = stored_snapshot(run_dir)
        self._start = starting_progress(plan, before)
        self._restarts = RestartPolicy(run_dir, spec, attempt)
        self._pending_stops = PendingStopStore(run_dir, attempt)
        self._started_at = store.started_at(attempt) or time.time()
        self._queues = QueuePoller(run_dir.queue_dir(attempt), store.cursors(attempt))
        self._recorder = HistoryRecorder(store, attempt, self._queues)
        self._end_recorder = EndRecorder(run_dir, attempt, store, self._recorder)
        self._fold: FoldState = (
            restore_fold(run_dir, attempt) if store.last_attempt() else FoldState()
        )
        self._stops = StopController(run_dir.queue_dir(attempt) / "control.bin")
        self._machine = MachineMonitor(run_dir.id, user_command=spec.command is not None)
        self._flops: BatchFlops | None = None
        self.start_shim: Callable[[RunSpec], subprocess.Popen[bytes]] | None = None
        """Set where the engine is still to be started, once there are GPUs for it."""
        self._gpu_queue: GpuQueue | None = None
        self._queued: str | None = None
        self._notifier = VerdictNotifier(spec, attempt, str(run_dir.path))
        self._answered: str | None = None
        self._saved_at = 0.0
        self._catalog = CheckpointCatalog(run_dir.checkpoints_dir)
        self._script_checkpoints = ScriptCheckpoints(before)
        self._orders: deque[dict[str, Any]] = deque()
        self._woken = threading.Event()
        self._evidence = EvidenceCollector(run_dir, attempt, self._woken.set)
        self._health = HealthMonitor(spec.stall, self._evidence)
        self._state = RunState.STARTING
        self._stated: tuple[RunState, str | None] | None = None
        self._pulses: Mapping[int, PulseState | None] = {}
        opening: list[Event] = []
        self._rebooted = False
        self._last_seen: float | None = None
        """When an earlier supervisor wrote last, where this one found the attempt over."""
        if plan.recover:
            self._stops.restore(self._pending_stops.recovered_escalation())
            self._state = stored_state(run_dir) or self._state
            self._rebooted = from_earlier_boot(run_dir)
            before = stored_snapshot(run_dir)
            self._last_seen = None if before is None else before.taken_at
            if self._restarts.requested is not None:
                self._stops.kill(time.monotonic())
            self._notifier.restore(read_stored_verdicts(run_dir), time.time(), time.monotonic())
        else:
            text, facts = plan.event_text(attempt), plan.event_fields()
            opening.append(Event(time.time(), "attempt", text, facts))
        self._plan_stops()
        now_s = time.time()
        poll = self._look()
        if plan.recover and self._state is RunState.STARTING:
            # The supervisor before may have died before it wrote that the ranks train.
            self._state = self._live_state(now_s)
        self._snapshot = self._compose(self._judge(poll), now_s)
        self._recorder.write(self._write_first, now_s)
        self._recorder.record(poll.polls, Batch(events=opening), None, now_s)
        self._server = ControlServer(
            run_dir.bound_socket_path(), run_dir.socket_path, self._take_order
        )
        self._server.publish(self._snapshot)

    def _write_first(self) -> None:
        if not self._adopted:
            self._store.set_state(self.attempt, time.time(), self._state, None, None)
        self._store.write_snapshot(self._snapshot)

    @property
    def restart_waits(self) -> bool:
        """Whether the attempt has ended, and another is to follow."""
        return self._restarts.scheduled is not None

    def run(self) -> AttemptPlan | None:
        """Until the attempt's end is in the store. The attempt that is to follow, if any: then the
        run's lock is still held."""
        if not self.restart_waits:
            if self.start_shim is not None and not self._wait_for_gpus(self.start_shim):
                return None
            self._supervise()
        return self._wait_to_restart() if self.restart_waits else None

    def _supervise(self) -> None:
        end: EngineExit | None = None
        shim_died = False
        while end is None and not shim_died:
            begun = time.monotonic()
            behind = self.tick()
            end = engine_exit(self.run_dir, self.attempt)
            shim_died = end is None and not self._shim_alive()
            if not behind:
                self._woken.wait(max(0.02, TICK_S - (time.monotonic() - begun)))
                self._woken.clear()
        # The keeper writes how the engine ended before it goes.
        end = end or engine_exit(self.run_dir, self.attempt)
        self._finish(end, shim_died and end is None)

    def _wait_for_gpus(self, start_shim: Callable[[RunSpec], subprocess.Popen[bytes]]) -> bool:
        """Wait in the queue, then start the engine on what became free. False: it ended there."""
        queue = self._gpu_queue = GpuQueue(self.run_dir, self.spec.gpus or "", self._machine.gpus)
        self._queued = queue.reason
        looked_at = 0.0
        try:
            while self._stops.escalation is None:
                if time.monotonic() - looked_at >= READINGS_S:
                    looked_at = time.monotonic()
                    if (env := queue.try_allocate()) is not None:
                        spec = self.spec.with_changes(env={**self.spec.env, **env})
                        self.shim_process = start_shim(spec)
                        self._queued, self._started_at = None, time.time()
                        return True
                    self._queued = queue.reason
                self.tick()
                self._woken.wait(TICK_S)
                self._woken.clear()
        except ProblemError as error:
            self._end_in_queue(RunState.FAILED, str(error))
            return False
        self._end_in_queue(
            RunState.STOPPED, "stopped while it waited for GPUs: nothing was trained"
        )
        return False

    def _end_in_queue(self, state: RunState, detail: str) -> None:
        self._queued = None
        judgement = self._judge(QueuePoll({}, self._pulses, self._gone()))
        self._record_end(AttemptEnd(state=state, detail=detail), [], None, judgement)
        self._close()

    def abort(self) -> None:
        """Leave without a word in the store: nothing was started."""
        self._close()

    # -- orders (called by the control server's thread) -----------------------------------------

    def _take_order(self, order: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        snapshot = self._snapshot
        if order.get("cmd") == "diagnose":
            if snapshot.state not in LIVE:
                raise ValueError(f"the run is {snapshot.state.value}.")
            return self._evidence.request_diagnosis()
        has_pulses = any(p is not None for p in self._pulses.values())
        user_command = self.spec.command is not None
        multi_node = self.spec.nodes is not None
        command_checks.check_coordination(order, self._steering_error())
        command_checks.check(
            order, snapshot, has_pulses=has_pulses, user_command=user_command, multi_node=multi_node
        )
        answer: dict[str, Any] | Future[dict[str, Any]] = {"ok": True}
        if order["cmd"] == "stop_when":
            conditions = command_checks.stop_conditions(
                order,
                snapshot,
                has_pulses=has_pulses,
                user_command=user_command,
                multi_node=multi_node,
            )
            # Answered once it is on disk, so that no supervisor forgets what it has confirmed.
            answer = Future()
            order = {"cmd": "stop_when", "conditions": conditions, "taken": answer}
        self._orders.append(order)
        self._woken.set()
        return answer

    def ask_to_stop(self, number: int) -> None:
        """For the process's signal handler."""
        self._orders.append({"cmd": "stop", "signal": number})

    # -- one tick ------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Look, judge, act, record. True where more records wait than one look takes."""
        now_s = time.time()
        self._follow_orders()
        poll = self._look()
        engine = self._engine_identity()
        batch = self._read_machine(now_s, engine)
        batch.events += self._stop_by_itself(now_s)
        self._stops.escalate(
            time.monotonic(), self._pulses, engine, self._machine.unreported_processes
        )
        judgement = self._judge(poll)
        self._state = self._live_state(now_s)
        self._publish(judgement, now_s)
        self._evidence.update(judgement, poll, self._fold, self._snapshot)
        batch.events += self._notifier.update(
            self._snapshot.verdicts,
            now_s,
            time.monotonic(),
            ending=self._stops.escalation is not None,
        )
        batch.events += self._answer(now_s)
        self._write(poll.polls, batch, judgement, now_s)
        return poll.more_waiting

    def _stop_by_itself(self, now_s: float) -> list[Event]:
        """Stop where a condition has come true, or where ranks stop without having been asked."""
        rows: list[Event] = []
        if self._stops.detect_rank_stop(time.monotonic(), self._pulses):
            self._restarts.cancel_request()
        if self._stops.escalation is None:
            said = self._pending_stops.pop_due(lambda: metrics(self._fold), now_s, time.monotonic())
            if said is not None:
                self._stops.stop(time.monotonic(), STOP_TIMEOUT_S, self._can_be_asked())
                rows.append(Event(now_s, "stop_when", f"Stopping {said}."))
        self._pending_stops.record_escalation(self._stops.escalation)
        return rows

    def _plan_stops(self) -> None:
        orders = self._pending_stops.pending
        self._stops.plan_stop(orders.stop_step(), orders.stop_epochs())

    def _answer(self, now_s: float) -> list[Event]:
        """Do what the policy wants once a stall has stood long enough."""
        if self._state not in (RunState.STARTING, RunState.RUNNING) or self._stops.escalation:
            return []
        verdict = self._notifier.verdict_to_act_on(time.monotonic())
        if verdict is None:
            return []
        policy, said = self.spec.stall, headline(verdict)
        if policy.then == "restart":
            why_not = self.restart(f"its stall policy ended it ({said})", of=policy.restarts)
            if why_not is None:
                text = (
                    f"the stall policy restarts the run from its last good checkpoint after {said}"
                )
                return [Event(now_s, "stall_policy", text, {"then": "restart"})]
            said = f"{said}; not restarted: {why_not}"
        self._stops.stop(time.monotonic(), ANSWER_STOP_S, self._can_be_asked())
        self._answered = f"stopped by its stall policy ({said})"
        text = f"the stall policy stops the run after {said}"
        return [Event(now_s, "stall_policy", text, {"then": "stop"})]

    def _look(self) -> QueuePoll:
        poll = self._queues.poll()
        self._pulses = poll.pulses
        seen = self._fold.events_seen
        self._fold = fold_many(self._fold, poll.polls)
        for event in self._fold.events[len(self._fold.events) - (self._fold.events_seen - seen) :]:
            if event.kind == "checkpoint_saved":
                self._catalog.invalidate()
            elif event.kind == "script_checkpoint":
                self._script_checkpoints.add(event.fields)
            elif event.kind == "resumed":
                self._note_resumed(event.fields.get("global_step"))
            elif event.kind == "flops":
                self._flops = BatchFlops.from_event(event.fields) or self._flops
            elif event.kind == "checkpoint_failed" and event.fields.get("reason") == "stop":
                # The ranks train on rather than lose what they learned: so does the ladder end.
                self._stops.stop_failed(event.text)
                self._pending_stops.discard_unreachable(
                    event.fields.get("step") or 0, event.fields.get("epoch") or 0
                )
                self._plan_stops()
        return poll

    def _note_resumed(self, step: Any) -> None:
        """The rank knows from which step it really went on."""
        if isinstance(step, int):
            self._recorder.write(
                lambda: self._store.set_resumed_step(self.attempt, step), time.time()
            )

    def _furthest_step(self) -> int | None:
        return max((p.global_step for p in self._pulses.values() if p is not None), default=None)

    def _follow_orders(self) -> None:
        now_s = time.monotonic()
        while self._orders:
            order = self._orders.popleft()
            command = order["cmd"]
            if command == "stop":
                timeout_s = float(order.get("timeout_s", STOP_TIMEOUT_S))
                self._stops.stop(now_s, max(0.0, timeout_s), self._can_be_asked())
                self._restarts.cancel_request()
            elif command == "kill":
                self._stops.kill(now_s)
                self._restarts.cancel_request()
            elif command == "stop_when":
                self._take_conditions(order["conditions"], order["taken"])
            elif command == "pause":
                self._stops.pause()
            elif command == "continue":
                self._stops.resume()
            else:
                self._stops.checkpoint()

    def _take_conditions(
        self, conditions: list[StopCondition] | None, taken: Future[dict[str, Any]]
    ) -> None:
        if conditions is None:
            self._pending_stops.clear()
        else:
            self._pending_stops.add(conditions)
        self._plan_stops()
        taken.set_result({"ok": True, "stops": [c.describe() for c in conditions or ()]})

    def _can_be_asked(self) -> bool:
        """Whether there are ranks that can agree: some have telemetry, and none is elsewhere."""
        if self._steering_error() is not None:
            return False
        return self.spec.nodes is None and any(
            p is not None and p.telemetry_ok for p in self._pulses.values()
        )

    def _steering_error(self) -> str | None:
        """Why the ranks can't act together; None where they can."""
        errors = (rank.steering_error for _, rank in sorted(self._fold.ranks.items()))
        return next((error for error in errors if error is not None), None)

    def _read_machine(self, now_s: float, engine: ProcessIdentity | None) -> Batch:
        """Process and GPU readings, once a second."""
        batch = self._machine.sample(self._snapshot, self._pulses, engine, now_s)
        if batch is None:
            return Batch()
        assert self._machine.table is not None
        self._evidence.update_processes(self._machine.table, self._machine.rank_processes)
        return batch

    def _judge(self, poll: QueuePoll, failures: Sequence[WorkerFailure] = ()) -> Judgement:
        end_requested = self._stops.escalation is not None
        return self._health.judge(
            poll,
            self._fold,
            end_requested=end_requested,
            failures=failures,
            gpu_verdicts=self._machine.gpu_verdicts,
            cpu_delays=self._machine.cpu_delays(),
        )

    def _live_state(self, now_s: float) -> RunState:
        state = self._state
        if self._queued is not None:
            return RunState.QUEUED
        if state in (RunState.STARTING, RunState.QUEUED):
            state = RunState.RUNNING if self._trains(now_s) else RunState.STARTING
        elif state not in (RunState.STOPPING,):
            state = RunState.RUNNING
        return self._stops.state(self._pulses, state)

    def _trains(self, now_s: float) -> bool:
        known = [p for p in self._pulses.values() if p is not None]
        if not known:
            runs_after_s = self._machine.program.runs_after_s()
            return self.spec.command is not None and now_s - self._started_at > runs_after_s
        return training_has_started(known)

    def _detail(self) -> str | None:
        if self._restarts.scheduled is not None:
            return self._restarts.scheduled.describe()
        if self._stops.escalation is not None:
            return self._stops.escalation.describe(time.monotonic())
        if self._queued is not None:
            return self._queued
        if self._stops.error is not None:
            return self._stops.error
        if self._state is RunState.PAUSED:
            return f"paused at step {self._furthest_step()}"
        if self._state is RunState.RUNNING and not any(self._pulses.values()):
            return self._machine.program.describe()
        if self._queues.errors:
            rank, why = next(iter(sorted(self._queues.errors.items())))
            return f"the queue of rank {rank} cannot be read: {why}"
        return None

    def _compose(self, judgement: Judgement, now_s: float) -> RunSnapshot:
        return build_snapshot(
            SnapshotInputs(
                run_dir=self.run_dir,
                spec=self.spec,
                attempt=self.attempt,
                state=self._state,
                detail=self._detail(),
                started_at=self._started_at,
                now_s=now_s,
                now_ns=time.monotonic_ns(),
                fold=self._fold,
                pulses=self._pulses,
                judgement=judgement,
                unreported_processes=self._machine.unreported_processes,
                program=self._machine.program,
                readings=self._machine.readings,
                gpus=self._machine.gpu_view,
                gpu_verdicts=self._machine.gpu_verdicts,
                flops=self._flops,
                changes=self._changes,
                restarted_because=self._reason,
                stops=self._pending_stops.pending.descriptions(),
                checkpoints=self._catalog.checkpoints(),
                script_checkpoints=self._script_checkpoints.existing(now_s),
                history_note=self._recorder.note,
                supervisor_pid=os.getpid(),
                start=self._start,
            )
        )

    def _publish(self, judgement: Judgement, now_s: float) -> None:
        self._snapshot = self._compose(judgement, now_s)
        self._server.publish(self._snapshot)

    def _write(
        self, polls: Mapping[int, Poll], batch: Batch, judgement: Judgement, now_s: float
    ) -> None:
        stated = (self._state, None if self._state in (RunState.STOPPING,) else self._detail())
        changed = self._stated is None or stated[0] is not self._stated[0]
        self._stated = stated
        due = changed or time.monotonic() - self._saved_at >= SNAPSHOT_S
        self._recorder.record(polls, batch, self._snapshot if due else None, now_s)
        if due:
            self._saved_at = time.monotonic()
        if changed and not self._recorder.failing:
            self._recorder.write(
                lambda: self._store.set_state(
                    self.attempt, now_s, self._state, self._snapshot.detail, None
                ),
                now_s,
            )
        over = self._machine.take_ended_verdicts()
        if due or judgement.ended or over:
            standing = (*judgement.verdicts, *self._machine.gpu_verdicts)
            for verdict in (*standing, *judgement.ended, *over):
                if not self._recorder.failing:
                    self._recorder.write(
                        lambda v=verdict: self._store.write_verdict(self.attempt, v),  # type: ignore[misc]
                        now_s,
                    )

    # -- restarts ------------------------------------------------------------------------------

    def restart(self, reason: str, *, of: int, save_s: float = 0.0) -> str | None:
        """End what is left of this attempt, then start the next from the last good checkpoint.

        ``reason`` is a sentence for people; ``of`` how many restarts there may be since a person
        last started the run. Ranks that can still agree on a step get ``save_s`` seconds to save;
        0 kills at once. None where it is under way, otherwise why there is no restart: then
        nothing was done. Called by the loop's thread.
        """
        why = self._restarts.request(reason, of=of, step=self._furthest_step())
        if why is not None:
            return why
        if save_s > 0:
            self._stops.stop(time.monotonic(), save_s, self._can_be_asked())
        else:
            self._stops.kill(time.monotonic())
        return None

    def _wait_to_restart(self) -> AttemptPlan | None:
        """Wait, unless a person stops it, then hand over to the next attempt."""
        waiting = self._restarts.scheduled
        assert waiting is not None
        if self._adopted:
            self._snapshot = stored_snapshot(self.run_dir) or self._snapshot
        announced_at = 0.0
        while waiting.remaining_s() > 0:
            self._follow_orders()
            if self._stops.escalation is not None:
                text = f"stopped while it waited for restart {waiting.number} of {waiting.of}"
                self._settle(RunState.STOPPED, f"{text}, after: {waiting.detail}")
                return None
            self._snapshot = replace(
                self._snapshot,
                state=RunState.QUEUED,
                detail=waiting.describe(),
                stops=self._pending_stops.pending.descriptions(),
                taken_at=time.time(),
                supervisor_pid=os.getpid(),
            )
            self._server.publish(self._snapshot)
            if time.monotonic() - announced_at >= SNAPSHOT_S:
                announced_at = time.monotonic()
                self._recorder.record({}, Batch(), self._snapshot, time.time())
            self._woken.wait(min(TICK_S, waiting.remaining_s()))
            self._woken.clear()
        plan = self._restarts.start_next(waiting, self._changes)
        if isinstance(plan, str):
            self._settle(waiting.end_state(), f"{waiting.detail}; {plan}")
            return None
        self._close(keep_lock=True)
        return plan

    def _settle(self, state: RunState, detail: str) -> None:
        """There is no restart after all: the attempt's end is the run's."""
        found = AttemptEnd(state=state, detail=detail, exit_code=self._snapshot.exit_code)
        self._snapshot = replace(self._snapshot, state=state, detail=detail)
        self._server.publish(self._snapshot)
        self._snapshot, _ = self._end_recorder.write(self._snapshot, found)
        self._restarts.cancel_scheduled()
        self._end_recorder.release_shim()
        self._close()

    # -- the end -------------------------------------------------------------------------------

    def _shim_alive(self) -> bool:
        if self.shim_process is not None:
            self.shim_process.poll()
        if self._shim is None:
            self._shim = shim_identity(self.run_dir, self.attempt)
        return self._shim is not None and self._shim.alive()

    def _engine_identity(self) -> ProcessIdentity | None:
        if self._engine is None:
            self._engine = engine_identity(self.run_dir, self.attempt)
        return self._engine

    def _finish(self, end: EngineExit | None, shim_died: bool) -> None:
        """Clean up, find out how it ended, and stay until that is written."""
        known = [
            ProcessIdentity(p.pid, p.start_ticks)
            for p in self._pulses.values()
            # After a reboot another's process may have the number, even the start time.
            if p is not None and p.pid > 0 and not self._rebooted
        ]
        engine = self._engine_identity()
        left = kill_run_processes(self.run_dir, [*known, *([engine] if engine else [])])
        while self._look_last():
            pass
        found, failures = self._judge_end(end, shim_died and (not self._adopted or bool(left)))
        judgement = self._judge(QueuePoll({}, self._pulses, self._gone()), failures)
        verdicts = (*self._snapshot.verdicts, *judgement.verdicts)
        found = with_verdict_cause(found, verdicts, self._furthest_step())
        if self._answered is not None:
            found = replace(found, detail=f"{self._answered}: {found.detail}")
        end_requested = self._stops.escalation is not None
        found = self._restarts.schedule_if_due(
            found, end, self._furthest_step(), end_requested=end_requested
        )
        self._record_end(found, failures, end, judgement)
        if not self.restart_waits:
            self._close()

    def _look_last(self) -> bool:
        poll = self._look()
        self._recorder.record(poll.polls, Batch(), None, time.time())
        return poll.more_waiting

    def _judge_end(
        self, end: EngineExit | None, shim_died: bool
    ) -> tuple[AttemptEnd, list[WorkerFailure]]:
        facts = EndFacts(
            exit=end,
            shim_died=shim_died,
            rebooted=self._rebooted,
            pulses=self._pulses,
            fold=self._fold,
            stop_requested=self._stops.escalation is not None,
            forced_reason=self._stops.forced_reason,
            checkpoints=self._catalog.verified_checkpoints(),
            user_command=self.spec.command is not None,
            multi_node=self.spec.nodes is not None,
            global_step=self._furthest_step(),
        )
        return determine_end(self.run_dir, self.attempt, facts)

    def _record_end(
        self,
        found: AttemptEnd,
        failures: list[WorkerFailure],
        end: EngineExit | None,
        judgement: Judgement,
    ) -> None:
        self._state = found.state
        ended_at = end.ended_at if end and end.ended_at else time.time()
        if end is None and found.state is RunState.LOST:
            ended_at = self._last_seen or ended_at
        gpus_over = self._machine.end_verdicts(ended_at)
        waiting = self._restarts.scheduled
        now = replace(self._compose(judgement, time.time()), throughput=self._snapshot.throughput)
        self._snapshot = final_snapshot(now, found, failures, ended_at=ended_at, waiting=waiting)
        self._server.publish(self._snapshot)
        poll = QueuePoll({}, self._pulses, self._gone())
        self._evidence.update(judgement, poll, self._fold, self._snapshot)
        self._snapshot = self._end_recorder.write_with_retry(self._snapshot, found)
        for verdict in gpus_over:
            self._recorder.write(
                lambda v=verdict: self._store.write_verdict(self.attempt, v),  # type: ignore[misc]
                ended_at,
            )
        self._tell_last(judgement, ended_at)
        if waiting is None:
            delete_pending_stops(self.run_dir)
            self._end_recorder.release_shim()
        else:
            event = Event(time.time(), "restart", f"{waiting.describe()}.", asdict(waiting))
            self._recorder.record({}, Batch(events=[event]), None, time.time())

    def _tell_last(self, judgement: Judgement, ended_at: float) -> None:
        """The events of verdicts that only the end brought, and of calls under way."""
        failed = self._state in (RunState.FAILED, RunState.CRASHED, RunState.LOST)
        rows = self._notifier.update(
            judgement.verdicts, ended_at, time.monotonic(), ending=not failed
        )
        rows += self._notifier.end(ended_at)
        rows += self._notifier.wait_for_hooks(LAST_CALLS_S)
        if rows and not self._recorder.failing:
            self._recorder.record({}, Batch(events=rows), None, time.time())

    def _gone(self) -> frozenset[int]:
        """After the end no rank is alive: whoever had not left its loop is dead."""
        return frozenset(
            r for r, p in self._pulses.items() if p is not None and p.outcome is Outcome.RUNNING
        )

    def _close(self, *, keep_lock: bool = False) -> None:
        self._machine.gpus.stop()
        self._evidence.close()
        self._server.close()
        self._queues.close()
        self._stops.close()
        self._store.close()
        if self._gpu_queue is not None:
            self._gpu_queue.release()
        if keep_lock:
            return
        # Said outright: a driver call that hangs may keep the process from ending.
        os.ftruncate(self.lock, 0)
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)
        # Whoever is still being called is waited for, but not by anybody who waits for the run.
        self._notifier.wait_for_hooks(self.spec.stall.on_verdict_timeout_s + 1.0)
