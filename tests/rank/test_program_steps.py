"""The rows of a program without a Trainer: what belongs to a step, and what to a validation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.tensor_queue.record_types import StepField
from tests.rank.runs import ROOT, RunFolder
from tests.rank.scripts.stepping_program import EVALUATION_S

PROGRAM = ROOT / "tests" / "rank" / "scripts" / "stepping_program.py"


def run_program(run: RunFolder, kind: str) -> None:
    package = install_rank_package(run.path)
    environment = {**os.environ, **run.environment(), "PYTHONPATH": str(package)}
    subprocess.run([sys.executable, str(PROGRAM), kind], env=environment, check=True)


@pytest.mark.parametrize("kind", ["no_grad", "eval_mode", "late", "groups", "backward"])
def test_an_evaluation_is_no_part_of_a_step(run: RunFolder, kind: str) -> None:
    run_program(run, kind)
    assert run.column(StepField.GLOBAL_STEP) == list(range(2, 13))
    assert max(run.column(StepField.STEP_S)) < EVALUATION_S
    assert set(run.column(StepField.SAMPLES)) == {4}


def test_a_program_that_trains_in_evaluation_mode(run: RunFolder) -> None:
    run_program(run, "frozen")
    samples = run.column(StepField.SAMPLES)
    # Its evaluation looks like the rest: the batches of both belong to the step that follows.
    assert samples == [4, 4, 4, 19, 4, 4, 4, 19, 4, 4, 4]
