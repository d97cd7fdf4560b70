"""What a sweep does next. Pure: a record and what is seen of its runs become the next record.

The record says what is to be done: a planned trial is started, or resumed if its run exists; a
stopping one is stopped. So after a kill at any moment the next call does what is still missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.sweep.pruning import comparable, goes_on
from ltui.training.sweep.record import IN_FLIGHT, SETTLED, State, Sweep, Told, Trial
from ltui.training.sweep.space import Parameters, cell_of, is_number

MOST_INTERRUPTIONS = 3
"""How often a trial goes on by itself after its run was killed."""
_KILLED = (RunState.LOST, RunState.CRASHED)
"""States of a run that was killed from outside, for example by a reboot."""


class Seen(Struct, frozen=True, kw_only=True):
    """What is seen of the run of a trial."""

    state: RunState
    attempt: int = 1
    step: int | None = None
    last: float | None = None
    best: float | None = None
    reason: str = ""
    """``out of memory`` or ``nan`` if a verdict says so."""
    detail: str = ""
    resumable: bool = False
    scores: Mapping[int, float] = field(default_factory=dict)


Suggest = Callable[[Sweep], Parameters | None]


def decide(sweep: Sweep, seen: Mapping[str, Seen | None], suggest: Suggest) -> Sweep:
    """Return the next record. ``seen`` has the runs of trials by their id: None for a run that is
    gone, and nothing for one that could not be read."""
    tried = list(sweep.tried)
    for place, trial in enumerate(tried):
        if trial.state in IN_FLIGHT and (run := sweep.run_id(trial)) in seen:
            tried[place] = observed(trial, seen[run])
    ended = {
        now.suggestion
        for before, now in zip(sweep.tried, tried, strict=True)
        if now.state in SETTLED and before.state != now.state
    }
    told = tuple(
        entry for number in sorted(ended) if (entry := _told(sweep, tried, number)) is not None
    )
    sweep = replace(sweep, tried=tuple(tried), told=sweep.told + told)
    if sweep.stopped:
        return replace(sweep, tried=tuple(_stopped(trial) for trial in tried))
    return _filled(_judged(sweep), suggest)


def observed(trial: Trial, seen: Seen | None) -> Trial:
    """Return a trial as its run is now."""
    if seen is None:
        # Of a planned trial the run is still to be created.
        return trial if trial.state == State.PLANNED else replace(trial, state=State.MISSING)
    if seen.attempt <= trial.after and seen.state not in LIVE:
        if trial.state != State.PLANNED:
            return replace(
                trial, state=State.STOPPED, detail=seen.detail
            )  # Taken out of the run queue.
        return trial if seen.resumable else _anew(trial)
    trial = replace(
        trial,
        attempt=seen.attempt,
        step=seen.step,
        last=seen.last,
        best=seen.best,
        detail=seen.detail,
        # A score that was stored stays, also if the history is merged or the run is damaged.
        scores=dict(sorted({**seen.scores, **trial.scores}.items())),
    )
    if seen.state in LIVE:
        live = State.QUEUED if seen.state is RunState.QUEUED else State.RUNNING
        return trial if trial.state == State.STOPPING else replace(trial, state=live)
    if seen.state in _KILLED and trial.interrupted < MOST_INTERRUPTIONS and not seen.reason:
        count = trial.interrupted + 1
        again = replace(trial, state=State.PLANNED, after=seen.attempt, interrupted=count)
        return again if seen.resumable else _anew(again)
    return replace(trial, state=_end(trial, seen))


def _anew(trial: Trial) -> Trial:
    """Return a trial with another run, as nothing is left of the last one that could go on."""
    return replace(trial, generation=trial.generation + 1, after=0, attempt=0, scores={}, passed=0)


def _end(trial: Trial, seen: Seen) -> str:
    if seen.state is RunState.STOPPED:
        return State.PRUNED if trial.pruned else State.STOPPED
    if seen.reason:
        return seen.reason
    if seen.state is RunState.FINISHED:
        return State.FINISHED if seen.last is None or is_number(seen.last) else State.NAN
    return State.FAILED


def _told(sweep: Sweep, tried: list[Trial], suggestion: int) -> Told | None:
    """Return what is told of a suggestion once the runs of all its seeds have ended."""
    trials = [trial for trial in tried if trial.suggestion == suggestion]
    if len(trials) < (sweep.seeds or 1) or any(trial.state not in SETTLED for trial in trials):
        return None
    finished = [t for t in trials if t.state == State.FINISHED and t.last is not None]
    pruned = [t for t in trials if t.state == State.PRUNED]
    chosen, state = (finished, State.FINISHED) if finished else (pruned, State.PRUNED)
    if not chosen:
        chosen, state = trials, State.FAILED
    values = [trial.last for trial in chosen if trial.last is not None]
    rungs = set.intersection(*(set(trial.scores) for trial in chosen))
    return Told(
        suggestion=suggestion,
        parameters=trials[0].parameters,
        state=state,
        value=sum(values) / len(values) if values and state == State.FINISHED else None,
        scores={r: sum(t.scores[r] for t in chosen) / len(chosen) for r in sorted(rungs)},
    )


def _stopped(trial: Trial) -> Trial:
    """Return a trial of a sweep that a person has stopped."""
    states = {
        State.PLANNED: State.STOPPED,
        State.QUEUED: State.STOPPING,
        State.RUNNING: State.STOPPING,
    }
    return replace(trial, state=states.get(trial.state, trial.state))


def _goes_on(sweep: Sweep, trial: Trial) -> bool:
    def scores(one: Trial) -> dict[int, float]:
        return {steps: comparable(score, sweep.mode) for steps, score in one.scores.items()}

    others = [scores(one) for one in sweep.tried if one.number != trial.number]
    rule = sweep.prune or ""
    return goes_on(rule, sweep.reduction, trial.passed, scores(trial), others)


def _judged(sweep: Sweep) -> Sweep:
    """Return the sweep with the trials stopped that are not good enough at a rung."""
    if sweep.prune is None:
        return sweep
    tried = []
    for trial in sweep.tried:
        reached = max(trial.scores, default=0)
        if trial.state == State.RUNNING and reached > trial.passed:
            if _goes_on(sweep, trial):
                trial = replace(trial, passed=reached)
            else:
                trial = replace(trial, state=State.STOPPING, pruned=True)
        tried.append(trial)
    return replace(sweep, tried=tuple(tried))


def _filled(sweep: Sweep, suggest: Suggest) -> Sweep:
    """Return the sweep with its free places taken: by stopped trials that are good enough now, the
    best first, then by new ones."""
    while len(sweep.lives) < sweep.at_once:
        promoted = _promoted(sweep)
        if promoted is not None:
            tried = [promoted if t.number == promoted.number else t for t in sweep.tried]
            sweep = replace(sweep, tried=tuple(tried))
            continue
        trial = _next_trial(sweep, suggest)
        if trial is None:
            # With the seeds of all suggestions, none is left.
            return replace(sweep, exhausted=sweep.exhausted or sweep.wants_more)
        sweep = replace(sweep, tried=(*sweep.tried, trial))
    return sweep


def _promoted(sweep: Sweep) -> Trial | None:
    pruned = [t for t in sweep.tried if t.state == State.PRUNED and _goes_on(sweep, t)]
    if sweep.prune is None or not pruned:
        return None
    # The trial that got furthest, and of several the best.
    best = min(
        pruned, key=lambda t: (-max(t.scores), comparable(t.scores[max(t.scores)], sweep.mode))
    )
    return retried(best)


def _next_trial(sweep: Sweep, suggest: Suggest) -> Trial | None:
    last = sweep.suggested - 1
    seeds: list[Any] = list(range(1, sweep.seeds + 1)) if sweep.seeds else [None]
    begun = [trial for trial in sweep.tried if trial.suggestion == last]
    if begun and len(begun) < len(seeds):
        suggestion, parameters = last, begun[0].parameters
    else:
        if not sweep.wants_more:
            return None
        found = suggest(sweep)
        if found is None:
            return None
        suggestion, parameters, begun = last + 1, found, []
    return Trial(
        number=len(sweep.tried),
        suggestion=suggestion,
        parameters=parameters,
        cell=cell_of(parameters),
        seed=seeds[len(begun)],
    )


RETRIED = {
    "failed": (State.FAILED,),
    "missing": (State.MISSING,),
    "stopped": (State.STOPPED,),
    "all": (
        State.FAILED,
        State.MISSING,
        State.STOPPED,
        State.OUT_OF_MEMORY,
        State.NAN,
    ),
}
"""The states of trials that an option of ``ltui sweep retry`` names."""


def retried(trial: Trial) -> Trial:
    """Return a trial that has ended and is to go on from its last good checkpoint, or to begin
    anew if it has none."""
    again = replace(
        trial,
        state=State.PLANNED,
        after=trial.attempt,
        passed=max(trial.scores, default=0),
        pruned=False,
        interrupted=0,
    )
    return _anew(again) if trial.state == State.MISSING else again


def retry(sweep: Sweep, chosen: Callable[[Trial], bool]) -> Sweep:
    """Return the sweep, which goes on with the trials that are chosen of those that have ended."""
    tried = tuple(retried(trial) if chosen(trial) else trial for trial in sweep.tried)
    return replace(sweep, tried=tried, stopped=False)


def resumed(sweep: Sweep) -> Sweep:
    """Return a stopped sweep, which goes on with its stopped trials. Raise ``ProblemError``."""
    if not sweep.stopped:
        raise ProblemError.of(
            where=sweep.name,
            what="it was not stopped.",
            remedy=f"To run ended trials again: ltui sweep retry {sweep.name}",
        )
    return retry(sweep, lambda trial: trial.state == State.STOPPED)


def named_trial(sweep: Sweep, text: str) -> Trial:
    """Return the trial of this number, cell or run, which can run again. Raise ``ProblemError``."""

    def names(trial: Trial) -> set[str]:
        return {str(trial.number), trial.cell, sweep.run_id(trial), sweep.run_name(trial)}

    trial = next((trial for trial in sweep.tried if text in names(trial)), None)
    if trial is None or trial.state in IN_FLIGHT or trial.state == State.FINISHED:
        what = "the sweep has no such trial." if trial is None else f"it is {trial.state}."
        remedy = f"`ltui sweep show {sweep.name}` lists them."
        raise ProblemError.of(where=f"trial {text}", what=what, remedy=remedy)
    return trial
