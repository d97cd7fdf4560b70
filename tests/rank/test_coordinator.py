"""Stop, pause, checkpoint and resume of one rank; several ranks are in ``test_two_ranks.py``."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ltui.training.rank.coordination.stop_signals import REPEAT_S, RunStopped
from ltui.training.rank.node_folders import resume_source
from ltui.training.shared.record_types import Outcome, Phase
from ltui.training.tensor_queue.control_block import Command
from ltui.training.tensor_queue.queue_writer import QueueWriter
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder
from tests.required import required
from tests.waiting import wait_for


def requests_at(run: RunFolder, command: Command, at: int) -> Any:
    """Return an action for ``Linear`` that sends one request, in batch ``at`` of the whole run."""
    calls = []

    def do(module: Any, index: int) -> None:
        if index >= 0:
            calls.append(index)
        if index >= 0 and len(calls) - 1 == at:
            run.request(command)

    return do


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


def trained(fit: Any, model: Linear, **options: Any) -> Linear:
    fit(model, loader(5), loader(2), max_epochs=3, **options)
    return model


def without_stop(run: RunFolder, fit: Any, **options: Any) -> Linear:
    """Train the same as another attempt, so that the one under test is the first of its own."""
    run.attempt = 9
    model = trained(fit, Linear(), **options)
    run.attempt = 1
    return model


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (6, {}),
        (4, {}),  # the last batch of an epoch, validation to come
        (6, {"accumulate_grad_batches": 2}),
        (6, {"max_steps": 13}),
        (7, {"val_check_interval": 3}),
        (5, {"val_check_interval": 3}),
    ],
)
def test_a_resumed_run_equals_a_run_without_a_stop(
    run: RunFolder, fit: Any, at: int, options: dict[str, Any]
) -> None:
    """Order of steps, validations and epoch ends, and the weights."""
    reference = without_stop(run, fit, **options)
    first = Linear(requests_at(run, Command.STOP, at))
    with pytest.raises(RunStopped):
        trained(fit, first, **options)
    (path,) = run.checkpoints
    run.attempt = 2
    second = trained(fit, Linear(), extra={"LTUI_RESUME_FROM": str(path)}, **options)
    (resumed,) = run.events("resumed")
    assert resumed["global_step"] == counters(path)[0]
    assert first.order + second.order == reference.order
    assert torch.equal(second.layer.weight, reference.layer.weight)


def test_stop_within_validation(run: RunFolder, fit: Any) -> None:
    reference = without_stop(run, fit)

    def do(module: Any, index: int) -> None:
        if index == -1 and module.trainer.global_step == 10:
            run.request(Command.STOP)

    first = Linear(do)
    with pytest.raises(RunStopped):
        trained(fit, first)
    assert first.order[-1] == "val 0"
    (path,) = run.checkpoints
    assert counters(path) == (10, 1)
    assert [step for step, _ in run.metrics()["val_loss"]] == [5]
    run.attempt = 2
    second = trained(fit, Linear(), extra={"LTUI_RESUME_FROM": str(path)})
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


def test_last_batch_of_an_epoch_without_validation_stops_once_the_epoch_is_over(
    run: RunFolder, fit: Any
) -> None:
    model = Linear(requests_at(run, Command.STOP, 2))
    with pytest.raises(RunStopped):
        fit(model, loader(3), max_epochs=3)
    assert counters(run.checkpoints[0]) == (3, 1)
    assert model.order[-1] == "epoch end 0"


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


SESSIONS = """
import subprocess
from ltui.training.rank.coordination.stop_signals import StopSignals

assert StopSignals(print).install()
options = {"start_new_session": True, "preexec_fn": lambda: None}
assert subprocess.run(["true"], **options).returncode == 0
"""


def test_programs_of_a_rank_may_begin_sessions() -> None:
    subprocess.run([sys.executable, "-c", SESSIONS], timeout=60, check=True)


OWN_HANDLER = """
import signal
from ltui.training.rank.coordination.stop_signals import StopSignals

signal.signal(signal.SIGUSR2, print)
signals = StopSignals(print)
assert signals.install()
signals.restore_defaults()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGUSR2) is print
"""


def test_the_sigusr2_handler_of_a_script_stays_when_the_coordinator_fails() -> None:
    subprocess.run([sys.executable, "-c", OWN_HANDLER], timeout=60, check=True)


def test_pause_then_checkpoint_then_continue(run: RunFolder, fit: Any) -> None:
    observed: list[Any] = []

    def request_while_paused() -> None:
        try:
            wait_for(lambda: (pulse := run.pulse()) and pulse.phase == Phase.PAUSED)
            observed.append(required(run.pulse()).global_step)
            run.request(Command.CHECKPOINT)
            wait_for(lambda: run.checkpoints)
            wait_for(lambda: required(run.pulse()).decision_done == 2)
            observed.append(len(run.steps()))
        finally:
            run.request(Command.CONTINUE)

    thread = threading.Thread(target=request_while_paused)
    thread.start()
    fit(Linear(requests_at(run, Command.PAUSE, 2)), loader(6), max_epochs=1)
    thread.join()
    assert observed == [3, 3]
    assert run.checkpoints[0].name == "step-00000003-request.ckpt"
    # The checkpoint does not begin a second pause.
    assert len(run.events("paused")) == 1
    assert len(run.events("continued")) == 1
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

    def request_when_flushed() -> None:
        try:
            assert flushed.wait(60)
        finally:
            run.request(Command.CONTINUE)

    monkeypatch.setattr(QueueWriter, "flush_staged", flush)
    thread = threading.Thread(target=request_when_flushed)
    thread.start()
    fit(Linear(requests_at(run, Command.PAUSE, 2)), loader(6), max_epochs=1)
    thread.join()
    assert flushed.is_set()
    assert len(run.steps()) == 6


def test_stop_while_paused(run: RunFolder, fit: Any) -> None:
    def request_while_paused() -> None:
        wait_for(lambda: (pulse := run.pulse()) and pulse.phase == Phase.PAUSED)
        run.request(Command.STOP)

    thread = threading.Thread(target=request_while_paused)
    thread.start()
    with pytest.raises(RunStopped):
        fit(Linear(requests_at(run, Command.PAUSE, 2)), loader(6), max_epochs=1)
    thread.join()
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


def test_training_continues_if_the_checkpoint_cannot_be_written(run: RunFolder, fit: Any) -> None:
    (run.path / "checkpoints").write_text("not a folder")
    fit(Linear(requests_at(run, Command.STOP, 1)), loader(5), max_epochs=1)
    (failed,) = run.events("checkpoint_failed")
    assert failed["reason"] == "stop"
    assert "Training continues" in failed["text"]
    assert run.events("stopped") == []
    assert len(run.steps()) == 5
    assert required(run.pulse()).outcome == Outcome.FINISHED


def test_a_full_disk_is_detected_before_writing(run: RunFolder, fit: Any, monkeypatch: Any) -> None:
    from ltui.training.shared import checkpoint_files

    monkeypatch.setattr(checkpoint_files, "_SPARE_BYTES", 1 << 60)
    fit(Linear(requests_at(run, Command.CHECKPOINT, 1)), loader(5), max_epochs=1)
    (failed,) = run.events("checkpoint_failed")
    assert "MB free" in failed["error"]
    assert list((run.path / "checkpoints").iterdir()) == []


def test_an_own_checkpoint_with_other_objects_is_loaded_in_full(run: RunFolder, fit: Any) -> None:
    class Odd(Linear):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = Path("an object")

    with pytest.raises(RunStopped):
        fit(Odd(requests_at(run, Command.STOP, 1)), loader(5), max_epochs=1)
    (path,) = run.checkpoints
    run.attempt = 2
    fit(Odd(), loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": str(path)})
    assert run.steps()[0, 0] == 3
    assert "loaded in full" in run.events("note")[0]["text"]


def test_another_checkpoint_with_other_objects_is_not_unpickled(run: RunFolder, fit: Any) -> None:
    class Odd(Linear):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = Path("an object")

    with pytest.raises(RunStopped):
        fit(Odd(requests_at(run, Command.STOP, 1)), loader(5), max_epochs=1)
    elsewhere = run.checkpoints[0].rename(run.path / "elsewhere.ckpt")
    run.attempt = 2
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
