"""``ltui stop``, ``pause``, ``continue``, ``checkpoint``: send a request and wait until it takes
effect."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED
from ltui.app.live.run_requests import require_live, send_request, wait_until
from ltui.app.presentation.run_report import checkpoint_rows, state_line
from ltui.app.state_words import state_word
from ltui.training.lifecycle.stop_escalation import NOT_SAVED, NOT_STOPPED
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import is_resumable, newest_checkpoint
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.state.stop_conditions import (
    StopCondition,
    parse_metric_condition,
    parse_time_condition,
    unlogged_metrics,
)
from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.formats import duration
from ltui.widgets.sanitise import clean_line

STEP_TIMEOUT_S = 120.0
"""Seconds to wait for an effect that comes at the end of a step; a step may be long."""
CHECKED_S = 10.0
"""Maximum seconds to wait until a new checkpoint is verified."""
ESCALATION_TIMEOUT_S = 60.0
"""Seconds that the interrupt and the kill may take after the timeout of the coordinated stop."""


def stop(options: Namespace) -> int:
    """Run ``ltui stop RUN``."""
    later = _stop_conditions(options)
    if options.cancel and later:
        raise ProblemError.of(
            where="--cancel",
            what="it cancels every scheduled stop, so it cannot be combined with a condition.",
            remedy="Use --cancel alone, then schedule the stops that you still want.",
        )
    run_dir = find_run(ltui_home(), options.run)
    before = require_live(run_dir)
    if options.requeue:
        return _requeue(run_dir, options.timeout)
    if later or options.cancel:
        return _schedule_stop(run_dir, before, later)
    if options.kill:
        send_request(run_dir, {"cmd": "kill"})
        return _report_stop(*wait_until(run_dir, _has_ended, ESCALATION_TIMEOUT_S), killed=True)
    send_request(run_dir, {"cmd": "stop", "timeout_s": options.timeout})

    def settled(snapshot: RunSnapshot) -> bool:
        refused = snapshot.detail != before.detail and _was_refused(snapshot)
        return _has_ended(snapshot) or refused

    snapshot, _ = wait_until(run_dir, settled, options.timeout + ESCALATION_TIMEOUT_S)
    return _report_stop(snapshot, _has_ended(snapshot), killed=False)


def _requeue(run_dir: RunDir, timeout_s: float) -> int:
    """Stop a run with a checkpoint and put its SLURM job back into the queue."""
    # Imported here: most runs have no job.
    from ltui.training.lifecycle.job_control import ask_to_continue_later

    ask_to_continue_later(run_dir)

    def settled(snapshot: RunSnapshot) -> bool:
        return snapshot.state is RunState.QUEUED or _has_ended(snapshot)

    snapshot, _ = wait_until(run_dir, settled, timeout_s + ESCALATION_TIMEOUT_S)
    if snapshot.state is not RunState.QUEUED:
        _report_stop(snapshot, _has_ended(snapshot), killed=False)
        return EXIT_FAILED
    print(f"{snapshot.id} is {state_line(snapshot)}")
    return EXIT_DONE


def _stop_conditions(options: Namespace) -> list[StopCondition]:
    """Return the stop conditions of the options. Raises ``ProblemError`` if one cannot be
    parsed."""
    conditions = [parse_metric_condition(text) for text in options.when]
    if options.at_step is not None:
        conditions.append(StopCondition(kind="step", step=options.at_step))
    if options.at_epoch_end:
        conditions.append(StopCondition(kind="epoch"))
    if options.at is not None:
        conditions.append(parse_time_condition(options.at, time.time()))
    return conditions


def _schedule_stop(run_dir: RunDir, before: RunSnapshot, conditions: list[StopCondition]) -> int:
    if not conditions:
        send_request(run_dir, {"cmd": "stop_when", "cancel": True})
        cancelled = ", ".join(before.stops)
        message = (
            f"Scheduled stop cancelled ({cancelled})." if cancelled else "No stop was scheduled."
        )
        print(f"{run_dir.id}: {clean_line(message)}")
        return EXIT_DONE
    documents = [condition.to_document() for condition in conditions]
    answer = send_request(run_dir, {"cmd": "stop_when", "conditions": documents})
    print(f"{run_dir.id} stops {clean_line(' or '.join(answer['stops']))}.")
    if caution := unlogged_metrics(conditions, before):
        print(clean_line(f"  {caution}"))
    print(f"  To cancel: ltui stop {run_dir.id} --cancel")
    return EXIT_DONE


def _has_ended(snapshot: RunSnapshot) -> bool:
    return snapshot.state not in LIVE


def _was_refused(snapshot: RunSnapshot) -> bool:
    return (snapshot.detail or "").startswith(NOT_STOPPED)


def _report_stop(snapshot: RunSnapshot, ended: bool, *, killed: bool) -> int:
    if not ended:
        reason = f" {clean_line(snapshot.detail or '')}" if _was_refused(snapshot) else ""
        print(f"{snapshot.id} is still {state_word(snapshot)}.{reason}")
        print(f"  To kill it: ltui stop --kill {snapshot.id}")
        return EXIT_FAILED
    print(f"{snapshot.id}: {state_line(snapshot)}")
    if snapshot.state is not RunState.FINISHED:
        if newest_checkpoint(snapshot.checkpoints) is None:
            says_why = "checkpoint" in (snapshot.detail or "")
            reason = "It" if says_why else "No checkpoint was saved, so it"
            print(f"  {reason} cannot be resumed.")
        else:
            for label, text in checkpoint_rows(snapshot):
                line = f"{label}: {text}" if label else f"{text}."
                print(f"  {line[0].upper()}{line[1:]}")
        if is_resumable(snapshot):
            print(f"  To resume: ltui resume {snapshot.id}")
    as_asked = killed or snapshot.state in (RunState.STOPPED, RunState.FINISHED)
    return EXIT_DONE if as_asked else EXIT_FAILED


def pause(options: Namespace) -> int:
    """Run ``ltui pause RUN``."""
    return _request_state(options, "pause", RunState.PAUSED, "paused")


def continue_run(options: Namespace) -> int:
    """Run ``ltui continue RUN``."""
    return _request_state(options, "continue", RunState.RUNNING, "continued")


def _request_state(options: Namespace, command: str, target: RunState, past_tense: str) -> int:
    run_dir = find_run(ltui_home(), options.run)
    before = require_live(run_dir)
    send_request(run_dir, {"cmd": command})
    snapshot, done = wait_until(run_dir, lambda s: s.state is target, STEP_TIMEOUT_S)
    if not done:
        return _report_timeout(snapshot, command)
    # The ranks may have made steps since they continued.
    step = (before if before.state is RunState.PAUSED else snapshot).global_step
    print(f"{snapshot.id} {past_tense}{_at_step(step)}.")
    return EXIT_DONE


def _at_step(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _report_timeout(snapshot: RunSnapshot, command: str) -> int:
    if snapshot.state not in LIVE:
        print(f"{snapshot.id} ended before that: {state_line(snapshot)}")
    else:
        waited = duration(STEP_TIMEOUT_S)
        print(
            f"{snapshot.id} did not {command} within {waited}; it is {state_word(snapshot)}. "
            "The request is still pending."
        )
    return EXIT_FAILED


def checkpoint(options: Namespace) -> int:
    """Run ``ltui checkpoint RUN``."""
    run_dir = find_run(ltui_home(), options.run)
    before = require_live(run_dir)
    with RunStore(run_dir) as store:
        last_event = max((event.id for event in store.events()), default=0)
    send_request(run_dir, {"cmd": "checkpoint"})

    def unsaved(snapshot: RunSnapshot) -> bool:
        # On a full disk the event cannot be stored.
        detail = snapshot.detail or ""
        return detail != before.detail and detail.startswith(NOT_SAVED)

    snapshot, _ = wait_until(
        run_dir,
        lambda s: unsaved(s) or _checkpoint_event(run_dir, last_event) is not None,
        STEP_TIMEOUT_S,
    )
    outcome = _checkpoint_event(run_dir, last_event)
    if outcome is None and unsaved(snapshot):
        print(f"{snapshot.id}: {clean_line(snapshot.detail or '')}")
        return EXIT_FAILED
    if outcome is None:
        return _report_timeout(snapshot, "save a checkpoint")
    saved = outcome.kind == "checkpoint_saved"
    path = outcome.data.get("path")
    if saved and path:
        # What `ltui show` prints next has the checkpoint, with the result of its check.
        name = Path(str(path)).name
        wait_until(
            run_dir,
            lambda s: any(c.ok is not None and Path(c.path).name == name for c in s.checkpoints),
            CHECKED_S,
        )
        step = _at_step(outcome.data.get("global_step"))
        print(f"{snapshot.id} saved a checkpoint{step}: {clean_line(str(path))}")
    else:
        print(f"{snapshot.id}: {clean_line(outcome.text)}")
    return EXIT_DONE if saved else EXIT_FAILED


def _checkpoint_event(run_dir: RunDir, after: int) -> StoredEvent | None:
    """Return the first event about a checkpoint that is not periodic: the result of the request."""
    with RunStore(run_dir) as store:
        for event in store.events(after):
            was_requested = event.data.get("reason") != "periodic"
            if event.kind in ("checkpoint_saved", "checkpoint_failed") and was_requested:
                return event
    return None
