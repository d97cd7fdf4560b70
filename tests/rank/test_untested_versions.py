"""An untested Lightning or torch without an attribute that exact resume needs costs exactness only.

A private attribute is renamed in the library itself, as a new release may do. The run must start,
stop with a checkpoint and resume by Lightning's own means, with one warning for each attempt.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ltui.training.rank import lightning_internals, torch_internals
from ltui.training.rank.channel import Channel
from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.tensor_queue.control_block import Command
from tests.rank.models import Linear, loader
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
    from lightning.pytorch.loops import fit_loop

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


def model_that_stops(run: RunFolder, at: int) -> Linear:
    """Return a model that requests a stop in batch ``at``."""
    calls: list[int] = []

    def do(_: Any, index: int) -> None:
        if index >= 0:
            calls.append(index)
            if len(calls) == at:
                run.request(Command.STOP)

    return Linear(do)


@pytest.mark.parametrize("rename", [rename_in_torch, rename_in_lightning])
def test_a_run_starts_stops_and_resumes_without_the_attribute(
    run: RunFolder, fit: Any, monkeypatch: Any, rename: Callable[[Any], str]
) -> None:
    missing = rename(monkeypatch)
    with pytest.raises(RunStopped):
        fit(model_that_stops(run, 7), loader(5), loader(2), max_epochs=3)
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

    model = model_that_stops(run, 7)
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
        fit(model_that_stops(run, 3), loader(5), max_epochs=1)
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
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch, adapter: Any, name: str
) -> None:
    """Each function that spells a private attribute fails, in all modules that use it."""

    def fails(*arguments: Any, **options: Any) -> Any:
        raise AttributeError(f"no attribute for {name}")

    def train(**environment: str) -> Linear:
        model = Linear()
        fit(model, loader(5, shuffle=True), loader(2), max_epochs=2, extra=environment)
        return model

    with pytest.raises(RunStopped):
        fit(model_that_stops(run, 3), loader(5, shuffle=True), loader(2), max_epochs=2)
    (path,) = run.checkpoints
    original = getattr(adapter, name)
    run.attempt, run.requests = 2, 0
    for module in [m for m in sys.modules.values() if m.__name__.startswith("ltui.training.rank")]:
        if vars(module).get(name) is original:
            monkeypatch.setattr(module, name, fails)
    model = train(LTUI_RESUME_FROM=str(path))
    assert model.order[-1] == "epoch end 1"
    assert len(run.events("finished")) == 1
    assert run.events("exception") == []
    if name not in NEEDED_TO_RESUME:
        assert model.order[0] == "train 3"
    else:
        assert "could not be prepared" in run.events("warning")[-1]["text"]
        assert model.order[0] == "train 0"

    run.attempt, run.requests = 3, 0
    stopping = model_that_stops(run, 3)
    try:
        fit(stopping, loader(5, shuffle=True), loader(2), max_epochs=2)
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
        fit(model_that_stops(run, 3), loader(5), max_epochs=1)
    (path,) = run.checkpoints
    torch.save({"version": 0}, path.with_name(f"{path.name}.rank-00001"))
    run.attempt, run.requests = 2, 0
    model = Linear()
    fit(model, loader(5), max_epochs=1, extra={"LTUI_RESUME_FROM": str(path)})
    assert model.order[0] == "train 3"
    (note,) = run.events("note")
    assert "could not be read when it was saved" in note["text"]
