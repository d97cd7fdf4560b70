"""Every logged value is recorded, row by row as Lightning's own loggers get it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torchmetrics import MeanMetric

from ltui.training.rank import metric_records
from ltui.training.rank.channel import Channel
from ltui.training.shared.record_types import RecordKind
from tests.rank.models import Linear, TwoOptimizers, loader
from tests.rank.runs import RunFolder

Rows = dict[str, list[tuple[int, float]]]


class Logs(Linear):
    """Logs in every way that a module has."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("double", loss.double() * 2, prog_bar=True)
        self.log_dict({"train/a": loss + 1, "train/b": batch_idx})
        self.log("constant", 3.0)
        self.mean(loss)
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:  # a logger repeats it until the epoch ends
            self.log("every third", loss)
        self.log("unlogged", loss, logger=False)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("epoch end", float(self.trainer.current_epoch))

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.layer(batch).pow(2).mean()
        self.log("val/loss", loss)
        self.log("fit_loss", loss, add_dataloader_idx=True)
        self.log("each", loss, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/end", float(self.trainer.global_step))


class LogsInHooks(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.log("hook", float(trainer.global_step), on_step=True, on_epoch=False)


def csv_rows(folder: Path) -> Rows:
    """Name -> [(step as ltui counts it, value)] of Lightning's CSVLogger."""
    rows: Rows = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    rows.setdefault(name, []).append((int(row["step"]) + 1, float(value)))
    return rows


def board_rows(folder: Path) -> Rows:
    """Name -> [(step as ltui counts it, value)] of TensorBoard."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(event.step + 1, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
        if name not in ("epoch", "hp_metric")
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate_grad_batches": 2}, id="accumulation"),
        pytest.param({"val_check_interval": 3}, id="validation in mid-epoch"),
        pytest.param({"val_check_interval": 3, "accumulate_grad_batches": 2}, id="both"),
        pytest.param({"num_sanity_val_steps": 2, "max_steps": 9}, id="sanity check and limit"),
    ],
)
def test_rows_are_those_of_lightnings_loggers(
    run: RunFolder, fit: Any, options: dict[str, Any]
) -> None:
    text = CSVLogger(run.path, "csv")
    board = TensorBoardLogger(run.path, "board")
    fit(
        Logs(),
        loader(7),
        [loader(3), loader(2)],
        **{"max_epochs": 3, "logger": [text, board], "log_every_n_steps": 1, **options},
        callbacks=[LogsInHooks(), LearningRateMonitor(), run.callback()],
    )
    recorded = run.metrics()
    # Read by itself, because the logger numbers it by the batches of the validation.
    each = {n: recorded.pop(n) for n in list(recorded) if n.startswith("each_step")}
    only_here = {"unlogged": recorded.pop("unlogged")}
    logged, written = csv_rows(Path(text.log_dir)), board_rows(Path(board.log_dir))
    for name, values in each.items():
        assert [v for _, v in values] == [v for _, v in logged.pop(name)]
        assert [v for _, v in values] == pytest.approx([v for _, v in written.pop(name)])
    # The monitor gives its logger each batch, also of an accumulated step, in full precision.
    rates = [rows.pop("lr-Adam") for rows in (recorded, logged, written)]
    if "accumulate_grad_batches" not in options:
        assert [step for step, _ in rates[0]] == [step for step, _ in rates[1]]
        assert [v for _, v in rates[0]] == pytest.approx([v for _, v in rates[1]])
    assert sorted(recorded) == sorted(logged) == sorted(written)
    for name, values in recorded.items():
        assert values == logged[name], name
        assert [step for step, _ in values] == [step for step, _ in written[name]], name
        assert [v for _, v in values] == pytest.approx([v for _, v in written[name]]), name
    assert {"both_step", "both_epoch", "metric_step", "hook", "val/end"} <= recorded.keys()
    assert [s for s, _ in only_here["unlogged"]][-1] == recorded["fit_loss"][-1][0]


def test_a_logger_that_logs_rarely_has_a_part_of_the_rows(run: RunFolder, fit: Any) -> None:
    text = CSVLogger(run.path)
    data = (loader(23), loader(2))
    fit(Linear(), *data, max_epochs=2, logger=text, log_every_n_steps=10)
    recorded, logged = run.metrics(), csv_rows(Path(text.log_dir))
    assert [step for step, _ in recorded["fit_loss"]] == list(range(1, 47))
    assert len(logged["fit_loss"]) == 4
    assert set(logged["fit_loss"]) < set(recorded["fit_loss"])
    assert (recorded["val_loss"], recorded["epoch_loss"]) == (
        logged["val_loss"],
        logged["epoch_loss"],
    )


def test_manual_optimization_logs_every_batch_at_the_step_of_its_optimizers(
    run: RunFolder, fit: Any
) -> None:
    class Manual(TwoOptimizers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            if batch_idx % 2:
                super().training_step(batch, batch_idx)
            self.log("batch", float(batch_idx))

    text = CSVLogger(run.path)
    fit(Manual(), loader(6), max_epochs=1, logger=text, log_every_n_steps=1)
    batches = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run.metrics()["batch"] == list(zip([0, 2, 2, 4, 4, 6], batches, strict=True))
    assert [value for _, value in csv_rows(Path(text.log_dir))["batch"]] == batches


def test_a_test_after_the_training_has_its_last_step(run: RunFolder, fit: Any) -> None:
    text = CSVLogger(run.path)
    model = Linear()
    trainer = fit(model, loader(4), max_epochs=1, logger=text)
    fit(model, loader(2), call="test", trainer=trainer)
    (logged,) = csv_rows(Path(text.log_dir))["test_loss"]
    assert run.metrics()["test_loss"] == [(logged[0] - 1, logged[1])] == [(4, logged[1])]


# More than 1,000 values in a step.


class Windows:
    """The METRICS records of a queue: single values, and windows."""

    def __init__(self, run: RunFolder) -> None:
        self.single: dict[str, list[tuple[int, float]]] = {}
        self.combined: dict[str, list[tuple[int, int, int, list[float]]]] = {}
        """Name -> [(first step, last step, count, [mean, low, high, last])]."""
        for record in run.records():
            if record.kind != RecordKind.METRICS:
                continue
            label = json.loads(record.label)
            for place, name in enumerate(label["names"]):
                if (count := label.get("count")) is None:
                    value = (label["step"], float(record.array[place]))
                    self.single.setdefault(name, []).append(value)
                else:
                    window = (label["first_step"], label["step"], count)
                    values = record.array[:, place].tolist()
                    self.combined.setdefault(name, []).append((*window, values))


class Many(Linear):
    """Logs ``count`` values and the loss in each step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log_dict({f"m{n}": float(batch_idx + n) for n in range(self.count)})
        return super().training_step(batch, batch_idx)


def test_rows_of_too_many_values_become_windows_of_steps(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_records, "MAX_VALUES", 100)
    fit(Many(250), loader(8), max_epochs=1)
    windows = Windows(run)
    # 251 values in a step: three steps are combined. The epoch's end sends the rest.
    expected = [(1, 3, 3, [1.0, 0.0, 2.0, 2.0]), (4, 6, 3, [4.0, 3.0, 5.0, 5.0])]
    assert windows.combined["m0"] == [*expected, (7, 8, 2, [6.5, 6.0, 7.0, 7.0])]
    assert windows.combined["m249"][0] == (1, 3, 3, [250.0, 249.0, 251.0, 251.0])
    assert "epoch_loss" in windows.single
    (warning,) = run.events("warning")
    assert "251 at once" in warning["text"]
    assert "up to 3 values" in warning["text"]


@pytest.mark.parametrize("count", [999, 1000])
def test_1000_values_in_a_row_are_sent_one_by_one(run: RunFolder, fit: Any, count: int) -> None:
    fit(Many(count), loader(2), max_epochs=1)
    windows = Windows(run)
    single = [(step, step + 997.0) for step in (1, 2)]
    assert windows.single.get("m998", []) == (single if count == 999 else [])
    assert bool(windows.combined) == bool(run.events("warning")) == (count == 1000)


def test_a_long_validation_that_logs_each_batch_is_combined(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_records, "MAX_VALUES", 10)
    monkeypatch.setattr(metric_records, "_MAX_ROWS", 4)

    class Each(Linear):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            value = math.nan if batch_idx == 16 else float(batch_idx)
            self.log("each", value, on_step=True, on_epoch=False)

    fit(Each(), loader(2), loader(20), max_epochs=1)
    windows = Windows(run)
    values = windows.single["each"]  # two of the values of this step are the training's
    assert [value for _, value in values] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    counts = [window[2] for window in windows.combined["each"]]
    assert counts == [4, 4, 3]
    assert windows.combined["each"][0] == (2, 2, 4, [10.5, 9.0, 12.0, 12.0])
    mean, low, high, last = windows.combined["each"][1][3]
    assert math.isnan(mean)
    assert (low, high, last) == (13.0, 15.0, 16.0) or math.isnan(last)


def test_what_is_no_real_number_does_not_cost_the_other_values(run: RunFolder) -> None:
    channel = Channel(run.rank_environment(), 0)
    sender = metric_records.MetricSender(channel)
    others = {"complex": torch.tensor(1 + 2j), "several": torch.ones(2), "text": "a"}
    for step in (1, 2):
        sender.send({"a": 1.5, **others, "b": torch.tensor(2)}, step, 0)
    channel.close()
    assert run.metrics() == {"a": [(1, 1.5), (2, 1.5)], "b": [(1, 2.0), (2, 2.0)]}


@pytest.mark.gpu
def test_windows_of_values_on_a_gpu(run: RunFolder) -> None:
    channel = Channel(run.rank_environment(), 0)
    sender = metric_records.MetricSender(channel)
    for step in range(1, 5):
        values = torch.arange(1500.0, device="cuda") + step
        sender.send({f"m{n}": value for n, value in enumerate(values)}, step, 0)
    torch.cuda.synchronize()
    channel.close()
    combined = Windows(run).combined
    assert combined["m1"] == [(1, 2, 2, [2.5, 2, 3, 3]), (3, 4, 2, [4.5, 4, 5, 5])]
