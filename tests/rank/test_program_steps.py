"""The rows of a program without a Trainer: what belongs to a step, and what to a validation."""

from __future__ import annotations

import pytest

from ltui.training.shared.record_types import RecordKind, StepField
from tests.rank.runs import ROOT, RunFolder
from tests.rank.scripts.stepping_program import EVALUATION_S

PROGRAM = ROOT / "tests" / "rank" / "scripts" / "stepping_program.py"


def run_program(run: RunFolder, kind: str, *, watched: bool = True) -> str:
    """Return what the program printed."""
    return run.execute(str(PROGRAM), kind, TORCH_DEVICE_BACKEND_AUTOLOAD=str(int(watched)))


KINDS = "no_grad eval_mode late first forward groups backward sharded"


@pytest.mark.parametrize("kind", KINDS.split())
def test_an_evaluation_is_no_part_of_a_step(run: RunFolder, kind: str) -> None:
    run_program(run, kind)
    assert run.column(StepField.GLOBAL_STEP) == list(range(2, 13))
    assert max(run.column(StepField.STEP_S)) < EVALUATION_S
    assert set(run.column(StepField.SAMPLES)) == {4}
    (hello,) = run.labels(RecordKind.HELLO)
    assert hello["program"] == ("PyTorch FSDP" if kind == "sharded" else "PyTorch")


def test_a_program_that_trains_in_evaluation_mode(run: RunFolder) -> None:
    run_program(run, "frozen")
    assert set(run.column(StepField.SAMPLES)) == {4}


def test_a_compiled_step_does_not_compile_the_watch(run: RunFolder) -> None:
    bare, watched = (run_program(run, "compiled", watched=watched) for watched in (False, True))
    assert bare == watched
    assert run.column(StepField.GLOBAL_STEP) == list(range(2, 13))


def test_the_watch_does_not_keep_the_model(run: RunFolder) -> None:
    assert run_program(run, "late") == "0 freed\n"
