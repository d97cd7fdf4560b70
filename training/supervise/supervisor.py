"""The supervisor's loop: poll the queues, judge, carry out requests, and write the history.

One thread does this four times a second. The control server and the GPU sampler have threads of
their own and share only immutable values with it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.diagnosis.judge import Judgement
from ltui.training.lifecycle.delete_runs import CLEAN_S, empty_bin
from ltui.training.lifecycle.dispatcher_process import ensure_dispatcher
from ltui.training.lifecycle.rank_queue_poller import QueuePoll, remove_stored_queues
from ltui.training.lifecycle.restart_policy import ScheduledRestart
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.problem import ProblemError
from ltui.training.process.identity import release_lock
from ltui.training.state.good_checkpoints import nan_since
from ltui.training.state.run_snapshot import Event, RunState
from ltui.training.store.frozen_code import read_frozen
from ltui.training.store.history_writer import Batch
from ltui.training.store.queue_files import published
from ltui.training.supervise.control_requests import ControlServer, RequestHandler
from ltui.training.supervise.event_mirror import EventMirror
from ltui.training.supervise.finish_attempt import AttemptFinisher
from ltui.training.supervise.gpu_wait import GpuQueue
from ltui.training.supervise.history_recorder import stored_snapshot
from ltui.training.supervise.live_attempt import LiveAttempt
from ltui.training.supervise.machine_readings import READINGS_S
from ltui.training.supervise.snapshot_recorder import SnapshotRecorder
from ltui.training.supervise.verdict_hooks import VerdictNotifier
from ltui.training.sweep.sweep_files import active_sweeps

if TYPE_CHECKING:
    from ltui.training.supervise.remote_nodes import RemoteNodes

TICK_S = 0.25
"""Seconds between two ticks of the loop."""
_IDLE_TIMES = 7.0
"""The loop rests for so many times the processor time that a tick took, so that it uses an eighth
of a core at most. With some hundred ranks it is therefore slower than ``TICK_S``."""
_LONGEST_REST_S = 2.0
ENGINES_END_S = 20.0
"""Seconds that the engines of all machines have to end once one of them has ended or failed."""
KILLED_S = 8.0
"""Seconds that the agents have to kill what is left of an attempt."""
SNAPSHOT_S = 1.0
"""Seconds between two snapshots that are written to the store while the state is unchanged."""
_SNAPSHOT_RANKS = 256
"""Number of ranks from which on snapshots are larger, and written less often."""


class Supervisor:
    """Supervises one attempt of a run from its start, or its recovery, to its recorded end."""

    def __init__(self, live: LiveAttempt) -> None:
        self.live = live
        run_dir, spec, plan = live.run_dir, live.spec, live.plan
        self._gpu_queue: GpuQueue | None = None
        self._gpus_tried_s = 0.0
        self._saved_at = 0.0
        self._recorded_state: RunState | None = None
        self._mirror = EventMirror(run_dir, spec)
        self._notifier = VerdictNotifier(spec, live.number, str(run_dir.path))
        self._requests = RequestHandler(live, self._notifier, live.wake)
        events: list[Event] = []
        if plan.recover:
            reported = live.previous.verdicts if live.previous is not None else ()
            self._notifier.restore(reported, time.time(), time.monotonic())
            if live.last_seen_at is not None:
                text = "The supervisor was started again, because the one before had died."
                since = {"since": live.last_seen_at}
                events.append(Event(time.time(), "supervisor", text, since))
        else:
            text, fields = plan.event_text(live.number), plan.event_fields()
            events.append(Event(time.time(), "attempt", text, fields))
            is_new = spec.freeze and live.number == spec.code_copy
            if is_new and (frozen := read_frozen(run_dir, live.number)) is not None:
                events.append(Event(time.time(), "note", f"{frozen.text()}."))
        now_s = time.time()
        poll = live.begin(now_s)
        if not live.recovered:
            live.recorder.write(live.store.set_state, live.number, now_s, live.state, None, None)
        live.recorder.write(live.store.write_snapshot, live.snapshot)
        live.recorder.record(poll.polls, Batch(events=events), None, now_s)
        self._past = SnapshotRecorder(run_dir)
        self._server = ControlServer(
            run_dir.bound_socket_path(), run_dir.socket_path, self._requests.accept, self._past.add
        )
        self._server.publish(live.snapshot)
        self._finisher = AttemptFinisher(live, self._requests, self._notifier, self._server)

    @property
    def restart_waits(self) -> bool:
        """True if the attempt has ended and another one is scheduled."""
        return self.live.restarts.scheduled is not None

    def run(self) -> AttemptPlan | None:
        """Supervise the attempt until its end is recorded.

        Return the plan of the next attempt, for which the run lock stays held, or None.
        """
        if not self.restart_waits:
            start_shim = self.live.start_shim
            if start_shim is not None and not self._wait_to_start(start_shim):
                return None
            self._supervise()
        scheduled = self.live.restarts.scheduled
        return None if scheduled is None else self._wait_to_restart(scheduled)

    def request_stop(self, number: int) -> None:
        """Queue a stop request. Called by the handler of signal ``number``."""
        self._requests.request_stop(number)

    def abort(self) -> None:
        """Exit without recording an end, because nothing was started."""
        self._close()

    # -- the loop ------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Run the loop until the engine ends or the shim dies, then finish the attempt."""
        running = True
        while running:
            begun_s, cpu_s = time.monotonic(), time.thread_time()
            more_waiting = self.tick()
            running = self.live.shim.is_running()
            if not more_waiting:
                rest_s = min(_IDLE_TIMES * (time.thread_time() - cpu_s), _LONGEST_REST_S)
                self._sleep(max(0.02, rest_s, TICK_S - (time.monotonic() - begun_s)))
        end = self.live.shim.end()
        if self.live.nodes is not None:
            self._end_on_all_nodes(self.live.nodes)
        self._finisher.finish(end)
        if not self.restart_waits:
            self._close()

    def _end_on_all_nodes(self, nodes: RemoteNodes) -> None:
        """Wait until the engines of the other machines have ended, then let the agents kill.

        Each wait has a limit, since a machine may not answer any more. When force is used, it is
        only for the machines that answer.
        """
        live = self.live

        def engines_ended() -> bool:
            return nodes.reports.engines_ended(of_all=live.stops.forced_reason is None)

        for wait_s, is_done in (
            (ENGINES_END_S, engines_ended),
            (KILLED_S, nodes.reports.all_killed),
        ):
            deadline_s = time.monotonic() + wait_s
            while not is_done() and time.monotonic() < deadline_s:
                self.tick()
                self._sleep(TICK_S)
            nodes.end(leave=False)
        live.poll()

    def tick(self) -> bool:
        """Poll, judge, act and record once. Return True if the queues hold more records."""
        live = self.live
        now_s = time.time()
        self._requests.carry_out()
        poll = live.poll()
        batch = live.sample_machine(now_s)
        batch.samples += live.throughput_samples()
        batch.events += self._requests.stop_if_due(now_s)
        live.stops.escalate(
            time.monotonic(), live.pulses, live.engine(), live.machine.unreported_processes
        )
        if live.nodes is not None:
            batch.events += self._update_nodes(live.nodes)
        judgement = live.judge(poll)
        live.update_state(now_s)
        self._server.publish(live.build_snapshot(judgement, now_s))
        live.update_diagnoses(judgement, poll)
        batch.events += self._notifier.update(
            live.snapshot.verdicts,
            now_s,
            time.monotonic(),
            ending=live.stops.escalation is not None,
            step=live.furthest_step(),
        )
        batch.events += self._requests.apply_stall_policy(now_s)
        batch.events += self._requests.events
        self._requests.events = []
        batch.events += live.profiles.update(live.state, live.pulses, live.fold)
        batch.events += self._mirror.update(time.monotonic())
        self._write(poll, batch, judgement, now_s)
        return poll.more_waiting

    def _update_nodes(self, nodes: RemoteNodes) -> list[Event]:
        """Pass requests on to the other machines, and end the attempt if it cannot go on."""
        live, now_s = self.live, time.monotonic()
        if number := nodes.stop_signal():
            self.request_stop(number)
        nodes.set_stop(live.stops.escalation)
        events = nodes.update(now_s, is_requested=live.stops.is_requested(live.pulses))
        if live.stops.escalation is not None and live.stops.escalation.kill_at_once:
            return events
        failure = nodes.failure(now_s, patience_s=ENGINES_END_S)
        if failure is not None:
            live.nodes_failure = failure
            # A stop stays a stop. That of a stall policy has requested its restart already.
            if not nodes.missing() and live.stops.escalation is None:
                step = live.furthest_step()
                live.restarts.request(failure, of=live.spec.restarts, step=step)
            live.stops.kill(now_s)
        return events

    def _write(self, poll: QueuePoll, batch: Batch, judgement: Judgement, now_s: float) -> None:
        """Write records, events and verdicts. Write the snapshot if it is due."""
        live = self.live
        changed = self._recorded_state is not live.state
        self._recorded_state = live.state
        period_s = SNAPSHOT_S * max(1.0, len(live.snapshot.ranks) / _SNAPSHOT_RANKS)
        due = changed or time.monotonic() - self._saved_at >= period_s
        live.recorder.record(poll.polls, batch, live.snapshot if due else None, now_s)
        if due:
            self._saved_at = time.monotonic()
            if published(live.run_dir.home) or active_sweeps(live.run_dir.home):
                ensure_dispatcher(live.run_dir.home)
        if changed and not live.recorder.failing:
            detail = live.snapshot.detail
            live.recorder.write(live.store.set_state, live.number, now_s, live.state, detail, None)
        ended = (*judgement.ended, *live.machine.take_ended_verdicts())
        if due or ended:
            for verdict in (*judgement.verdicts, *live.machine.gpu_verdicts, *ended):
                if not live.recorder.failing:
                    live.recorder.write(live.store.write_verdict, live.number, verdict)

    def _sleep(self, seconds: float) -> None:
        """Wait until the next tick, or until a request or new evidence arrives."""
        self.live.wake.wait(seconds)
        self.live.wake.clear()

    # -- waiting -------------------------------------------------------------------------------

    def _wait_to_start(self, start_shim: Callable[[RunSpec], subprocess.Popen[bytes]]) -> bool:
        """Wait for the other nodes, then for free GPUs, then start the engine.

        Return False if the run ended before that.
        """
        live, spec = self.live, self.live.spec
        if spec.gpus is not None:
            self._gpu_queue = GpuQueue(live.run_dir, spec.gpus, live.machine.gpus)
        try:
            while live.stops.escalation is None:
                ready = self._readiness()
                if not isinstance(ready, str):
                    live.shim.child = start_shim(spec.with_changes(env={**spec.env, **ready}))
                    live.queued_because, live.started_at = None, time.time()
                    return True
                live.queued_because = ready
                self.tick()
                self._sleep(TICK_S)
        except ProblemError as error:
            self._finisher.finish_queued(RunState.FAILED, str(error))
        else:
            what = "other nodes" if live.nodes is not None and live.nodes.missing() else "GPUs"
            state, detail = RunState.STOPPED, f"stopped while it waited for {what}"
            if live.nodes_failure is not None:
                state, detail = RunState.FAILED, live.nodes_failure
            self._finisher.finish_queued(state, f"{detail}: nothing was trained")
        self._close()
        return False

    def _readiness(self) -> dict[str, str] | str:
        """Return the variables with which the engine can start, or why it has to wait."""
        nodes, queue = self.live.nodes, self._gpu_queue
        if nodes is not None and (waiting := nodes.waiting_text()) is not None:
            return waiting
        if queue is None:
            return {}
        if time.monotonic() - self._gpus_tried_s < READINGS_S:
            return queue.reason
        self._gpus_tried_s = time.monotonic()
        variables = queue.try_allocate()
        return queue.reason if variables is None else variables

    def _wait_to_restart(self, restart: ScheduledRestart) -> AttemptPlan | None:
        """Wait until the restart is due. Return its plan, or None if a person stops the run.

        It is not due while another machine does not answer and is not gone: half of the ranks could
        not start, and those of the ended attempt may still run there.
        """
        live, nodes = self.live, self.live.nodes
        if live.recovered:
            live.snapshot = stored_snapshot(live.run_dir) or live.snapshot
        else:
            # The stop that ended the attempt is over. A new one is a request of a person.
            live.stops.escalation = None
            live.stops.record()
        recorded_at = 0.0
        obstacle: str | None = None
        while True:
            batch = Batch()
            if nodes is not None:
                batch.events += nodes.update(time.monotonic(), is_requested=False)
                obstacle = nodes.silence_text()
            if restart.remaining_s() <= 0 and obstacle is None:
                break
            self._requests.carry_out()
            if live.stops.escalation is not None:
                text = f"stopped while it waited for restart {restart.number} of {restart.of}"
                self._finisher.cancel_restart(RunState.STOPPED, f"{text}, after: {restart.detail}")
                self._close()
                return None
            live.snapshot = replace(
                live.snapshot,
                state=RunState.QUEUED,
                detail=restart.describe(obstacle),
                stops=live.stops.descriptions(),
                taken_at=time.time(),
                supervisor_pid=os.getpid(),
            )
            self._server.publish(live.snapshot)
            if batch.events or time.monotonic() - recorded_at >= SNAPSHOT_S:
                recorded_at = time.monotonic()
                live.recorder.record({}, batch, live.snapshot, time.time())
            self._sleep(TICK_S if obstacle else min(TICK_S, restart.remaining_s()))
        gone = () if nodes is None else nodes.gone()
        since = nan_since(live.snapshot.verdicts)
        plan = live.restarts.start_next(restart, live.changes, gone, since)
        if isinstance(plan, str):
            self._finisher.cancel_restart(restart.state, f"{restart.detail}; {plan}")
            self._close()
            return None
        self._close(keep_lock=True)
        return plan

    # -- the end -------------------------------------------------------------------------------

    def _close(self, *, keep_lock: bool = False) -> None:
        live = self.live
        live.close()
        self._requests.close()
        self._server.close()
        self._past.close()
        recorded = self._finisher.recorded
        if recorded and not keep_lock:
            # Not earlier: until the end is recorded and the shim released, another supervisor may
            # have to continue with them.
            with contextlib.suppress(sqlite3.Error):
                remove_stored_queues(live.run_dir, live.store)
        live.store.close()
        self._mirror.close()
        if self._gpu_queue is not None:
            self._gpu_queue.release()
        if keep_lock:
            return
        # Release the lock explicitly: a driver call that hangs may keep the process from exiting.
        if recorded:
            release_lock(live.lock)
        else:
            # The lock file goes on naming this process, so that the run counts as abandoned.
            os.close(live.lock)
        # Last: nobody waits for it.
        empty_bin(live.run_dir.home, limit_s=CLEAN_S)
        # Wait for verdict hooks in progress after the run is released, so that no client waits.
        self._notifier.wait_for_hooks(live.spec.stall.on_verdict_timeout_s + 1.0)
