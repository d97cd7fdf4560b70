"""Finish an attempt: kill remaining processes, classify the end, and record it.

Used by the supervisor's loop only, when the engine has ended or was never started. The disk may be
full.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.verdict_words import NO_MACHINES, rank_machines
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.classify_end import (
    AttemptEnd,
    EndFacts,
    classify_end,
    with_verdict_cause,
)
from ltui.training.lifecycle.elastic_log import (
    WorkerFailure,
    likely_error_line,
    log_tail,
    merged_failures,
    worker_failures,
)
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.state.run_snapshot import Event, RunState
from ltui.training.store.history_writer import Batch
from ltui.training.supervise.control_requests import ControlServer, RequestHandler
from ltui.training.supervise.live_attempt import LiveAttempt
from ltui.training.supervise.run_folder import disk_is_full
from ltui.training.supervise.snapshot_builder import final_snapshot
from ltui.training.supervise.verdict_hooks import VerdictNotifier

HOOK_WAIT_S = 2.0
"""Seconds to wait at the end of a run for verdict hooks in progress, to record their results."""
END_PATIENCE_S = 60.0
"""Seconds to retry writing the end to a full disk.

After that the supervisor exits like one that was killed: clients derive the end from the files of
shim and ranks, and the next ltui command starts a supervisor that records it.
"""


class AttemptFinisher:
    """Finishes one attempt."""

    def __init__(
        self,
        attempt: LiveAttempt,
        requests: RequestHandler,
        notifier: VerdictNotifier,
        server: ControlServer,
    ) -> None:
        self._attempt = attempt
        self._requests = requests
        self._notifier = notifier
        self._server = server
        self.recorded = True
        """False once the end could not be written in time."""

    def finish(self, engine_exit: EngineExit | None) -> None:
        """Finish an attempt whose engine has ended. Schedule a restart if one is due.

        Returns when the end is recorded. ``engine_exit`` is None if the shim has died before it
        could observe the end.
        """
        attempt = self._attempt
        killed = attempt.kill_processes()
        while self._record_remaining():
            pass
        # In a recovered attempt the shim is blamed only if processes were still running.
        shim_died = engine_exit is None and (not attempt.recovered or bool(killed))
        if (
            attempt.recovered
            and engine_exit is None
            and not (killed or attempt.stops.has_signalled)
        ):
            attempt.stops.forced_reason = None  # All had ended before a stop could use force.
        log = log_tail(attempt.run_dir.engine_log_path(attempt.number))
        failures = worker_failures(log)
        if attempt.nodes is not None:
            failures = merged_failures(failures, attempt.nodes.reports.failures())
        end = self._classify(engine_exit, shim_died, log, failures)
        if attempt.nodes_failure is not None:
            state = RunState.FAILED if attempt.furthest_step() is None else RunState.CRASHED
            end = replace(end, state=state, detail=attempt.nodes_failure)
        judgement = attempt.judge(attempt.last_poll(), failures)
        verdicts = (*attempt.snapshot.verdicts, *judgement.verdicts)
        end = with_verdict_cause(end, verdicts, attempt.furthest_step(), self._machines())
        lost = next((v for v in verdicts if v.nodes and v.level == VerdictLevel.DEAD), None)
        if lost is not None and attempt.nodes_failure is None and end.state is RunState.FAILED:
            # The ranks failed only because they lost their connections to that machine.
            end = replace(end, state=RunState.CRASHED, detail=lost.cause)
        silence = None if attempt.nodes is None else attempt.nodes.silence_text()
        is_forced = attempt.stops.forced_reason is not None
        crashed = end.state is RunState.CRASHED and lost is None
        if silence is not None and (is_forced or crashed):
            end = replace(end, detail=f"{end.detail}; {silence}")
        if end.state in (RunState.FAILED, RunState.CRASHED) and disk_is_full(attempt.run_dir.path):
            # A program that cannot write its log cannot say so either.
            end = replace(end, detail=f"the disk of {attempt.run_dir.path} is full; {end.detail}")
        if self._requests.stopped_because is not None:
            end = replace(end, detail=f"{self._requests.stopped_because}: {end.detail}")
        end = attempt.restarts.schedule_if_due(
            end,
            engine_exit,
            attempt.furthest_step(),
            end_requested=attempt.stops.escalation is not None,
        )
        self._record(end, failures, engine_exit, judgement)

    def finish_queued(self, state: RunState, detail: str) -> None:
        """Finish an attempt that waited to start and whose engine was never started."""
        self._attempt.queued_because = None
        judgement = self._attempt.judge(self._attempt.last_poll())
        self._record(AttemptEnd(state=state, detail=detail), [], None, judgement)

    def cancel_restart(self, state: RunState, detail: str) -> None:
        """Cancel the scheduled restart, so that the end of this attempt is the end of the run."""
        attempt = self._attempt
        end = AttemptEnd(state=state, detail=detail, exit_code=attempt.snapshot.exit_code)
        attempt.snapshot = replace(attempt.snapshot, state=state, detail=detail)
        self._server.publish(attempt.snapshot)
        self._write_end(end)
        attempt.restarts.cancel_scheduled()
        self._release_shim()

    def _record_remaining(self) -> bool:
        """Record what is left in the queues. Return True if there is more."""
        poll = self._attempt.poll()
        self._attempt.recorder.record(poll.polls, Batch(), None, time.time())
        return poll.more_waiting

    def _classify(
        self,
        engine_exit: EngineExit | None,
        shim_died: bool,
        engine_log: str,
        failures: list[WorkerFailure],
    ) -> AttemptEnd:
        attempt = self._attempt
        return classify_end(
            EndFacts(
                exit=engine_exit,
                shim_died=shim_died,
                rebooted=attempt.rebooted,
                pulses=attempt.pulses,
                fold=attempt.fold,
                failures=tuple(failures),
                last_line=likely_error_line(engine_log, attempt.run_dir, attempt.number, failures)
                or (attempt.nodes.reports.last_line() if attempt.nodes is not None else None),
                stop_requested=attempt.stops.escalation is not None,
                stop_signal=signal.Signals[attempt.spec.stop_signal],
                forced_reason=None if attempt.have_stopped() else attempt.stops.forced_reason,
                checkpoints=attempt.catalog.verified_checkpoints(),
                user_command=attempt.spec.command is not None,
                multi_node=attempt.spec.nodes is not None,
                global_step=attempt.furthest_step(),
                machines=self._machines(),
                lost_engines=self._lost_engines(engine_exit),
            )
        )

    def _lost_engines(self, own: EngineExit | None) -> dict[str, EngineExit]:
        """Return name of a machine -> how its engine was killed; empty in a run on one machine."""
        attempt = self._attempt
        if attempt.nodes is None or attempt.nodes_failure is not None:
            return {}
        lost = attempt.nodes.reports.lost_engines()
        if own is not None and own.signal is not None:
            lost = {0: own, **lost}
        return {attempt.nodes.name(number): end for number, end in lost.items()}

    def _machines(self) -> Mapping[int, str]:
        """Return rank -> name of its machine; empty in a run on one machine."""
        attempt = self._attempt
        if attempt.nodes is None:
            return NO_MACHINES
        return rank_machines(attempt.nodes.snapshots(attempt.local_ranks()))

    def _record(
        self,
        end: AttemptEnd,
        failures: list[WorkerFailure],
        engine_exit: EngineExit | None,
        judgement: Judgement,
    ) -> None:
        """Publish the final snapshot and write it, the verdicts and the last events."""
        attempt = self._attempt
        attempt.state = end.state
        ended_at = engine_exit.ended_at if engine_exit and engine_exit.ended_at else time.time()
        if engine_exit is None and end.state is RunState.LOST:
            ended_at = attempt.last_seen_at or ended_at
        gpu_verdicts = attempt.machine.end_verdicts(ended_at)
        waiting = attempt.restarts.scheduled
        if attempt.nodes is not None:
            attempt.nodes.end(leave=False)
        attempt.end()
        throughput = attempt.snapshot.throughput
        now = replace(
            attempt.build_snapshot(judgement, time.time()),
            throughput=throughput,
            limit=attempt.limits.overall() or attempt.snapshot.limit,
        )
        attempt.snapshot = final_snapshot(now, end, failures, ended_at=ended_at, waiting=waiting)
        self._server.publish(attempt.snapshot)
        attempt.update_diagnoses(judgement, attempt.last_poll())
        deadline = time.monotonic() + END_PATIENCE_S
        while not (written := self._write_end(end)) and time.monotonic() < deadline:
            time.sleep(1.0)
        self.recorded = written
        for verdict in gpu_verdicts:
            attempt.recorder.write(attempt.store.write_verdict, attempt.number, verdict)
        self._record_last_events(judgement, ended_at)
        if waiting is None:
            if attempt.nodes is not None:
                attempt.nodes.dismiss()
            attempt.run_dir.requests_path.unlink(missing_ok=True)
            self._release_shim()
        else:
            event = Event(time.time(), "restart", f"{waiting.describe()}.", to_json(waiting))
            attempt.recorder.record({}, Batch(events=[event]), None, time.time())

    def _record_last_events(self, judgement: Judgement, ended_at: float) -> None:
        """Record the events of the last verdicts, and of verdict hooks in progress."""
        attempt = self._attempt
        failed = attempt.state in (RunState.FAILED, RunState.CRASHED, RunState.LOST)
        events = self._notifier.update(
            judgement.verdicts,
            ended_at,
            time.monotonic(),
            ending=not failed,
            step=attempt.furthest_step(),
        )
        events += self._notifier.end(ended_at)
        events += self._notifier.wait_for_hooks(HOOK_WAIT_S)
        if events and not attempt.recorder.failing:
            attempt.recorder.record({}, Batch(events=events), None, time.time())

    def _write_end(self, end: AttemptEnd) -> bool:
        """Try once to write the end. Return True if it was written.

        The snapshot gets a note about what is missing from the history.
        """
        attempt, now_s = self._attempt, time.time()
        if attempt.recorder.failing:
            attempt.recorder.record({}, Batch(), None, now_s)
            if attempt.recorder.failing:
                return False
        recorder = attempt.recorder
        attempt.snapshot = replace(
            attempt.snapshot,
            history_note=recorder.note,
            combined_values=recorder.combined_values,
        )
        store, number = attempt.store, attempt.number
        try:
            store.write_snapshot(attempt.snapshot)
            store.set_state(number, now_s, end.state, end.detail, end.exit_code)
            store.end_attempt(number, attempt.snapshot.ended_at or now_s)
        except sqlite3.Error:
            return False
        return True

    def _release_shim(self) -> None:
        """Tell the shim that the end is recorded, so that it exits."""
        run_dir = self._attempt.run_dir
        final = run_dir.engine_final_path(self._attempt.number)
        try:
            try:
                final.touch()
            except OSError:  # a disk that has no room for a file has room for another name of one
                os.replace(run_dir.shim_log_path, final)
        except OSError as error:  # the disk cannot be written; the shim exits after its retries
            print(f"cannot tell the shim that the end is recorded: {error}", file=sys.stderr)
