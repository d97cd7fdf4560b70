"""Notifications about the changes between two snapshots of a run, in the past tense. Pure.

What a stop does to a run: every text that promises a checkpoint asks here. A run saves a checkpoint
when it is stopped if Lightning trains it, or if its program has said how
(``ltui_rank.on_checkpoint``, Hugging Face's Trainer). Any other program is ended by a signal.
"""

from __future__ import annotations

from typing import Literal

from ltui.app.presentation.snapshot_text import checkpoint_text
from ltui.app.state_words import FAILED, bad_loss_sentence, ended_detail, ended_sentence, state_word
from ltui.training.state.good_checkpoints import badness, is_resumable, nan_since, newest_checkpoint
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name

_NOT_KNOWN_YET = "whether with a checkpoint is known once it trains"


def stop_effect(snapshot: RunSnapshot | None) -> str:
    """Return what a stop does, to follow ``Ctrl-C``: ``stops it with a checkpoint``.

    ``snapshot`` is None before the run is known.
    """
    if snapshot is None or snapshot.saves_checkpoints is None:
        return f"stops it ({_NOT_KNOWN_YET})"
    if snapshot.saves_checkpoints:
        return "stops it with a checkpoint"
    return f"ends it by {snapshot.stop_signal}, without a checkpoint"


def stop_progress(snapshot: RunSnapshot | None) -> str:
    """Return what happens while the run stops: ``stopping with a checkpoint``."""
    if snapshot is None or snapshot.saves_checkpoints is None:
        return "stopping"
    if snapshot.saves_checkpoints:
        return "stopping with a checkpoint"
    return f"ending it by {snapshot.stop_signal}, without a checkpoint"


Severity = Literal["information", "warning", "error"]
"""Textual's severities of a notification."""


def toasts_for(before: RunSnapshot | None, now: RunSnapshot) -> list[tuple[str, Severity]]:
    """Return (sentence, severity) for every change worth a toast, with Textual's severities."""
    if before is None:
        return []
    toasts: list[tuple[str, Severity]] = []
    if now.attempt != before.attempt:
        start = f" from step {now.global_step}" if now.global_step else ""
        toasts.append((f"attempt {now.attempt} started{start}", "information"))
    elif now.state is not before.state:
        toasts += _state_change(before, now)
    if now.attempt == before.attempt and now.state in LIVE:
        toasts += _new_checkpoints(before, now)
    return toasts


def _state_change(before: RunSnapshot, now: RunSnapshot) -> list[tuple[str, Severity]]:
    step = f"step {formats.step(now.global_step)}"
    if before.state is RunState.STOPPING and now.state in LIVE:
        return [(clean_line(now.detail or f"not stopped at {step}"), "error")]
    if now.state is RunState.PAUSED:
        return [(f"paused at {step}", "information")]
    if now.state is RunState.RUNNING and before.state in (RunState.PAUSED, RunState.PAUSING):
        # Since it continued, some steps may have passed.
        at = before.global_step if before.state is RunState.PAUSED else now.global_step
        return [(f"continued at step {formats.step(at)}", "information")]
    if now.state in LIVE:
        return []
    sentence = ended_detail(now) or f"{state_word(now)} at {step}"
    bad_loss = bad_loss_sentence(now)
    sentence = f"{sentence}; {bad_loss}" if bad_loss else sentence
    severity: Severity = "error" if now.state in FAILED else "information"
    return [(sentence, "warning" if bad_loss and severity == "information" else severity)]


def _new_checkpoints(before: RunSnapshot, now: RunSnapshot) -> list[tuple[str, Severity]]:
    old = {c.path for c in before.checkpoints}
    saved = [c for c in now.checkpoints if c.path not in old and c.reason == "request"]
    return [(f"checkpoint saved: {checkpoint_text(c)}", "information") for c in saved]


def started_line(run_id: str) -> str:
    """Return the first line of every command that starts a run."""
    return f"{run_id} started. To watch it: ltui attach {run_id}"


def still_live(snapshot: RunSnapshot) -> str:
    """Return the words for a live run whose screen closes: ``calm-fox keeps running``."""
    verb = "is still stopping" if snapshot.state is RunState.STOPPING else "keeps running"
    return f"{clean_name(snapshot.name)} {verb}"


def farewell(snapshot: RunSnapshot) -> str:
    """Return the message that is printed when the dashboard closes."""
    name = clean_name(snapshot.name)
    if snapshot.state in LIVE:
        return f"{still_live(snapshot)}. To watch it: ltui attach {clean_name(snapshot.id)}"
    return f"{name}: {ended_sentence(snapshot)}"


def resume_hint(snapshot: RunSnapshot, *, readonly: bool) -> str:
    """Return the key that the line about an ended run offers."""
    if refusal(snapshot, "resume", readonly=readonly) is None:
        return "r resume"
    return "R run again" if refusal(snapshot, "rerun", readonly=readonly) is None else ""


def refusal(snapshot: RunSnapshot | None, action: str, *, readonly: bool) -> str | None:
    """Return why ``action`` cannot be done now, as a sentence, or None if it can."""
    if action not in CONTROLS:
        return None
    if readonly:
        return "This dashboard only watches: nothing was requested"
    if snapshot is None:
        return "The state of the run is not known yet"
    live = snapshot.state in LIVE
    name = clean_name(snapshot.name)
    if action == "rerun":
        return None
    if action == "resume":
        if snapshot.state is RunState.STOPPING:
            return f"{name} is still stopping. Resume it when it has stopped."
        if live:
            return f"{name} is {state_word(snapshot)}: there is nothing to resume"
        return None if is_resumable(snapshot) else no_checkpoint(name, snapshot)
    if not live:
        return f"{name} has ended: there is nothing to {ACTION_VERBS[action]}"
    if snapshot.state in BEFORE_TRAINING and action in ("pause", "checkpoint", "profile"):
        return f"{name} is {state_word(snapshot)}: its ranks have not started to train yet"
    if action == "profile" and snapshot.state in (RunState.PAUSED, RunState.PAUSING):
        return f"{name} is {state_word(snapshot)}: continue it first"
    if action == "profile" and snapshot.nodes:
        return f"{name} runs on several machines: a profile of it is not possible yet"
    if action == "checkpoint" and not snapshot.saves_checkpoints:
        return f"{name} has not told ltui how to save a checkpoint (ltui_rank.on_checkpoint)"
    if snapshot.state is RunState.STOPPING and action != "kill":
        return stopping_sentence(snapshot)
    return None


def stopping_sentence(snapshot: RunSnapshot) -> str:
    """Return how long a run has been stopping: ``fox: stopping ..., 3 s of 60 s``."""
    detail = clean_line(snapshot.detail or "")
    return f"{clean_name(snapshot.name)}: {detail if 'stopping' in detail else 'stopping'}"


def no_checkpoint(name: str, snapshot: RunSnapshot | None = None) -> str:
    """Return why a run cannot be resumed that has no good checkpoint."""
    newest = None if snapshot is None else newest_checkpoint(snapshot.checkpoints)
    reason = ""
    if snapshot is not None and newest is not None:
        why = badness(newest, nan_since(snapshot.verdicts))
        reason = f": the newest, of step {newest.global_step}, {why}"
    return f"{name} has no good checkpoint{reason}. Press R to run it again from the beginning."


ACTION_VERBS = {
    "stop": "stop",
    "pause": "pause",
    "checkpoint": "save",
    "kill": "kill",
    "profile": "profile",
    "resume": "resume",
    "rerun": "run again",
}
"""Actions on a run, with their verbs for sentences."""
CONTROLS = frozenset(ACTION_VERBS)
BEFORE_TRAINING = frozenset({RunState.QUEUED, RunState.STARTING})
"""States in which no rank trains yet."""
