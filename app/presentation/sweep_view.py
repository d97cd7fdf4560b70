"""The trials of a sweep as text: what the command prints and the screen shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ltui.training.sweep.pruning import comparable
from ltui.training.sweep.record import State, Sweep, Trial
from ltui.training.sweep.space import grid_size, is_number, override, value_text
from ltui.widgets.formats import NA, metric, percent, step
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone

_SIGNS = {"finished": Tone.GOOD, "pruned": Tone.DIM, "running": Tone.ACCENT}
"""The tone of a trial's state; that of one that needs somebody is bad."""
_MOST_REASONS = 10
_QUIET = frozenset({"planned", "queued", "stopping", "stopped"})


def trial_columns(sweep: Sweep) -> dict[str, str]:
    """Return the titles of the columns by their keys. A parameter has the last part of its key, if
    no other one ends in the same."""
    keys = [dimension.key for dimension in sweep.space]
    ends = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    titles = {"number": "no", **{key: clean_name(title, 20) for key, title in short.items()}}
    titles |= {} if sweep.seeds is None else {"seed": "seed"}
    return titles | {"state": "state", "step": "step", "last": "last", "best": "best", "run": "run"}


def trial_texts(sweep: Sweep, trial: Trial, *, is_best: bool = False) -> dict[str, str]:
    """Return the texts of a trial by the keys of the columns. A star marks the best one."""
    return {
        "number": f"{'★' if is_best else ' '}{trial.number:>3}",
        **{key: _short(value) for key, value in trial.parameters.items()},
        "seed": NA if trial.seed is None else str(trial.seed),
        "state": trial.state,
        "step": step(trial.step),
        "last": metric(trial.last),
        "best": metric(trial.best),
        "run": sweep.run_id(trial),
    }


def _short(value: Any) -> str:
    text = f"{value:.6g}" if type(value) is float else value_text(value)
    return clean_line(text, 20)


def state_tone(trial: Trial) -> Tone:
    """Return the tone of a trial's state."""
    return _SIGNS.get(trial.state, Tone.PLAIN if trial.state in _QUIET else Tone.BAD)


def best_trials(sweep: Sweep) -> tuple[tuple[Trial, ...], float]:
    """Return the trials of the best combination, and its value of the metric: with several seeds
    their mean. None are the best while no combination has finished with all of its seeds."""
    told = [one for one in sweep.told if one.state == State.FINISHED and is_number(one.value)]
    best = min(told, key=lambda one: comparable(one.value or 0.0, sweep.mode), default=None)
    if best is None:
        return (), 0.0
    return tuple(t for t in sweep.tried if t.suggestion == best.suggestion), best.value or 0.0


def trial_line(trial: Trial) -> str:
    """Return what the table has no room for: the parameters, the scores at the rungs, its end."""
    parameters = ", ".join(override(key, value) for key, value in trial.parameters.items())
    scores = ", ".join(f"{metric(score)} at {rung}" for rung, score in trial.scores.items())
    parts = [parameters, f"rungs: {scores}" if scores else "", trial.detail]
    return clean_line(f"trial {trial.number}: {'; '.join(part for part in parts if part)}", 500)


def summary(sweep: Sweep) -> str:
    """Return one line about a sweep: its state, its trials by state, the best one."""
    counts = Counter(trial.state for trial in sweep.tried)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    best, value = best_trials(sweep)
    parts = [sweep.state(), states or "no trials yet"]
    if best:
        numbers = ", ".join(str(trial.number) for trial in best)
        by = f"trials {numbers}, mean of the seeds" if len(best) > 1 else f"trial {numbers}"
        parts.append(f"best {clean_name(sweep.metric)} {metric(value)} by {by}")
    elif silent := sum(t.state == State.FINISHED and t.last is None for t in sweep.tried):
        parts.append(f"{silent} never logged {clean_name(sweep.metric)}")
    if sweep.problem:
        parts.append(clean_line(sweep.problem, 300))
    return "; ".join(parts)


def plan_text(sweep: Sweep) -> str:
    """Return one line about what a sweep tries, and how."""
    count = grid_size(sweep.space) if sweep.trials is None else sweep.trials
    seeds = "" if sweep.seeds is None else f" with {sweep.seeds} seeds each"
    prune = "" if sweep.prune is None else f", pruned by {sweep.prune} from step {sweep.rung} on"
    space = "; ".join(f"{one.key}={one}" for one in sweep.space)
    amount = "any number of" if count is None else f"{count:,}"
    noun = "combination" if count == 1 else "combinations"
    how = f"{amount} {noun}{seeds} by {sweep.sampler}, {sweep.at_once} at once{prune}"
    return clean_line(f"{how}: {space}", 500)


def trial_reasons(sweep: Sweep) -> list[str]:
    """Return a line for each trial that needs somebody, the last ones."""
    bad = [t for t in sweep.tried if t.detail and state_tone(t) is Tone.BAD]
    return [
        f"trial {t.number} {t.state}: {clean_line(t.detail, 200)}" for t in bad[-_MOST_REASONS:]
    ]


def importance_text(sweep: Sweep, shares: Mapping[str, float], reason: str) -> str:
    """Return how important each parameter is for the metric."""
    names = trial_columns(sweep)
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{names.get(key, clean_name(key))} {percent(one)}" for key, one in ranked)
    return f"importance: {listed or f'{NA} ({clean_line(reason, 200)})'}"
