"""Stop, pause, checkpoint and resume of one rank; several ranks are in ``test_two_ranks.py``."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ltui.training.rank.coordination.stop_signals import REPEAT_S, RunStopped
from ltui.training.rank.node_folders import resume_source
from ltui.training.shared import checkpoint_files
from ltui.training.shared.record_types import Outcome, Phase
from ltui.training.tensor_queue.control_block import Command
from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.rank.models import Linear, loader, requests_at
from tests.rank.runs import RunFolder
from tests.required import required
from tests.waiting import wait_for


def counters(path: Path) -> tuple[int, int]:
    state = torch.load(path, weights_only=True)
    return state["global_step"], state["epoch"]


def test_stop_saves_a_checkpoint_and_ends_the_fit(run: RunFolder, fit: Any) -> None:
    model = Linear(requests_at(run, Command.STOP, 6))
    with pytest.raises(RunStopped) as stopped:
        fit(model, loader(5), loader(2), max_epochs=3)
    assert stopped.value.code == 0
    (path,) = run.checkpoints
    assert path.name == "step-00000007-stop.ckpt"
    assert counters(path) == (7, 1)
    manifest = json.loads(Path(f"{path}.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["size_bytes"] == path.stat().st_size
    assert (manifest["version"], manifest["file"]) == (1, path.name)
    assert (manifest["global_step"], manifest["epoch"], manifest["reason"]) == (7, 1, "stop")
    assert (manifest["attempt"], manifest["torch"]) == (1, torch.__version__)
    own = path.with_name(f"{path.name}.rank-00000")
    assert sorted(path.parent.iterdir()) == [path, Path(f"{path}.json"), own]
    assert manifest["beside"] == {
        own.name: {
            "sha256": hashlib.sha256(own.read_bytes()).hexdigest(),
            "size_bytes": own.stat().st_size,
        }
    }
    (saved,) = run.events("checkpoint_saved")
    assert (saved["path"], saved["reason"]) == (str(path), "stop")
    (event,) = run.events("stopped")
    assert (event["global_step"], event["checkpoint"]) == (7, str(path))
    assert run.events("exception") == []
    pulse = required(run.pulse())
    assert (pulse.outcome, pulse.decision_done) == (Outcome.STOPPED, 1)
    assert model.order[-1] == "train 6"


class Dropping(Linear):
    """Weights depend on random states and on the order of shuffled data."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(torch.nn.functional.dropout(batch, 0.3), batch_idx)


def trained(fit: Any, model: Linear, *, validate: bool = True, **options: Any) -> Linear:
    torch.manual_seed(3)
    data = [loader(5, shuffle=True), loader(2)] if validate else [loader(5, shuffle=True)]
    fit(model, *data, **{"max_epochs": 3, **options})
    return model


def without_stop(run: RunFolder, fit: Any, **options: Any) -> Linear:
    """Train the same as another attempt, so that the one under test is the first of its own."""
    run.attempt = 9
    model = trained(fit, Dropping(), **options)
    run.attempt = 1
    return model


@pytest.mark.parametrize(
    ("asked", "at", "options"),
    [
        # A request, in a batch of the whole run.
        ({"batch": 6}, (7, 1), {}),
        ({"batch": 4}, (5, 0), {}),  # the last batch of an epoch, validation to come
        ({"batch": 4}, (5, 1), {"validate": False}),  # once the epoch is over
        ({"batch": 6}, (4, 1), {"accumulate_grad_batches": 2}),
        ({"batch": 6}, (7, 1), {"max_steps": 13}),
        ({"batch": 7}, (8, 1), {"val_check_interval": 3}),
        ({"batch": 5}, (6, 1), {"val_check_interval": 3}),
        # A plan.
        ({"step": 7}, (7, 1), {}),
        ({"step": 10}, (10, 1), {}),
        ({"step": 10}, (10, 2), {"validate": False}),
        ({"epochs": 2}, (10, 2), {}),
        ({"epochs": 2}, (10, 2), {"validate": False}),
        ({"epochs": 3}, (15, 3), {"check_val_every_n_epoch": 2, "max_epochs": 4}),
        ({"epochs": 2}, (6, 2), {"accumulate_grad_batches": 2}),
        ({"step": 4}, (4, 1), {"accumulate_grad_batches": 2}),
    ],
)
def test_a_resumed_run_equals_a_run_without_a_stop(
    run: RunFolder, fit: Any, asked: dict[str, int], at: tuple[int, int], options: dict[str, Any]
) -> None:
    """Order of steps, validations and epoch ends, and the weights."""
    reference = without_stop(run, fit, **options)
    first = Dropping()
    if "batch" in asked:
        first.do = requests_at(run, Command.STOP, asked["batch"])
    else:
        run.plan(**asked)
    with pytest.raises(RunStopped):
        trained(fit, first, **options)
    (path,) = run.checkpoints
    assert counters(path) == at
    assert [e["global_step"] for e in run.events("stopped")] == [at[0]]
    run.attempt = 2
    second = trained(fit, Dropping(), extra={"LTUI_RESUME_FROM": str(path)}, **options)
    assert [e["global_step"] for e in run.events("resumed")] == [at[0]]
    assert first.order + second.order == reference.order
    assert torch.equal(second.layer.weight, reference.layer.weight)


def test_stop_within_validation(run: RunFolder, fit: Any) -> None:
    reference = without_stop(run, fit)

    def do(module: Any, index: int) -> None:
        if index == -1 and module.trainer.global_step == 10:
            run.request(Command.STOP)

    first = Dropping(do)
    with pytest.raises(RunStopped):
        trained(fit, first)
    assert first.order[-1] == "val 0"
    (path,) = run.checkpoints
    assert counters(path) == (10, 1)
    assert [step for step, _ in run.metrics()["val_loss"]] == [5]
    run.attempt = 2
    second = trained(fit, Dropping(), extra={"LTUI_RESUME_FROM": str(path)})
    assert first.order[:-1] + second.order == reference.order
    assert torch.equal(second.layer.weight, reference.layer.weight)


def test_stop_requested_before_the_first_step_and_on_the_last(run: RunFolder, fit: Any) -> None:
    run.queue_dir.mkdir(parents=True)
    run.request(Command.STOP)
    with pytest.raises(RunStopped):
        fit(Linear(), loader(3), loader(2), max_epochs=1, num_sanity_val_steps=2)
    assert run.checkpoints[0].name == "step-00000001-stop.ckpt"
    run.attempt, run.requests = 2, 0
    fit(Linear(requests_at(run, Command.STOP, 2)), loader(3), max_epochs=1)
    assert run.events("stopped") == []
    assert len(run.events("finished")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_requests_a_stop(run: RunFolder, fit: Any, number: int) -> None:
    before = signal.getsignal(number)

    def do(module: Any, index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(RunStopped):
        fit(Linear(do), loader(5), max_epochs=1)
    assert counters(run.checkpoints[0]) == (2, 0)
    assert signal.getsignal(number) == before


def test_second_interrupt_interrupts(run: RunFolder, fit: Any) -> None:
    def do(module: Any, index: int) -> None:
        # SLURM and torch elastic may send it at the same moment: the first two are one request.
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1 * REPEAT_S)
        sent.append(index)
        os.kill(os.getpid(), signal.SIGINT)

    sent: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            fit(Linear(do), loader(5), max_epochs=1)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sent == [0]
    assert ended.value.code == 1
    assert run.events("exception")[0]["type"] == "KeyboardInterrupt"
    assert run.checkpoints == []


def paused(
    run: RunFolder, fit: Any, act: Callable[[], object], then: Command = Command.CONTINUE
) -> None:
    """Train six batches and pause after the third; there call ``act`` and send ``then``."""

    def act_in_pause() -> None:
        try:
            wait_for(lambda: (pulse := run.pulse()) and pulse.phase == Phase.PAUSED)
            act()
        finally:
            run.request(then)

    thread = threading.Thread(target=act_in_pause)
    thread.start()
    try:
        fit(Linear(requests_at(run, Command.PAUSE, 2)), loader(6), max_epochs=1)
    finally:
        thread.join()


def test_pause_then_checkpoint_then_continue(run: RunFolder, fit: Any) -> None:
    observed: list[Any] = []

    def save() -> None:
        observed.append(required(run.pulse()).global_step)
        run.request(Command.CHECKPOINT)
        wait_for(lambda: required(run.pulse()).decision_done == 2)
        observed.append(len(run.steps()))

    paused(run, fit, save)
    assert observed == [3, 3]
    assert run.checkpoints[0].name == "step-00000003-request.ckpt"
    # The checkpoint does not begin a second pause.
    assert [len(run.events(kind)) for kind in ("paused", "continued")] == [1, 1]
    assert len(run.steps()) == 6
    assert required(run.pulse()).decision_done == 3
    # The pause is no part of a step.
    assert run.steps()[3, 6] < 5


def test_losses_that_arrive_in_a_pause_are_published(
    run: RunFolder, fit: Any, monkeypatch: Any
) -> None:
    """The host may reach the pause before its GPU has computed the last losses."""
    flushed = threading.Event()

    def flush(writer: Any) -> None:
        if writer.pulse.phase == Phase.PAUSED:
            flushed.set()

    monkeypatch.setattr(QueueWriter, "flush_staged", flush)
    paused(run, fit, lambda: flushed.wait(60))
    assert flushed.is_set()
    assert len(run.steps()) == 6


def test_stop_while_paused(run: RunFolder, fit: Any) -> None:
    with pytest.raises(RunStopped):
        paused(run, fit, lambda: None, then=Command.STOP)
    assert counters(run.checkpoints[0]) == (3, 0)


def test_periodic_checkpoints_are_pruned_and_the_end_is_saved(run: RunFolder, fit: Any) -> None:
    extra = {"LTUI_CHECKPOINT_EVERY_S": "0.05", "LTUI_CHECKPOINT_KEEP": "2"}
    fit(Linear(step_s=0.02), loader(20), max_epochs=1, extra=extra)
    saved = run.events("checkpoint_saved")
    assert [e["reason"] for e in saved].count("periodic") >= 3
    names = [path.name for path in run.checkpoints]
    assert sum("periodic" in name for name in names) == 2
    assert names[-1] == "step-00000020-end.ckpt"
    assert {f"{n}.json" for n in names} == {
        p.name for p in run.checkpoints[0].parent.glob("*.json")
    }


def test_more_epochs_after_the_end(run: RunFolder, fit: Any) -> None:
    fit(Linear(), loader(5), max_epochs=1, extra={"LTUI_CHECKPOINT_EVERY_S": "600"})
    (path,) = run.checkpoints
    run.attempt = 2
    model = Linear()
    fit(model, loader(5), max_epochs=2, extra={"LTUI_RESUME_FROM": str(path)})
    assert model.order == [f"train {n}" for n in range(5, 10)] + ["epoch end 1"]


@pytest.mark.parametrize("planned", [False, True])
def test_training_continues_if_the_checkpoint_cannot_be_written(
    run: RunFolder, fit: Any, planned: bool
) -> None:
    (run.path / "checkpoints").write_text("not a folder")
    if planned:
        run.plan(step=2)
    do = None if planned else requests_at(run, Command.STOP, 1)
    fit(Linear(do), loader(5), max_epochs=1)
    (failed,) = run.events("checkpoint_failed")
    assert failed["reason"] == "stop"
    assert "Training continues" in failed["text"]
    assert run.events("stopped") == []
    assert len(run.steps()) == 5
    assert required(run.pulse()).outcome == Outcome.FINISHED


def test_a_full_disk_is_detected_before_writing(run: RunFolder, fit: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint_files, "_SPARE_BYTES", 1 << 60)
    fit(Linear(requests_at(run, Command.CHECKPOINT, 1)), loader(5), max_epochs=1)
    (failed,) = run.events("checkpoint_failed")
    assert "MB free" in failed["error"]
    assert list((run.path / "checkpoints").iterdir()) == []


class Odd(Linear):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = Path("an object")


def test_only_an_own_checkpoint_with_other_objects_is_unpickled(run: RunFolder, fit: Any) -> None:
    with pytest.raises(RunStopped):
        fit(Odd(requests_at(run, Command.STOP, 1)), loader(5), max_epochs=1)
    (path,) = run.checkpoints
    run.attempt = 2
    fit(Odd(), loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": str(path)})
    assert run.steps()[0, 0] == 3
    assert "loaded in full" in run.events("note")[0]["text"]
    elsewhere = path.rename(run.path / "elsewhere.ckpt")
    run.attempt = 3
    with pytest.raises(pickle.UnpicklingError):
        fit(Odd(), loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": str(elsewhere)})


@pytest.mark.parametrize(
    ("folder", "trusted_on"),
    [("checkpoints", {1, 2}), ("checkpoints/best", {1}), ("checkpoints-2", set()), (".", set())],
)
def test_which_checkpoints_may_be_unpickled(
    run: RunFolder, folder: str, trusted_on: set[int]
) -> None:
    environment = run.rank_environment(LTUI_RESUME_FROM=str(run.path / folder / "a.ckpt"))
    sources = {n: required(resume_source(environment, several_nodes=n > 1)) for n in (1, 2)}
    assert {nodes for nodes, source in sources.items() if source.trusted} == trusted_on


def test_a_script_that_names_its_checkpoint_keeps_it(run: RunFolder, fit: Any) -> None:
    with pytest.raises(RunStopped):
        fit(Linear(requests_at(run, Command.STOP, 1)), loader(5), max_epochs=1)
    (path,) = run.checkpoints
    run.attempt = 2
    fit(
        Linear(), loader(5), None, None, str(path), max_epochs=1,
        extra={"LTUI_RESUME_FROM": "/nowhere.ckpt"},
    )  # fmt: skip
    assert run.steps()[0, 0] == 3
    assert "The script resumes from" in run.events("note")[0]["text"]


def test_stop_in_test_outside_of_fit(run: RunFolder, fit: Any) -> None:
    model = Linear()
    model.on_test_start = lambda: run.request(Command.STOP)  # type: ignore[method-assign, assignment]
    with pytest.raises(RunStopped):
        fit(model, loader(5), call="test")
    assert run.checkpoints == []
    assert run.events("stopped")[0]["checkpoint"] is None
