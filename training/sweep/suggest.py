"""Which parameters are tried next. Optuna is imported only here, and only if it is asked.

The study of Optuna is built from the sweep for each suggestion and is never stored: of the same
record and the same seed follow the same parameters, whatever was killed meanwhile. Trials outside
of the present space, which may have been narrowed, are left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import missing_library
from ltui.training.sweep.record import Sweep, Told
from ltui.training.sweep.space import (
    MOST_CELLS,
    Dimension,
    Parameters,
    cell_of,
    check_grid,
    contains,
    grid,
    grid_size,
    is_number,
    rounded,
    value_text,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study

MOST_DRAWS = 50
"""Number of suggestions in a row that were tried before, until a combination is chosen in order."""


def has_optuna() -> bool:
    """Return whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


def check_sampler(sampler: str) -> None:
    """Raise ``ProblemError`` if the sampler needs Optuna and it is not installed."""
    if sampler != "grid" and not has_optuna():
        raise ProblemError(missing_library("optuna", "sweep", f"--sampler {sampler}"))


def suggest(sweep: Sweep) -> Parameters | None:
    """Return parameters that were not tried yet; None if there are none left.

    Raise ``ProblemError`` if Optuna is missing.
    """
    tried = {trial.cell for trial in sweep.tried}
    size = grid_size(sweep.space)
    if sweep.sampler != "grid":
        check_sampler(sweep.sampler)
        within = {t.cell for t in sweep.tried if contains(sweep.space, t.parameters)}
        if size is None or len(within) < size:
            for draw in range(MOST_DRAWS):
                parameters = _ask(sweep, draw)
                if cell_of(parameters) not in tried:
                    return parameters
    if sweep.sampler == "grid":
        check_grid(sweep.space)
    elif size is None or size > MOST_CELLS:
        return None
    return next((one for one in grid(sweep.space) if cell_of(one) not in tried), None)


def derived_seed(seed: int, suggestion: int, draw: int = 0) -> int:
    """Return the seed of the sampler for one suggestion, so that no random state is to be kept."""
    text = f"{seed}:{suggestion}:{draw}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Return a sampler with every argument that releases of Optuna disagree about, or may.

    The arguments that 4.9 deprecates are left out: no release changed what they are without.
    """
    from optuna.samplers import RandomSampler, TPESampler

    if name == "random":
        return RandomSampler(seed=seed)
    return TPESampler(
        seed=seed,
        n_startup_trials=10,
        n_ei_candidates=24,
        multivariate=True,
        group=False,
        constant_liar=True,
    )


def distributions(space: Sequence[Dimension]) -> dict[str, BaseDistribution]:
    """Return the space as Optuna describes it. The values of a choice are texts there."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for one in space:
        if one.kind == "choice":
            found[one.key] = CategoricalDistribution([value_text(value) for value in one.values])
        elif one.kind == "interval":
            found[one.key] = FloatDistribution(one.low, one.high, log=one.log)
        elif all(type(number) is int for number in (one.low, one.high, one.step)):
            high = one.low + ((one.count or 1) - 1) * one.step
            found[one.key] = IntDistribution(int(one.low), int(high), step=int(one.step))
        else:
            high = rounded(one.low + ((one.count or 1) - 1) * one.step)
            found[one.key] = FloatDistribution(one.low, high, step=one.step)
    return found


def _ask(sweep: Sweep, draw: int) -> Parameters:
    seed = derived_seed(sweep.seed, sweep.suggested, draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some arguments are experimental in older releases.
        study = build_study(sweep, make_sampler(sweep.sampler, seed))
        asked = study.ask(distributions(sweep.space)).params
    values: dict[str, dict[str, Any]] = {
        one.key: {value_text(value): value for value in one.values} for one in sweep.space
    }
    return {
        key: values[key][value] if values[key] else rounded(value) for key, value in asked.items()
    }


def build_study(sweep: Sweep, sampler: BaseSampler | None = None) -> Study:
    """Return a study in memory with what was told, and with the trials that run."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="minimize" if sweep.mode == "min" else "maximize",
        sampler=sampler,
        pruner=optuna.pruners.NopPruner(),
    )
    space = distributions(sweep.space)
    texts = {one.key for one in sweep.space if one.kind == "choice"}
    states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    told = [(one, states.get(one.state, TrialState.FAIL)) for one in sweep.told]
    begun = {trial.suggestion: trial for trial in sweep.lives}.values()
    running = [
        Told(suggestion=trial.suggestion, parameters=trial.parameters, state=trial.state)
        for trial in begun
    ]
    for one, state in (*told, *((one, TrialState.RUNNING) for one in running)):
        if contains(sweep.space, one.parameters):
            params = {k: value_text(v) if k in texts else v for k, v in one.parameters.items()}
            study.add_trial(
                create_trial(
                    state=state,
                    value=one.value,
                    params=params,
                    distributions=space,
                    intermediate_values={k: v for k, v in one.scores.items() if is_number(v)},
                )
            )
    return study
