"""An ordinary Lightning script that torchrun starts, and one fault in its last rank.

``FAULT`` names the fault and ``FAULT_FOLDER`` the folder that gets the file ``injected`` with
the monotonic time of it. ``FAULT_DEVICES`` holds the device of each rank; ranks may share one.
``FAULT_BACKEND`` is that of torch.distributed. It does not import ltui.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEP = 30
"""The fault is in the batch with this index."""
PACE_S = 0.02
_SPIN_CYCLES = 80_000_000_000
"""Between 40 and 60 seconds on GPUs with 1.3 to 2 GHz."""
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _run_out_of_memory(device: torch.device) -> None:
    if device.type == "cpu":
        torch.empty(1 << 50, dtype=torch.uint8)  # fault: out_of_memory on the CPU
        return
    held, size = [], torch.cuda.get_device_properties(device).total_memory // 8
    while True:
        held.append(torch.empty(size, dtype=torch.uint8, device=device))  # fault: out_of_memory


def _start_kernel(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(_SPIN_CYCLES)


def _wait_for_kernel(device: torch.device) -> None:
    _start_kernel(device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # fault: hung_kernel
    else:
        time.sleep(3600)  # fault: hung_kernel on the CPU


def _call_alone(_device: torch.device) -> None:
    dist.barrier()  # fault: left_out


FAULTS: dict[str, tuple[int, Any]] = {
    "out_of_memory": (WORLD_SIZE - 1, _run_out_of_memory),
    "hung_kernel": (WORLD_SIZE - 1, _wait_for_kernel),
    "hung_kernel_later": (WORLD_SIZE - 1, _start_kernel),
    "stopped": (WORLD_SIZE - 1, lambda _: os.kill(os.getpid(), signal.SIGSTOP)),
    "killed": (WORLD_SIZE - 1, lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "left_out": (0, _call_alone),
}
"""name -> the rank at fault, and what it does."""


class Module(pl.LightningModule):
    """A few layers with a loss that is read in every step, as many scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        self.sum_of_losses = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank, strike = FAULTS[os.environ["FAULT"]]
        if batch_idx == STEP and rank == RANK:
            (Path(os.environ["FAULT_FOLDER"]) / "injected").write_text(f"{time.monotonic()}\n")
            strike(self.device)
        time.sleep(PACE_S)
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sum_of_losses += outputs["loss"].item()  # fault: hung_kernel_later

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def main() -> None:
    devices = [torch.device(name) for name in os.environ["FAULT_DEVICES"].split(",")]
    trainer = pl.Trainer(
        strategy=DDPStrategy(
            parallel_devices=devices, process_group_backend=os.environ["FAULT_BACKEND"]
        ),
        devices=1,  # Lightning accepts a GPU once; those of the strategy are the ones that count.
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.randn(8 * 5000, 64))
    trainer.fit(Module(), DataLoader(rows, batch_size=8))


if __name__ == "__main__":
    main()
