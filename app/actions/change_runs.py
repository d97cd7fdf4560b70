"""Send a request to a run and wait until it takes effect: stop, pause, continue, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from ltui.app.actions.check_arguments import check, texts
from ltui.app.live.run_requests import require_live, send_request, wait_until
from ltui.training.lifecycle.stop_escalation import NOT_SAVED, NOT_STOPPED
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import STOP_TIMEOUT_S
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

STEP_TIMEOUT_S = 120.0
"""Seconds to wait for an effect that comes at the end of a step; a step may be long."""
CHECKED_S = 10.0
"""Maximum seconds to wait until a new checkpoint is verified."""
ESCALATION_TIMEOUT_S = 60.0
"""Seconds that the interrupt and the kill may take after the timeout of the coordinated stop."""


class Effect(Struct, frozen=True, kw_only=True):
    """What a request to a run has led to."""

    done: bool
    """True if the run did what was requested."""
    run: RunSnapshot
    """The run afterwards; its ``detail`` says why a stop was refused."""
    step: int | None = None
    """The step of a pause or a checkpoint."""
    path: str | None = None
    """The path of a new checkpoint."""
    reason: str | None = None
    """Why no checkpoint was saved."""


class ScheduledStop(Struct, frozen=True, kw_only=True):
    """The stops of a run that are still to come."""

    id: str
    stops: tuple[str, ...]
    """Conditions in words; of a cancellation those that were cancelled."""
    caution: str | None = None
    """A sentence about metrics that were never logged."""


def stop(
    run: str, *, timeout_s: float = STOP_TIMEOUT_S, kill: bool = False, requeue: bool = False
) -> Effect:
    """Stop a run, with a checkpoint if it can save one, and return when it has ended.

    ``timeout_s`` are the seconds for the ranks to save and exit, before they are interrupted and
    killed. ``kill`` ends the run at once. ``requeue`` lets it continue in a later job of SLURM.
    Raises ``ProblemError`` if the run is not live.
    """
    check("timeout_s", timeout_s, float, int)
    run_dir = find_run(ltui_home(), run)
    before = require_live(run_dir)
    if requeue:
        return _requeue(run_dir, timeout_s)
    if kill:
        send_request(run_dir, {"cmd": "kill"})
        snapshot, done = wait_until(run_dir, has_ended, ESCALATION_TIMEOUT_S)
        return Effect(done=done, run=snapshot)
    send_request(run_dir, {"cmd": "stop", "timeout_s": timeout_s})

    def settled(snapshot: RunSnapshot) -> bool:
        refused = snapshot.detail != before.detail and was_refused(snapshot)
        return has_ended(snapshot) or refused

    snapshot, _ = wait_until(run_dir, settled, timeout_s + ESCALATION_TIMEOUT_S)
    return Effect(done=snapshot.state in (RunState.STOPPED, RunState.FINISHED), run=snapshot)


def _requeue(run_dir: RunDir, timeout_s: float) -> Effect:
    """Stop a run with a checkpoint and put its SLURM job back into the queue."""
    # Imported here: most runs have no job.
    from ltui.training.lifecycle.job_control import ask_to_continue_later

    ask_to_continue_later(run_dir)

    def settled(snapshot: RunSnapshot) -> bool:
        return snapshot.state is RunState.QUEUED or has_ended(snapshot)

    snapshot, _ = wait_until(run_dir, settled, timeout_s + ESCALATION_TIMEOUT_S)
    return Effect(done=snapshot.state is RunState.QUEUED, run=snapshot)


def has_ended(snapshot: RunSnapshot) -> bool:
    """Return whether a run has ended."""
    return snapshot.state not in LIVE


def was_refused(snapshot: RunSnapshot) -> bool:
    """Return whether the last stop of a run was refused, so that it goes on."""
    return (snapshot.detail or "").startswith(NOT_STOPPED)


def stop_when(
    run: str,
    *,
    at_step: int | None = None,
    at_epoch_end: bool = False,
    when: str | Sequence[str] = (),
    at: str | None = None,
) -> ScheduledStop:
    """Schedule a stop and return at once; the first condition that is met stops the run.

    ``when`` has conditions such as ``val/loss<0.2``, ``at`` is a time such as ``18:30`` or ``+2h``.
    Without a condition, every scheduled stop is cancelled.
    """
    check("at_step", at_step, int, type(None))
    check("at", at, str, type(None))
    conditions = [parse_metric_condition(text) for text in texts("when", when, may_be_empty=True)]
    if at_step is not None:
        conditions.append(StopCondition(kind="step", step=at_step))
    if at_epoch_end:
        conditions.append(StopCondition(kind="epoch"))
    if at is not None:
        conditions.append(parse_time_condition(at, time.time()))
    run_dir = find_run(ltui_home(), run)
    before = require_live(run_dir)
    if not conditions:
        send_request(run_dir, {"cmd": "stop_when", "cancel": True})
        return ScheduledStop(id=run_dir.id, stops=tuple(before.stops))
    documents = [condition.to_document() for condition in conditions]
    answer = send_request(run_dir, {"cmd": "stop_when", "conditions": documents})
    caution = unlogged_metrics(conditions, before)
    return ScheduledStop(id=run_dir.id, stops=tuple(answer["stops"]), caution=caution or None)


def pause(run: str) -> Effect:
    """Pause a run between two steps, and return when it has paused."""
    return _request_state(run, "pause", RunState.PAUSED)


def continue_run(run: str) -> Effect:
    """Continue a paused run."""
    return _request_state(run, "continue", RunState.RUNNING)


def _request_state(run: str, command: str, target: RunState) -> Effect:
    run_dir = find_run(ltui_home(), run)
    before = require_live(run_dir)
    send_request(run_dir, {"cmd": command})
    snapshot, done = wait_until(run_dir, lambda s: s.state is target, STEP_TIMEOUT_S)
    # The ranks may have made steps since they continued.
    step = (before if before.state is RunState.PAUSED else snapshot).global_step
    return Effect(done=done, run=snapshot, step=step)


def checkpoint(run: str) -> Effect:
    """Save a checkpoint and keep training. Return when it is saved and verified, or failed."""
    run_dir = find_run(ltui_home(), run)
    before = require_live(run_dir)
    if before.state is RunState.QUEUED:
        raise ProblemError.of(
            where=run_dir.id, what="it has not started, so there is nothing to save."
        )
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
    if outcome is None:
        reason = snapshot.detail if unsaved(snapshot) else None
        return Effect(done=False, run=snapshot, reason=reason)
    path = outcome.data.get("path")
    if outcome.kind != "checkpoint_saved" or not path:
        return Effect(done=outcome.kind == "checkpoint_saved", run=snapshot, reason=outcome.text)
    # What `ltui show` prints next has the checkpoint, with the result of its check.
    name = Path(str(path)).name
    snapshot, _ = wait_until(
        run_dir,
        lambda s: any(c.ok is not None and Path(c.path).name == name for c in s.checkpoints),
        CHECKED_S,
    )
    return Effect(done=True, run=snapshot, step=outcome.data.get("global_step"), path=str(path))


def _checkpoint_event(run_dir: RunDir, after: int) -> StoredEvent | None:
    """Return the first event about a checkpoint that is not periodic: the result of the request."""
    with RunStore(run_dir) as store:
        for event in store.events(after):
            was_requested = event.data.get("reason") != "periodic"
            if event.kind in ("checkpoint_saved", "checkpoint_failed") and was_requested:
                return event
    return None
