"""A small training whose every bit is recorded: python exact_training.py FOLDER DEVICE KIND...

A kind is a precision of Lightning, or ``compiled`` for 32-true with torch.compile. Each writes
``FOLDER/KIND.jsonl``: a line for every step with its loss, and a last one with checksums of the
weights, the optimizer, the loss scaler and the random state of the device. It does not import ltui.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES, EPOCHS = 12, 3
_PACE_S = 0.02
_IS_RESUMED = os.environ.get("LTUI_ATTEMPT", "1") != "1"


class Recorder(pl.Callback):
    """Appends the loss of every step to the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.write(step=trainer.global_step, loss=outputs["loss"].item().hex())

    def write(self, **fields: Any) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(fields) + "\n")


class Module(pl.LightningModule):
    """Convolution, normalisation and dropout, which draws from the device's random state."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        layers: Any = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(16 * 64, 64),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(64, 10),
        )
        self.layers = torch.compile(layers) if compiled else layers

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(_PACE_S)
        loss: torch.Tensor = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * EPOCHS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def checksum(value: Any) -> str:
    """Return a checksum of all tensors and numbers in a nested value."""
    total = hashlib.sha256()
    leaves, structure = torch.utils._pytree.tree_flatten(value)
    total.update(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            total.update(
                leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()[:16]


def train(kind: str, folder: Path, device: str) -> None:
    """Train once and record it."""
    # A new process would have come to another state by itself.
    torch.manual_seed(99 if _IS_RESUMED else 3)
    data = torch.Generator().manual_seed(5)
    images = torch.randn(BATCHES * 16, 3, 8, 8, generator=data)
    labels = torch.randint(10, (BATCHES * 16,), generator=data)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    scaler = None
    plugins: list[Any] = []
    if kind == "16-mixed":
        # Its scale changes every few steps, so a resume without its state shows.
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3)
        plugins = [MixedPrecision("16-mixed", device, scaler)]
    precision: Any = {} if scaler is not None or kind == "compiled" else {"precision": kind}
    recorder = Recorder(folder / f"{kind}.jsonl")
    module = Module(compiled=kind == "compiled")
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        plugins=plugins,
        **precision,
        max_epochs=EPOCHS,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    recorder.write(
        weights=checksum(module.state_dict()),
        optimizer=checksum(trainer.optimizers[0].state_dict()),
        scaler=None if scaler is None else checksum(scaler.state_dict()),
        random=checksum(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()),
    )


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    folder, device, *kinds = sys.argv[1:]
    for kind in kinds:
        train(kind, Path(folder), device)


if __name__ == "__main__":
    main()
