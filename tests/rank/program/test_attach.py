"""The hook of torch that watches programs without a Trainer, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.shared.record_types import RecordKind, StepField
from tests.rank.runs import RunFolder
from tests.rank.scripts.stepping_program import EVALUATION_S

Execute = Callable[..., str]
STEPPING = Path(__file__).parents[1] / "scripts" / "stepping_program.py"


@pytest.mark.parametrize(
    "kind", ["no_grad", "eval_mode", "late", "first", "forward", "groups", "backward", "sharded"]
)
def test_an_evaluation_is_no_part_of_a_step(run: RunFolder, execute: Execute, kind: str) -> None:
    assert execute(STEPPING, kind) == "0 freed\n", "the watch keeps the model"
    assert run.column(StepField.GLOBAL_STEP) == list(range(2, 13))
    assert max(run.column(StepField.STEP_S)) < EVALUATION_S
    assert set(run.column(StepField.SAMPLES)) == {4}
    (hello,) = run.labels(RecordKind.HELLO)
    assert hello["program"] == ("PyTorch FSDP" if kind == "sharded" else "PyTorch")


def test_a_program_that_trains_in_evaluation_mode(run: RunFolder, execute: Execute) -> None:
    execute(STEPPING, "frozen")
    assert set(run.column(StepField.SAMPLES)) == {4}


def test_a_compiled_step_does_not_compile_the_watch(run: RunFolder, execute: Execute) -> None:
    bare = execute(STEPPING, "compiled", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert execute(STEPPING, "compiled") == bare
    assert run.column(StepField.GLOBAL_STEP) == list(range(2, 13))


OWN_HOOK = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
calls = []
register_optimizer_step_post_hook(lambda *_: calls.append(1))
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], lr=0.01)
for _ in range(4):
    optimizer.step()
assert len(calls) == 4
"""


def test_a_program_may_have_such_a_hook_of_its_own_and_train_again(
    run: RunFolder, execute: Execute
) -> None:
    execute(OWN_HOOK)
    assert run.column(StepField.GLOBAL_STEP) == [2, 3, 4]
    execute(OWN_HOOK)
    assert run.column(StepField.GLOBAL_STEP) == [6, 7, 8]
    (note,) = run.events("note")
    assert note["text"] == "A new training began in another process; its steps count on from 4."


RAISES_IN_A_CHILD = """
import multiprocessing, sys, torch
from torch.multiprocessing.spawn import start_processes

def train(rank):
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(3):
        optimizer.step()
    if sys.argv[1] == "ends":
        sys.exit(0)
    raise IndexError("Target 9 is out of bounds.")

if sys.argv[1] == "torch":
    start_processes(train, nprocs=1, start_method="fork")
child = multiprocessing.get_context("fork").Process(target=train, args=(0,))
child.start()
child.join()
"""


@pytest.mark.parametrize(("how", "raised"), [("torch", 1), ("own", 1), ("ends", 0)])
def test_an_error_in_a_child_of_multiprocessing_is_recorded(
    run: RunFolder, execute: Execute, how: str, raised: int
) -> None:
    execute(RAISES_IN_A_CHILD, how, check=False)
    events = run.events("exception")
    assert [(e["type"], e["message"]) for e in events] == [
        ("IndexError", "Target 9 is out of bounds.")
    ] * raised
    assert all("in train" in event["traceback"] for event in events)


PRINTS_WITHOUT_STEPS = """
import torch
for number in range(20_000 + 5):
    print("loss", number)
"""


def test_dropped_values_of_a_program_without_steps_are_counted(
    run: RunFolder, execute: Execute
) -> None:
    execute(PRINTS_WITHOUT_STEPS, LTUI_METRICS_PATTERN="pairs", LTUI_QUEUE_BYTES=str(16 << 20))
    assert [value for _, value in run.metrics()["loss"]] == list(range(5, 20_005))
    (note,) = run.events("note")
    assert (note["dropped"], note["epoch"]) == (5, None)
    assert note["text"].startswith("5 calls that log values were dropped")


def test_lines_that_are_too_long_to_be_read_are_an_event(run: RunFolder, execute: Execute) -> None:
    program = "import torch; print('x' * 1001); print('y' * 1001); print('loss 0.5')"
    execute(program, LTUI_METRICS_PATTERN="pairs")
    (note,) = run.events("note")
    assert note["text"] == "The metrics pattern skips printed lines of more than 1,000 characters."


@pytest.mark.parametrize("trains", [True, False])
def test_keras_with_torch_as_its_backend_is_named(
    run: RunFolder, execute: Execute, tmp_path: Path, trains: bool
) -> None:
    """A stand-in for Keras 3.15.1, which imports these modules by ``import keras``."""
    backend = tmp_path / "keras" / "src" / "backend" / "torch"
    backend.mkdir(parents=True)
    for folder in (backend, *backend.parents[:3]):
        (folder / "__init__.py").touch()
    (backend / "trainer.py").write_text("class TorchTrainer:\n    def fit(self): return 3\n")
    program = "import torch, keras.src.backend.torch.trainer as t; print('loss: 0.5')"
    program += "; assert t.TorchTrainer().fit() == 3" * trains
    execute(program, folders=(tmp_path,), LTUI_METRICS_PATTERN="pairs")
    (hello,) = run.labels(RecordKind.HELLO)
    assert (hello["program"], hello["saves"]) == ("Keras", False)
    assert run.metrics() == {"loss": [(1, 0.5)]}
    assert len([*run.queue_dir.glob("keras-*.imported")]) == trains
