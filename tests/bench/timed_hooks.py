"""A training by DDP on CPU that measures the processor time of ltui's callbacks in each step.

    torchrun --nproc-per-node N timed_hooks.py FOLDER

Each rank writes the nanoseconds of its steps, one a line, into a file in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

STEPS = 2000
BEFORE = 100
"""Steps that are not measured."""


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StepTimes(pl.Callback):
    """Collects the time of all hooks of a step when it ends."""

    def __init__(self) -> None:
        self.hooks_ns = 0
        self.steps_ns: list[int] = []

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time_ns()
            result = hook(*arguments, **options)
            self.hooks_ns += time.thread_time_ns() - began
            return result

        return call

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps_ns.append(self.hooks_ns)
        self.hooks_ns = 0
        # Not earlier: the callback chooses some of its hooks when the training starts.
        if trainer.global_step == BEFORE:
            self._watch(trainer)

    def _watch(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if any(base.__module__.startswith("ltui.") for base in type(callback).__mro__):
                for name in dir(pl.Callback):
                    if name.startswith("on_") and callable(hook := getattr(callback, name)):
                        setattr(callback, name, self.timed(hook))


def main(folder: Path) -> None:
    times = StepTimes()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=STEPS,
        callbacks=[times],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rows: Any = torch.randn(2 * STEPS * 2, 8)
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=2))
    text = "\n".join(str(step) for step in times.steps_ns[BEFORE:])
    (folder / f"rank-{trainer.global_rank}").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
