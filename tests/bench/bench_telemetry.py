"""What the callback costs a training step on CPU, beside what Lightning's own instruments cost.

One training, in which the instruments take turns every few steps: so all of them meet the same load
of the machine. Reported is the median step with the instrument less the median step with an empty
callback.
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

BLOCK, SKIPPED, ROUNDS = 20, 3, 80
EMPTY, TELEMETRY, CSV, RICH = "empty", "telemetry", "csv", "rich"
NAMES = (EMPTY, TELEMETRY, CSV, RICH)
ROWS = (
    (TELEMETRY, "telemetry callback, a step beyond an empty callback", 15.0),
    (CSV, "  CSVLogger, every step, the same", None),
    (RICH, "  RichProgressBar, the same", None),
)


class _Model(pl.LightningModule):
    """Times its steps, and hands the turn from one instrument to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.times: dict[str, list[float]] = {name: [] for name in NAMES}
        self.turn = EMPTY
        self.began = 0.0

    def on_train_start(self) -> None:
        empty, telemetry, rich = self.trainer.callbacks
        self.callbacks = {EMPTY: empty, CSV: empty, TELEMETRY: telemetry, RICH: rich}
        self.csv = self.trainer.loggers
        loop = self.trainer.fit_loop.epoch_loop
        watched = loop._on_before_fetch, loop._on_after_fetch
        plain = type(loop)._on_before_fetch.__get__(loop), type(loop)._on_after_fetch.__get__(loop)
        self.fetch_hooks = {name: watched if name == TELEMETRY else plain for name in NAMES}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        now = time.perf_counter()
        if batch_idx % BLOCK > SKIPPED:
            self.times[self.turn].append(now - self.began)
        if batch_idx % BLOCK == 0:
            self.hand_over(NAMES[batch_idx // BLOCK % len(NAMES)])
        self.began = time.perf_counter()
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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure() -> list[dict[str, Any]]:
    """Microseconds a step of each instrument."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        medians = _medians_us(Path(folder))
    return [
        {"what": what, "value": medians[name] - medians[EMPTY], "unit": "us", "bound": bound}
        for name, what, bound in ROWS
    ]


def _medians_us(folder: Path) -> dict[str, float]:
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
    return {name: 1e6 * statistics.median(times) for name, times in model.times.items()}


if __name__ == "__main__":
    Console().print(measure())
