"""What a person asks for, by options and by a file, as a sweep and as runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ltui.app.actions.start_sweep import SweepOptions, sweep_of, with_file
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import RunState
from ltui.training.sweep.decide import Seen, decide
from ltui.training.sweep.record import Sweep, trial_spec
from ltui.training.sweep.space import parse_dimension
from ltui.training.sweep.suggest import suggest

FILE = """
sweep:
  command: [python, train.py, --lr, "{lr}"]
  set:
    lr: interval(1e-4, 1e-1, log)
    size: [8, "8,9"]
  metric: val/loss
  trials: 20
  at_once: 2
"""


def asked(tmp_path: Path, **options: Any) -> Sweep:
    path = tmp_path / "s.yaml"
    path.write_text(FILE)
    return sweep_of(with_file(SweepOptions(preset=str(path), **options)), "s", 0.0)


def test_options_override_the_keys_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ltui.app.actions.start_sweep._command_problems", lambda *_: [])
    sweep = asked(tmp_path)
    assert (sweep.trials, sweep.at_once, sweep.sampler, sweep.mode) == (20, 2, "tpe", "min")
    assert [str(one) for one in sweep.space] == [
        *("interval(0.0001, 0.1, log)", 'choice(8, "8,9")'),
    ]
    sweep = asked(tmp_path, at_once=3, sampler="random", set=("lr=choice(1, 2)",))
    assert (sweep.trials, sweep.at_once, sweep.sampler) == (20, 3, "random")
    assert str(sweep.space[0]) == "choice(1, 2)"


def test_a_command_in_a_file_names_every_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no \{size\}"):
        asked(tmp_path)


def test_seeds_share_their_parameters_and_the_sampler_learns_their_mean() -> None:
    space = (parse_dimension("lr=choice(1, 2)"),)
    sweep = Sweep(name="s", created_at=0, space=space, metric="m", seeds=3, at_once=3)
    sweep = decide(sweep, {}, suggest)
    ends = {
        sweep.run_id(trial): Seen(state=RunState.FINISHED, last=float(trial.seed or 0))
        for trial in sweep.tried
    }
    first, second = dict(list(ends.items())[:2]), dict(list(ends.items())[2:])
    sweep = decide(sweep, first, suggest)
    assert sweep.told == ()
    sweep = decide(sweep, second, suggest)
    assert [told.value for told in sweep.told] == [2.0]

    template = RunSpec(
        id="t", name="t", created_at=0, cwd="/", python="p", command=("x",), env={"A": "b"}
    )
    commands = [trial_spec(sweep, template, trial, 1.0).command for trial in sweep.tried[:4]]
    assert commands == [
        *(("x", "--lr", "1", "--seed", str(seed)) for seed in (1, 2, 3)),
        ("x", "--lr", "2", "--seed", "1"),
    ]
