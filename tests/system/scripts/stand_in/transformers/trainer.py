"""The stand-in's ``Trainer``: its loop, its checkpoints, and the order of its private methods."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS_PER_EPOCH = 10


class Trainer:
    """Trains a linear model for ``epochs`` epochs."""

    def __init__(self, epochs: int, step_s: float, batches: int = 1) -> None:
        self.args = SimpleNamespace(output_dir="out", save_only_model=True, push_to_hub=True)
        self.state = SimpleNamespace(
            global_step=0, epoch=0.0, max_steps=epochs * STEPS_PER_EPOCH, num_train_epochs=epochs
        )
        self.model = torch.nn.Linear(4, 1)
        for parameter in self.model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.epochs, self.step_s, self.batches = epochs, step_s, batches
        self.calls: list[str] = []

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None) -> None:
        model = DistributedDataParallel(self.model)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            self.state.global_step = json.loads((folder / "trainer_state.json").read_text())["step"]
            saved = torch.load(folder / "model.pt", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        for epoch in range(self.state.global_step // STEPS_PER_EPOCH, self.epochs):
            for step in range(self.state.global_step % STEPS_PER_EPOCH, STEPS_PER_EPOCH):
                generator = torch.Generator().manual_seed(epoch * STEPS_PER_EPOCH + step)
                for _ in range(self.batches):
                    loss = model(torch.randn(4, 4, generator=generator)).pow(2).mean()
                    loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.state.global_step += 1
                self.state.epoch = epoch + (step + 1) / STEPS_PER_EPOCH
                time.sleep(self.step_s)
                self.log({"loss": loss.item()})
                self._maybe_log_save_evaluate("step")
            self.note(f"epoch {epoch + 1} ended")
            self._maybe_log_save_evaluate("epoch")

    def log(self, logs: dict[str, float]) -> None:
        """Log values."""

    def _maybe_log_save_evaluate(self, place: str) -> None:
        self.note(f"{place} {self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert not self.args.save_only_model
        assert not self.args.push_to_hub
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if dist.get_rank() == 0:
            folder.mkdir()
            state = {"model": model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / "model.pt")
            (folder / "trainer_state.json").write_text(json.dumps({"step": self.state.global_step}))
        dist.barrier()  # every rank must be here

    def note(self, what: str) -> None:
        with Path(f"calls-{dist.get_rank()}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")
