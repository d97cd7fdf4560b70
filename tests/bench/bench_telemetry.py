"""What the callback costs a training step on CPU, beside what Lightning's own instruments cost.

One training, in which the instruments take turns every few steps, in an order that rotates: so all
of them meet the same load of the machine. A step is measured in CPU time of the training thread, to
which waiting for a processor does not add. Reported is the median step with the instrument less the
median step with an empty callback. Beside it stands what the callback's hooks take where nothing
else runs between them, which keeps their memory in the processor's caches: a training does not.

Raw is what the callback does; net is what a run has of it, as the callback puts out the context
managers of a profiler that does nothing.
"""

from __future__ import annotations

import io
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from ltui.training.rank.entry import rebuild
from ltui.training.rank.environment import RankEnvironment

BLOCK, SKIPPED, ROUNDS = 40, 8, 30
LOOPS, LOOP_STEPS = 41, 100
EMPTY, TELEMETRY, SPARED, CSV, RICH = "empty", "telemetry", "spared", "csv", "rich"
NAMES = (EMPTY, TELEMETRY, SPARED, CSV, RICH)
ROWS = (
    (TELEMETRY, "telemetry callback, a step beyond an empty callback (raw)", 15.0),
    (SPARED, "  without the idle profiling that it puts out (net)", 15.0),
    (CSV, "  CSVLogger, every step, the same", None),
    (RICH, "  RichProgressBar, the same", None),
)


class _Model(pl.LightningModule):
    """Times its steps, and hands the turn from one instrument to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.times: dict[str, list[int]] = {name: [] for name in NAMES}
        self.alone_us = 0.0
        self.turn = EMPTY
        self.began = 0

    def on_train_start(self) -> None:
        empty, telemetry, rich = self.trainer.callbacks
        self.callbacks = {
            EMPTY: empty, CSV: empty, TELEMETRY: telemetry, SPARED: telemetry, RICH: rich
        }  # fmt: skip
        self.csv = self.trainer.loggers
        loop = self.trainer.fit_loop.epoch_loop
        watched = loop._on_before_fetch, loop._on_after_fetch
        plain = type(loop)._on_before_fetch.__get__(loop), type(loop)._on_after_fetch.__get__(loop)
        with_telemetry = (TELEMETRY, SPARED)
        self.fetch_hooks = {name: watched if name in with_telemetry else plain for name in NAMES}
        self.spared = vars(self.trainer.profiler).pop("profile")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        now = time.thread_time_ns()
        if batch_idx % BLOCK > SKIPPED:
            self.times[self.turn].append(now - self.began)
        if batch_idx % BLOCK == 0:
            block = batch_idx // BLOCK
            self.hand_over(NAMES[(block + block // len(NAMES)) % len(NAMES)])
        self.began = time.thread_time_ns()
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def hand_over(self, name: str) -> None:
        self.turn = name
        trainer = self.trainer
        trainer.callbacks[:] = [self.callbacks[name]]
        trainer.loggers = self.csv if name == CSV else []
        fetcher = trainer.fit_loop._data_fetcher
        fetcher._start_profiler, fetcher._stop_profiler = self.fetch_hooks[name]
        vars(trainer.profiler).pop("profile", None)
        if name == SPARED:
            trainer.profiler.profile = self.spared

    def on_train_end(self) -> None:
        plain = self.one_step(EMPTY)
        self.alone_us = self.one_step(TELEMETRY) - plain

    def one_step(self, name: str) -> float:
        """Microseconds of one step's hooks, over and over."""
        hooks, trainer, batch = self.callbacks[name], self.trainer, torch.zeros(2, 8)
        before, after = self.fetch_hooks[name]
        outputs = {"loss": torch.tensor(1.0)}
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        costs = []
        for _ in range(LOOPS):
            began = time.thread_time_ns()
            for index in range(LOOP_STEPS):
                before()
                after()
                hooks.on_train_batch_start(trainer, self, batch, index)
                hooks.on_before_backward(trainer, self, outputs["loss"])
                hooks.on_before_optimizer_step(trainer, self, None)
                steps.total.completed += 1
                hooks.on_train_batch_end(trainer, self, outputs, batch, index)
            costs.append((time.thread_time_ns() - began) / LOOP_STEPS / 1e3)
        return statistics.median(costs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure() -> list[dict[str, Any]]:
    """Microseconds a step of each instrument."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        model = _train(Path(folder))
    medians = {name: statistics.median(times) / 1e3 for name, times in model.times.items()}
    rows = [
        {"what": what, "value": medians[name] - medians[EMPTY], "unit": "us", "bound": bound}
        for name, what, bound in ROWS
    ]
    alone = {"what": "  its hooks alone, in a tight loop", "value": model.alone_us}
    return [*rows[:2], {**alone, "unit": "us", "bound": None}, *rows[2:]]


def _train(folder: Path) -> _Model:
    environment = RankEnvironment(run_dir=folder, run_id="bench", attempt=1)
    rich = RichProgressBar(console_kwargs={"file": io.StringIO(), "force_terminal": True})
    model = _Model()
    steps = BLOCK * len(NAMES) * ROUNDS
    data = torch.utils.data.DataLoader(torch.randn(steps * 2, 8), batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[pl.Callback(), rebuild("lightning", environment), rich],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    return model


if __name__ == "__main__":
    Console().print(measure())
