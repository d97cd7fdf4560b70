"""An untested Lightning or torch without an attribute that exact resume needs costs exactness only.

A private attribute is renamed in the library itself, as a new release may do. The run must start,
stop with a checkpoint and resume by Lightning's own means, with one warning for each attempt.
"""

from __future__ import annotations

import inspect
import json
import shutil
import signal
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loops import fit_loop
from torch.utils.data import DataLoader

from ltui.training.rank import lightning_internals, torch_internals, training_facts
from ltui.training.rank.channel import Channel
from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.rank.resume import loop_state
from ltui.training.tensor_queue.control_block import Command
from tests.rank.models import Linear, close_channel, loader, requests_at, train
from tests.rank.runs import RunFolder


def rename_in_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    """Rename ``DataLoader._get_iterator``. The loader itself calls the new name."""
    original = DataLoader._get_iterator
    monkeypatch.delattr(DataLoader, "_get_iterator")
    monkeypatch.setattr(DataLoader, "_new_iterator", original, raising=False)
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: loader._new_iterator())
    return "_get_iterator"


def rename_in_lightning(monkeypatch: pytest.MonkeyPatch) -> str:
    """Rename ``_FitLoop._load_combined_loader_states``, also in the method that calls it."""
    loop_class, name, new_name = (
        fit_loop._FitLoop,
        "_load_combined_loader_states",
        "_load_positions",
    )
    source = textwrap.dedent(inspect.getsource(loop_class.setup_data))
    assert name in source
    methods: dict[str, Any] = {}
    exec(source.replace(name, new_name), vars(fit_loop), methods)
    monkeypatch.setattr(loop_class, new_name, getattr(loop_class, name), raising=False)
    monkeypatch.setattr(loop_class, "setup_data", methods["setup_data"])
    monkeypatch.delattr(loop_class, name)
    return name


@pytest.mark.parametrize("rename", [rename_in_torch, rename_in_lightning])
def test_a_run_starts_stops_and_resumes_without_the_attribute(
    run: RunFolder, fit: Any, monkeypatch: Any, rename: Callable[[Any], str]
) -> None:
    missing = rename(monkeypatch)
    with pytest.raises(RunStopped):
        fit(Linear(requests_at(run, Command.STOP, 6)), loader(5), loader(2), max_epochs=3)
    (path,) = run.checkpoints
    assert path.name == "step-00000007-stop.ckpt"
    assert json.loads(Path(f"{path}.json").read_text())["beside"] == {}
    (warning,) = run.events("warning")
    assert missing in warning["text"]
    assert "Lightning's own checkpoint" in warning["text"]
    assert warning["remedy"]
    assert torch.__version__ in warning["text"]
    weights = torch.load(path, weights_only=True)["state_dict"]

    run.attempt, run.requests = 2, 0
    model = Linear()
    at_start: dict[str, Any] = {}
    model.on_train_start = lambda: at_start.update(  # type: ignore[method-assign]
        weight=model.layer.weight.detach().clone()
    )
    fit(model, loader(5), loader(2), max_epochs=3, extra={"LTUI_RESUME_FROM": str(path)})
    (resumed,) = run.events("resumed")
    assert resumed["global_step"] == 7
    assert torch.equal(at_start["weight"], weights["layer.weight"])
    assert model.order[0] == "train 7"
    assert model.order[-1] == "epoch end 2"
    (warning,) = run.events("warning")
    assert missing in warning["text"]
    assert len(run.events("finished")) == 1
    for kind in ("steering_off", "telemetry_off", "exception", "note"):
        assert run.events(kind) == [], kind


def test_a_failure_when_the_state_is_read_costs_no_checkpoint(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the start can't see everything: attributes of iterators exist later."""

    def fails(iterator: Any) -> int:
        raise AttributeError("no attribute '_num_yielded'")

    model = Linear(requests_at(run, Command.STOP, 6))
    model.on_train_start = lambda: monkeypatch.setattr(  # type: ignore[method-assign]
        "ltui.training.rank.resume.dataloader_position.yielded_batches", fails
    )
    with pytest.raises(RunStopped):
        fit(model, loader(5), loader(2), max_epochs=3)
    (note,) = run.events("note")
    assert "_num_yielded" in note["text"]
    monkeypatch.undo()
    assert torch_internals.yielded_batches is not fails
    run.attempt, run.requests = 2, 0
    model = Linear()
    extra = {"LTUI_RESUME_FROM": str(run.checkpoints[0])}
    fit(model, loader(5), loader(2), max_epochs=3, extra=extra)
    assert (model.order[0], model.order[-1]) == ("train 7", "epoch end 2")
    (note,) = run.events("note")
    assert "could not be read when it was saved" in note["text"]


def test_a_rank_other_than_0_reports_that_it_could_not_read_its_state(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise ValueError("no state")

    monkeypatch.setattr("ltui.training.rank.resume.exact_state.read_random_states", fails)
    monkeypatch.setattr(Channel, "event_from_rank_0", lambda *arguments, **fields: None)
    with pytest.raises(RunStopped):
        fit(Linear(requests_at(run, Command.STOP, 2)), loader(5), max_epochs=1)
    (note,) = run.events("note")
    assert "will not be exact: ValueError: no state" in note["text"]


def test_a_resume_that_cannot_be_prepared_is_reported(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise AttributeError("no attribute '_checkpoint_connector'")

    monkeypatch.setattr("ltui.training.rank.callback.resume_from", fails)
    fit(Linear(), loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": "/somewhere.ckpt"})
    (warning,) = run.events("warning")
    assert "/somewhere.ckpt" in warning["text"]
    assert "_checkpoint_connector" in warning["text"]
    assert len(run.events("finished")) == 1


HAVE_FALLBACKS = (
    *("loaded_checkpoint", "is_state_loaded", "is_resuming"),
    "restore_get_iterator",
)
NEEDED_TO_RESUME = ("checkpoint_connector",)
NEEDED_TO_SAVE = (
    *("checkpoint_connector", "signal_connector", "should_check_validation"),
    *("check_validation_signature", "is_training_done"),
)


def functions_of(module: types.ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    ]


def shuffled_data() -> tuple[Any, Any]:
    return loader(5, shuffle=True), loader(2)


@pytest.fixture(scope="module")
def stopped_at_3(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("stopped"))
    with pytest.raises(RunStopped):
        train(run, Linear(requests_at(run, Command.STOP, 2)), *shuffled_data(), max_epochs=2)
    close_channel()
    return run


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        (adapter, name)
        for adapter in (lightning_internals, torch_internals)
        for name in functions_of(adapter)
        if name not in HAVE_FALLBACKS
    ],
    ids=lambda value: getattr(value, "__name__", value).rpartition(".")[2],
)
def test_no_missing_attribute_breaks_training_or_a_resume(
    run: RunFolder,
    fit: Any,
    stopped_at_3: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    adapter: Any,
    name: str,
) -> None:
    """Each function that spells a private attribute fails, in all modules that use it."""

    def fails(*arguments: Any, **options: Any) -> Any:
        raise AttributeError(f"no attribute for {name}")

    shutil.copytree(stopped_at_3.path, run.path, dirs_exist_ok=True)
    (path,) = run.checkpoints
    original = getattr(adapter, name)
    for module in [m for m in sys.modules.values() if m.__name__.startswith("ltui.training.rank")]:
        if vars(module).get(name) is original:
            monkeypatch.setattr(module, name, fails)
    run.attempt, model = 2, Linear()
    fit(model, *shuffled_data(), max_epochs=2, extra={"LTUI_RESUME_FROM": str(path)})
    assert model.order[-1] == "epoch end 1"
    assert len(run.events("finished")) == 1
    assert run.events("exception") == []
    if name not in NEEDED_TO_RESUME:
        assert model.order[0] == "train 3"
    else:
        assert "could not be prepared" in run.events("warning")[-1]["text"]
        assert model.order[0] == "train 0"

    run.attempt, run.requests = 3, 0
    stopping = Linear(requests_at(run, Command.STOP, 2))
    try:
        fit(stopping, *shuffled_data(), max_epochs=2)
    except RunStopped:
        assert stopping.order[-1] == "train 2"
    else:
        assert run.events("steering_off") + run.events("checkpoint_failed")
        assert stopping.order[-1] == "epoch end 1"
    assert bool(run.events("checkpoint_saved")) == (name not in NEEDED_TO_SAVE)


def test_fallbacks_for_missing_attributes() -> None:
    loop = SimpleNamespace(restarting=False, epoch_loop=SimpleNamespace(restarting=True))
    assert lightning_internals.loaded_checkpoint(object()) == {}
    assert lightning_internals.is_state_loaded(loop) is False
    assert lightning_internals.is_resuming(loop) is True
    torch_internals.restore_get_iterator(loop)


def test_no_rank_restores_its_state_if_one_rank_has_none(run: RunFolder, fit: Any) -> None:
    with pytest.raises(RunStopped):
        fit(Linear(requests_at(run, Command.STOP, 2)), loader(5), max_epochs=1)
    (path,) = run.checkpoints
    torch.save({"version": 0}, path.with_name(f"{path.name}.rank-00001"))
    run.attempt, run.requests = 2, 0
    model = Linear()
    fit(model, loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": str(path)})
    assert model.order[0] == "train 3"
    (note,) = run.events("note")
    assert "could not be read when it was saved" in note["text"]


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.0.9", True), ("2.4.0 (pytorch_lightning)", True), ("2.5.0", False), ("3.0", False),
     ("2.10.1", False), ("unknown", False)],
)  # fmt: skip
def test_which_versions_are_too_old(version: str, old: bool) -> None:
    assert training_facts.is_too_old(version) is old


def test_loops_that_the_coordinator_does_not_support_are_reported(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning 2.0 calls ``_should_check_val_fx`` without an argument."""

    def fails(trainer: Any) -> bool:
        raise TypeError("_should_check_val_fx() takes 1 positional argument but 2 were given")

    monkeypatch.setattr(loop_state, "validation_is_due", fails)
    monkeypatch.setattr(training_facts, "lightning_version", lambda trainer: "2.0.9")
    handlers: list[Any] = []

    def do(_: Any, index: int) -> None:
        if index == 1:
            run.request(Command.CHECKPOINT)
        handlers.append(signal.getsignal(signal.SIGTERM))

    fit(Linear(do), loader(6), max_epochs=1)
    (off,) = run.events("steering_off")
    assert "_should_check_val_fx" in off["error"]
    (warned,) = run.events("warning")
    assert warned["text"].startswith("Lightning 2.0.9 is older than 2.5")
    assert callable(handlers[0])
    assert handlers[-1] is signal.SIG_DFL, "a signal ends the process again"
