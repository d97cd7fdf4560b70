"""One training that times its own steps; the same script with and without ltui.

python -m tests.gpu.hardware.timed_training PLAN RESULT

``PLAN``: the fields of ``Plan`` as JSON. The batches are made once and stay on the device. When the
measured steps have ended, ``RESULT`` receives the fields of ``Timing`` as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torchvision
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ltui.training.models.gpt import GPT
from tests.gpu.hardware.matmul_rate import time_when_idle

GPT_MODEL, RESNET = "gpt", "resnet50"
PRECISION: Final = "bf16-mixed"
SHAPE = {"width": 768, "layers": 16, "heads": 12, "context": 1024}
"""Arguments of ``GPT`` for 114 million parameters."""
SMALL_SHAPE = {"width": 64, "layers": 2, "heads": 4, "context": 64}
PIXELS, SMALL_PIXELS = 224, 32
"""Width and height of an image."""
BATCH = {GPT_MODEL: 32, RESNET: 256}
"""Samples in a batch if the memory suffices."""
SMALL_BATCH = 4
FIXED_BYTES = {GPT_MODEL: 3.5e9, RESNET: 1.5e9}
"""Generous estimate of the memory for CUDA, the parameters and the state of the optimizer."""
SAMPLE_BYTES = {GPT_MODEL: 0.9e9, RESNET: 0.13e9}
"""Generous estimate of the memory for the activations of one sample."""
CLASSES = 1000
DIFFERENT_BATCHES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is trained, and which steps are measured."""

    model: str
    accelerator: str = "cuda"
    small: bool = False
    """True: a model and batches for a rehearsal on the CPU."""
    batch: int | None = None
    """Samples in a batch; None: as many as fit, at most ``BATCH``."""
    warm_up: int
    """Steps before the measured ones, at least 1."""
    steps: int
    further: int = 0
    """Steps after the measured ones."""

    def command(self, result: Path) -> list[str]:
        """Return the command line that trains by this plan."""
        plan = json.dumps(asdict(self))
        return [sys.executable, "-m", "tests.gpu.hardware.timed_training", plan, str(result)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What the script measured."""

    device: str
    parameters: int
    batch: int
    warm_up: int
    steps: int
    seconds: float
    """Duration of the measured steps. The device was idle at their begin and at their end."""
    peak_bytes: int | None
    """Most memory that torch had allocated; None on the CPU."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s


def read_timing(result: Path) -> Timing | None:
    """Return what the script wrote; None if it did not reach the end of the measured steps."""
    try:
        return Timing(**json.loads(result.read_text()))
    except FileNotFoundError:
        return None


def batch_that_fits(model: str, free_bytes: float) -> int:
    """Return a power of two: at most ``BATCH``, and so many samples as may fit into the memory."""
    batch = BATCH[model]
    while batch > 1 and FIXED_BYTES[model] + batch * SAMPLE_BYTES[model] > free_bytes:
        batch //= 2
    return batch


class _Images(pl.LightningModule):
    """torchvision's ResNet-50, in the memory layout that is fast on tensor cores."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torchvision.models.resnet50()
        self.network.to(memory_format=torch.channels_last)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


class _Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A few random batches on the device, over and over."""

    def __init__(self, plan: Plan, batch: int, device: torch.device) -> None:
        self.steps = plan.warm_up + plan.steps + plan.further
        self.batches = [_random_batch(plan, batch, device) for _ in range(DIFFERENT_BATCHES)]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batches[index % len(self.batches)]


def _random_batch(
    plan: Plan, batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    if plan.model == GPT_MODEL:
        context = gpt_shape(small=plan.small)["context"]
        text = torch.randint(256, (batch, context + 1), device=device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    pixels = SMALL_PIXELS if plan.small else PIXELS
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)
    return images.to(memory_format=torch.channels_last), labels


def gpt_shape(*, small: bool) -> dict[str, Any]:
    """Return the arguments of ``GPT`` that decide about its operations."""
    return SMALL_SHAPE if small else SHAPE


class _Timer(pl.Callback):
    """Write the result when the measured steps have ended.

    The time is from the end of a batch to the end of a later one, as in the rows of ltui's history.
    Between them lie whole steps, with everything that the callbacks do in a step.
    """

    def __init__(self, plan: Plan, result: Path) -> None:
        self.plan, self.result = plan, result
        self.began: float | None = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        ended = batch_idx + 1
        if ended == self.plan.warm_up:
            self.began = time_when_idle(pl_module.device)
        elif ended == self.plan.warm_up + self.plan.steps and self.began is not None:
            seconds = time_when_idle(pl_module.device) - self.began
            text = json.dumps(asdict(self._timing(pl_module, len(batch[0]), seconds)))
            print(text, flush=True)
            self.result.write_text(text)

    def _timing(self, module: pl.LightningModule, batch: int, seconds: float) -> Timing:
        on_gpu = module.device.type == "cuda"
        return Timing(
            device=torch.cuda.get_device_name(module.device) if on_gpu else "CPU",
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            batch=batch,
            warm_up=self.plan.warm_up,
            steps=self.plan.steps,
            seconds=seconds,
            peak_bytes=torch.cuda.max_memory_allocated(module.device) if on_gpu else None,
        )


def main(plan: Plan, result: Path) -> None:
    """Train."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    pl.seed_everything(1)
    if plan.small:
        torch.set_num_threads(1)
    device = torch.device("cuda:0" if plan.accelerator == "cuda" else "cpu")
    batch = plan.batch
    if batch is None:
        on_gpu = device.type == "cuda" and not plan.small
        free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else 0
        batch = batch_that_fits(plan.model, free_bytes) if on_gpu else SMALL_BATCH
    batches = _Batches(plan, batch, device)
    model = GPT(**gpt_shape(small=plan.small)) if plan.model == GPT_MODEL else _Images()
    trainer = pl.Trainer(
        accelerator=plan.accelerator,
        devices=1,
        precision=PRECISION,
        max_epochs=1,
        callbacks=[_Timer(plan, result)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])), Path(sys.argv[2]))
