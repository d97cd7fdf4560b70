"""One training, the same for every tool: writes what its steps cost in processor time to a file.

Usage: ``training.py TOOL RESULT [STEPS]``. ``TOOL`` names the logger or callback of Lightning;
tools that instrument from outside (``ltui exec``, ``traceml run``) start it with ``bare``.

The result is JSON: ``thread_us``, the median processor time of the training thread from one step's
forward to the next, and ``process_us``, the processor time of all threads of the process, divided
by the number of steps. Waiting for a processor adds to neither.

With ``LTUI_BENCH_TURNS=OWN:OTHER``, two FIFOs, it takes turns with another training of ``BLOCK``
steps each, so that both meet the same machine. ``blocks_us`` has the fastest step of each block,
which other programs disturbed least.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

WARM_UP_STEPS = 300
BLOCK, SKIPPED = 50, 8
"""Steps of one turn, and how many of its first are not measured: caches are cold after a wait."""


class Turns:
    """The turns of this training and another, given by a byte in the FIFO of whose turn it is."""

    def __init__(self, paths: str) -> None:
        # Opened for both directions: neither opening nor writing waits for the other training.
        self.own, self.other = (os.open(path, os.O_RDWR) for path in paths.split(":"))

    def wait(self) -> None:
        os.read(self.own, 1)

    def give(self, turns: int = 1) -> None:
        os.write(self.other, b"." * turns)


class Model(pl.LightningModule):
    """A small network whose step takes about half a millisecond, so that an instrument shows."""

    def __init__(self, tool: str) -> None:
        super().__init__()
        self.tool = tool
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        self.marks_ns: list[int] = []
        self.process_ns: list[int] = []
        paths = os.environ.get("LTUI_BENCH_TURNS")
        self.turns = Turns(paths) if paths else None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.turns and batch_idx % BLOCK == 0:
            if batch_idx:
                self.turns.give()
            self.turns.wait()
        self.marks_ns.append(time.thread_time_ns())
        if len(self.marks_ns) in (WARM_UP_STEPS, self.trainer.max_steps):
            self.process_ns.append(time.process_time_ns())
        loss: torch.Tensor = self.layers(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def instruments(tool: str, folder: str) -> tuple[Any, list[pl.Callback]]:
    """Lightning's ``logger`` and ``callbacks`` for ``tool``."""
    if tool == "bare":
        return False, []
    if tool == "rich":
        console = {"file": io.StringIO(), "force_terminal": True}
        return False, [pl.callbacks.RichProgressBar(console_kwargs=console)]
    if tool == "csv":
        return pl.loggers.CSVLogger(folder), []
    if tool == "tensorboard":
        return pl.loggers.TensorBoardLogger(folder), []
    if tool == "wandb":
        return pl.loggers.WandbLogger(save_dir=folder, offline=True, project="bench"), []
    if tool == "trackio":
        return trackio_logger(folder), []
    raise SystemExit(f"unknown tool {tool}")


def trackio_logger(folder: str) -> Any:
    """A minimal logger that calls ``trackio.log``, because trackio ships none for Lightning."""
    import trackio
    from lightning.pytorch.loggers.logger import Logger

    class TrackioLogger(Logger):
        def __init__(self) -> None:
            super().__init__()
            trackio.init(project="bench", name=f"run-{os.getpid()}")

        name = property(lambda self: "trackio")
        version = property(lambda self: "0")

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            trackio.log(metrics, step=step)

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def finalize(self, status: str) -> None:
            trackio.finish()

    return TrackioLogger()


def main(tool: str, result: Path, steps: int) -> None:
    """Train ``steps`` steps with ``tool`` and write the result."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = Model(tool)
    with tempfile.TemporaryDirectory() as folder:
        logger, callbacks = instruments(tool, folder)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=logger,
            callbacks=callbacks,
            log_every_n_steps=1,
            enable_progress_bar=tool == "rich",
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        rows: Any = torch.randn(steps * 8, 64)
        try:
            trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8))
        finally:
            if model.turns:  # However it ended, the other training must not wait.
                model.turns.give(steps // BLOCK + 1)
    costs = [b - a for a, b in itertools.pairwise(model.marks_ns)][WARM_UP_STEPS:]
    starts = range(0, len(costs) - BLOCK, BLOCK)
    blocks = [costs[start + SKIPPED : start + BLOCK - 1] for start in starts]
    first, last = model.process_ns
    result.write_text(
        json.dumps(
            {
                "thread_us": statistics.median(costs) / 1e3,
                "blocks_us": [min(block) / 1e3 for block in blocks],
                "process_us": (last - first) / (steps - WARM_UP_STEPS) / 1e3,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 3000)
