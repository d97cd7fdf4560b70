"""``ltui stop``, ``pause``, ``continue``, ``checkpoint``: what they print, and their exit codes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ltui.app.actions import change_runs
from ltui.app.actions.change_runs import (
    STEP_TIMEOUT_S,
    Effect,
    ScheduledStop,
    has_ended,
    was_refused,
)
from ltui.app.actions.wait_for_runs import next_commands
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, OneOf, print_envelope
from ltui.app.presentation.run_report import checkpoint_rows, state_line
from ltui.app.state_words import state_word
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import is_resumable, newest_checkpoint
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.widgets.formats import duration
from ltui.widgets.sanitise import clean_line

_EFFECT = (Effect, {"id": str, "state": RunState, "detail": str | None, "step": int | None},
           ("done", "path", "reason"))  # fmt: skip
DATA: dict[str, Any] = dict.fromkeys(("pause", "continue_run", "checkpoint"), _EFFECT)
DATA["stop"] = OneOf((_EFFECT, ScheduledStop))


def stop(options: Namespace) -> int:
    """Run ``ltui stop RUN``."""
    names = ("at_step", "at_epoch_end", "when", "at")
    conditions = {name: value for name in names if (value := getattr(options, name))}
    if options.at_step is not None:
        conditions["at_step"] = options.at_step
    if options.cancel and conditions:
        raise ProblemError.of(
            where="--cancel",
            what="it cancels every scheduled stop, so it cannot be combined with a condition.",
            remedy="Use --cancel alone, then schedule the stops that you still want.",
        )
    if (conditions or options.cancel) and not options.requeue:
        return _schedule_stop(options, conditions)
    effect = change_runs.stop(
        options.run, timeout_s=options.timeout, kill=options.kill, requeue=options.requeue
    )
    if options.requeue and effect.done:
        return _answer(options, effect, [f"{effect.run.id} is {state_line(effect.run)}"])
    return _answer(options, effect, stop_lines(effect.run, ended=has_ended(effect.run)))


def _answer(options: Namespace, effect: Effect, lines: Sequence[str]) -> int:
    """Print what a request has led to, and return the exit code."""
    if options.json:
        print_envelope(effect_document(effect), next_commands(effect.run))
    else:
        print("\n".join(lines))
    return EXIT_DONE if effect.done else EXIT_FAILED


def effect_document(effect: Effect) -> dict[str, Any]:
    """Return what ``--json`` prints of an effect."""
    run, step = effect.run, effect.step
    step = run.global_step if step is None else step
    head = {"id": run.id, "state": run.state, "detail": run.detail, "step": step}
    return {**head, "done": effect.done, "path": effect.path, "reason": effect.reason}


def _schedule_stop(options: Namespace, conditions: dict[str, Any]) -> int:
    scheduled = change_runs.stop_when(options.run, **conditions)
    stops = clean_line((", " if options.cancel else " or ").join(scheduled.stops))
    if options.json:
        print_envelope(scheduled, [f"ltui wait {scheduled.id}"])
    elif options.cancel:
        message = f"Scheduled stop cancelled ({stops})." if stops else "No stop was scheduled."
        print(f"{scheduled.id}: {message}")
    else:
        print(f"{scheduled.id} stops {stops}.")
        if scheduled.caution:
            print(clean_line(f"  {scheduled.caution}"))
        print(f"  To cancel: ltui stop {scheduled.id} --cancel")
    return EXIT_DONE


def stop_lines(snapshot: RunSnapshot, *, ended: bool) -> list[str]:
    """Return what a stop says of a run."""
    if not ended:
        reason = f" {clean_line(snapshot.detail or '')}" if was_refused(snapshot) else ""
        return [
            f"{snapshot.id} is still {state_word(snapshot)}.{reason}",
            f"  To kill it: ltui stop --kill {snapshot.id}",
        ]
    lines = [f"{snapshot.id}: {state_line(snapshot)}"]
    if snapshot.state is not RunState.FINISHED:
        if newest_checkpoint(snapshot.checkpoints) is None:
            says_why = "checkpoint" in (snapshot.detail or "")
            reason = "It" if says_why else "No checkpoint was saved, so it"
            lines.append(f"  {reason} cannot be resumed.")
        else:
            for label, text in checkpoint_rows(snapshot):
                line = f"{label}: {text}" if label else f"{text}."
                lines.append(f"  {line[0].upper()}{line[1:]}")
        if is_resumable(snapshot):
            lines.append(f"  To resume: ltui resume {snapshot.id}")
    return lines


def pause(options: Namespace) -> int:
    """Run ``ltui pause RUN``."""
    effect = change_runs.pause(options.run)
    return _answer(options, effect, _request_lines(effect, "pause", "paused"))


def continue_run(options: Namespace) -> int:
    """Run ``ltui continue RUN``."""
    effect = change_runs.continue_run(options.run)
    return _answer(options, effect, _request_lines(effect, "continue", "continued"))


def checkpoint(options: Namespace) -> int:
    """Run ``ltui checkpoint RUN``."""
    effect = change_runs.checkpoint(options.run)
    if effect.reason is not None:
        lines = [f"{effect.run.id}: {clean_line(effect.reason)}"]
    else:
        lines = _request_lines(effect, "save a checkpoint", "saved a checkpoint")
    return _answer(options, effect, lines)


def _request_lines(effect: Effect, verb: str, past_tense: str) -> list[str]:
    run = effect.run
    if effect.done:
        at_step = "" if effect.step is None else f" at step {effect.step}"
        path = "." if effect.path is None else f": {clean_line(effect.path)}"
        return [f"{run.id} {past_tense}{at_step}{path}"]
    if run.state not in LIVE:
        return [f"{run.id} ended before that: {state_line(run)}"]
    waited = duration(STEP_TIMEOUT_S)
    return [
        f"{run.id} did not {verb} within {waited}; it is {state_word(run)}. "
        "The request is still pending."
    ]
