"""The parameters of trials: those of Optuna alone, none of them twice."""

from __future__ import annotations

import optuna
import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import RunState
from ltui.training.sweep.decide import Seen, decide
from ltui.training.sweep.record import Sweep
from ltui.training.sweep.space import Parameters, cell_of, parse_dimension
from ltui.training.sweep.suggest import (
    build_study,
    derived_seed,
    distributions,
    make_sampler,
    suggest,
)

SPACE = tuple(
    parse_dimension(text)
    for text in ("lr=interval(1e-4, 1e-1, log)", "width=range(8, 64, 8)", "opt=choice(sgd, adam)")
)


def loss(parameters: Parameters) -> float:
    """Return a value that depends on the parameters alone."""
    rate, width, other = parameters["lr"], parameters["width"], parameters["opt"] == "sgd"
    return float(abs(rate - 0.01) + width / 640 + other)


def finished(sweep: Sweep) -> Sweep:
    """Return the sweep after all runs in flight have finished."""
    ends = {
        sweep.run_id(trial): Seen(state=RunState.FINISHED, last=loss(trial.parameters))
        for trial in sweep.lives
    }
    return decide(sweep, ends, suggest)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_trials_one_at_a_time_are_those_of_optuna_alone(sampler: str, mode: str) -> None:
    """The other study lives through all trials. TPE begins to learn after ten."""
    sweep = Sweep(
        name="s", created_at=0, space=SPACE, metric="m", mode=mode, sampler=sampler, trials=12,
        seed=7,
    )  # fmt: skip
    sweep = decide(sweep, {}, suggest)
    while sweep.state() != "finished":
        sweep = finished(sweep)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize" if mode == "min" else "maximize")
    for number in range(12):
        study.sampler = make_sampler(sampler, derived_seed(7, number))
        trial = study.ask(distributions(SPACE))
        study.tell(trial, loss(trial.params))
    theirs = [trial.params for trial in study.trials]
    ours = [trial.parameters for trial in sweep.tried]
    assert [cell_of(one) for one in ours] == [cell_of(one) for one in theirs]
    rebuilt = build_study(sweep)
    assert [t.value for t in rebuilt.trials] == pytest.approx([t.value for t in study.trials])


def test_a_small_space_is_tried_completely_and_nothing_twice() -> None:
    sweep = Sweep(
        name="s", created_at=0, space=SPACE[1:], metric="m", sampler="random", trials=100, at_once=3
    )
    space = (SPACE[2], parse_dimension("lr=choice(0.1, 0.2)"), parse_dimension("width=range(8, 9)"))
    sweep = decide(replace(sweep, space=space), {}, suggest)
    while sweep.state() != "finished":
        sweep = finished(sweep)
    assert len(sweep.tried) == len({trial.cell for trial in sweep.tried}) == 8


def test_trials_outside_of_a_narrowed_space_are_not_learnt_from() -> None:
    sweep = Sweep(name="s", created_at=0, space=SPACE, metric="m", sampler="random", trials=4)
    sweep = decide(sweep, {}, suggest)
    while sweep.state() != "finished":
        sweep = finished(sweep)
    narrow = (parse_dimension("lr=interval(1e-2, 1e-1, log)"), *SPACE[1:])
    within = [trial for trial in sweep.tried if trial.parameters["lr"] >= 1e-2]
    assert len(build_study(replace(sweep, space=narrow)).trials) == len(within) < 4
