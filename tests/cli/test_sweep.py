"""``ltui sweep``: bad input, and what is printed without a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ltui.training.config.run_spec import RunSpec
from ltui.training.sweep.record import State, Sweep, Told, Trial
from ltui.training.sweep.space import parse_dimension
from ltui.training.sweep.sweep_files import SweepDir, create_sweep
from tests.cli.conftest import Ltui

METRIC = ("--metric", "loss")
LR = ("--set", "lr=choice(0.1, 0.2)")
ENDLESS = ("--set", "lr=interval(0.1, 0.2)")
COMMAND = ("--", "python", "t.py")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*METRIC, *COMMAND), "no key has several values"),
        ((*LR, *COMMAND), "--metric: it is missing"),
        ((*LR, *METRIC), "the program is missing"),
        (("quickstart", *LR, *METRIC, *COMMAND), "it has two programs"),
        (("--set", "lr=choice(", *METRIC, *COMMAND), "it names no values"),
        (("--set", "lr=range(2, 1)", *METRIC, *COMMAND), "not greater than the first"),
        ((*ENDLESS, "--sampler", "grid", *METRIC, *COMMAND), "has no end of values"),
        ((*ENDLESS, *METRIC, *COMMAND), "--trials: it is missing"),
        ((*LR, "--prune", "asha", *METRIC, *COMMAND), "--rung: it is missing"),
        ((*LR, "--rung", "5", *METRIC, *COMMAND), "--rung: it is for --prune"),
        ((*LR, "--set", "a=1", *METRIC, *COMMAND), "it has one value"),
        ((*LR, "--seeds", "2", *METRIC, "--", "python", "{lr}"), "it has no {seed}"),
        ((*LR, *METRIC, "--", "no-such-program"), "no executable program"),
        ((*LR, *METRIC, "--name", "a/b", *COMMAND), "cannot name a sweep"),
        ((*LR, *METRIC, "--name", "known", *COMMAND), "there is a sweep known already"),
        ((*LR, *METRIC, "--at-once", "0", *COMMAND), "not a whole number of 1 or more"),
        ((*LR, *METRIC, "no-such-preset"), "no preset or file of that name"),
        (("quickstart", "--set", "trainer.max_epoch=choice(1, 2)", *METRIC), "max_epochs"),
        (("wrong.yaml",), "unknown field `trails`"),
        (("list", "extra"), "unrecognized arguments"),
        *(((verb, "knwon"), "Did you mean known?") for verb in ("show", "stop", "resume", "retry")),
        (("append", "known"), "nothing is to be appended"),
        (("append", "known", "--set", "b=choice(1)"), "the sweep has no such key"),
        (("append", "known", "--set", "lr=range(1, 2)"), "cannot be appended"),
        (("narrow", "known", "--set", "lr=choice(0.3)"), "cannot be narrowed"),
        (("resume", "known"), "it was not stopped"),
        (("retry", "known", "9"), "the sweep has no such trial"),
        (("retry", "known", "0"), "it is finished"),
        (("stop", "known"), "it has finished"),
        (("append", "known", "--set", "lr=choice(0.3)", "--trials", "0"), "whole number of 1"),
        (("zero.yaml",), "--reduction: it must be 2 or more"),
        ((*LR, "--at-once", "1001", *METRIC, *COMMAND), "it must be 1000 or less"),
        (("--set", "lr=range(1, 1e9)", *METRIC, *COMMAND), "more than 1,000,000 combinations"),
        (("quickstart", "--set", "model.init_args.lrr=choice(1, 2)", *METRIC), "lrr"),
        (("quickstart", "--set", "model.init_args.width=choice(a, b)", *METRIC), "width"),
    ],
)
def test_bad_input_is_named_in_one_sentence_and_leaves_nothing(
    command: Ltui, tmp_path: Path, private_home: Path, words: tuple[str, ...], sentence: str
) -> None:
    record = make_known(private_home).record_path
    (tmp_path / "t.py").touch()
    (tmp_path / "wrong.yaml").write_text("sweep: {preset: quickstart, trails: 3}")
    zero = "prune: asha, rung: 3, reduction: 0, command: [python, t.py]}"
    (tmp_path / "zero.yaml").write_text(f"sweep: {{set: {{x: [1, 2]}}, metric: loss, {zero}")
    before = record.read_bytes()
    done = command("sweep", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in (private_home / "sweeps").iterdir()] == ["known"]
    assert record.read_bytes() == before
    assert not (private_home / "run-queue").exists()


def make_known(home: Path) -> SweepDir:
    """Create a finished sweep of one trial."""
    trial = Trial(
        number=0, suggestion=0, parameters={"lr": 0.1}, cell="c", state=State.FINISHED, last=2
    )
    sweep = Sweep(
        name="known",
        created_at=time.time(),
        host=os.uname().nodename,
        space=(parse_dimension("lr=choice(0.1, 0.2)"),),
        metric="loss",
        trials=1,
        tried=(trial,),
        told=(Told(suggestion=0, parameters=trial.parameters, state=State.FINISHED, value=2),),
    )
    spec = RunSpec(id="known", name="known", created_at=0, cwd="/", python="python", command=("x",))
    made = create_sweep(home, sweep, spec, {})
    made.active_path.unlink()
    (home / "runs" / sweep.run_id(trial)).mkdir(parents=True)
    return made


def test_sweeps_are_listed_and_shown(command: Ltui, private_home: Path) -> None:
    assert "No sweeps yet" in command("sweep", "list").stdout
    made = make_known(private_home)
    assert (
        command("sweep", "list").stdout
        == "known: finished; 1 finished; best loss 2.000 by trial 0\n"
    )
    shown = command("sweep", "show", "last").stdout.splitlines()
    assert shown[1] == "1 combination by grid, 1 at once: lr=choice(0.1, 0.2)"
    assert shown[2].split() == ["NO", "LR", "STATE", "STEP", "LAST", "BEST", "RUN"]
    assert shown[3].split()[:6] == ["★", "0", "0.1", "finished", "n/a", "2.000"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.path.iterdir()}
    assert set(modes.values()) == {0o600}
    assert made.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        *({"name": 3}, {"tried": 5}, {"name": "../../known"}, {"at_once": 10**9}),
        *({"prune": "asha", "rung": 0}, {"prune": "asha", "rung": 3, "reduction": 1}),
        {"space": [{"key": "lr", "kind": "range", "low": 0, "high": 1, "step": 0}]},
        None,
    ],
)
def test_a_damaged_record_is_reported(
    command: Ltui, private_home: Path, change: dict[str, Any] | None
) -> None:
    path = make_known(private_home).record_path
    text = "{" if change is None else json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    for words in (("show", "known"), ("stop", "known")):
        done = command("sweep", *words)
        assert done.returncode == 2
        assert "the sweep cannot be read" in done.stderr
    listed = command("sweep", "list")
    assert "the sweep cannot be read" in listed.stderr
    assert listed.stdout == ""


def test_show_says_why_a_trial_failed_and_bears_missing_parameters(
    command: Ltui, private_home: Path
) -> None:
    path = make_known(private_home).record_path
    record = json.loads(path.read_text())
    record["tried"][0] |= {"state": "failed", "detail": "no such file", "parameters": {}}
    path.write_text(json.dumps(record))
    shown = command("sweep", "show", "known")
    assert shown.returncode == 0
    assert "trial 0 failed: no such file" in shown.stdout
