"""What the callback costs a training step on CPU, beside what Lightning's own instruments cost.

Every variant trains the same small model in one process, in turn, several times over; what is
reported is the median, over the rounds, of the difference between the median step with the variant
and the median step with an empty callback.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from ltui.training.rank.entry import rebuild
from ltui.training.rank.environment import RankEnvironment

STEPS, ROUNDS, WARM_STEPS = 400, 7, 100
Options = Callable[[Path], dict[str, Any]]


class _Model(pl.LightningModule):
    """Notes when each step begins; logs one metric, as scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.began: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.began.append(time.perf_counter())
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _empty(folder: Path) -> dict[str, Any]:
    return {"callbacks": [pl.Callback()]}


def _ltui(folder: Path) -> dict[str, Any]:
    environment = RankEnvironment(run_dir=folder, run_id="bench", attempt=1)
    return {"callbacks": [rebuild("lightning", environment)]}


def _csv(folder: Path) -> dict[str, Any]:
    return {
        "callbacks": [pl.Callback()],
        "logger": CSVLogger(folder, flush_logs_every_n_steps=100),
        "log_every_n_steps": 1,
    }


def _rich(folder: Path) -> dict[str, Any]:
    return {"callbacks": [RichProgressBar()], "enable_progress_bar": True}


VARIANTS: dict[str, tuple[Options, float | None]] = {
    "telemetry callback, a step beyond an empty callback": (_ltui, 15.0),
    "  CSVLogger, every step, the same": (_csv, None),
    "  RichProgressBar, the same": (_rich, None),
}


def measure() -> list[dict[str, Any]]:
    """Microseconds a step of each variant."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    extra: dict[str, list[float]] = {what: [] for what in VARIANTS}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        _median_step_us(_empty, Path(folder))
        for _ in range(ROUNDS):
            bare = _median_step_us(_empty, Path(folder))
            for what, (options, _) in VARIANTS.items():
                extra[what].append(_median_step_us(options, Path(folder)) - bare)
    return [
        {"what": what, "value": statistics.median(extra[what]), "unit": "us", "bound": bound}
        for what, (_, bound) in VARIANTS.items()
    ]


def _median_step_us(options: Options, folder: Path) -> float:
    model = _Model()
    data = torch.utils.data.DataLoader(torch.randn((STEPS + WARM_STEPS) * 2, 8), batch_size=2)
    chosen = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        **options(folder),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **chosen).fit(model, data)
    began = model.began[WARM_STEPS:]
    return 1e6 * statistics.median(b - a for a, b in itertools.pairwise(began))


if __name__ == "__main__":
    for row in measure():
        print(row)
