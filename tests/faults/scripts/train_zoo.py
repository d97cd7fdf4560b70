"""A small DDP training into which one fault is injected: an ordinary Lightning script otherwise.

It does not import ltui. ``zoo_engine.py``, torchrun or a preset run it.
Twenty-millisecond steps, batches of eight, two linear layers.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    import hollow

    hollow.hide()

import injections
import lightning.pytorch as L
import torch
from injections import FAULTS, FOLDER, STEP, mark, rank_here, wants
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH = 8
PACE_S = float(os.environ.get("ZOO_PACE_S", "0.02"))
WORKER_FAULTS = frozenset({"shm_full"})


def _with_workers() -> bool:
    """Return True if this rank loads its data in a worker process."""
    if "worker_stop2" in FAULTS and rank_here() != 2:
        return False  # the other rank's fault is to be in the rank itself
    return "workers" in FAULTS or any(
        name.startswith("worker_") or name in WORKER_FAULTS for name in FAULTS
    )


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """``batches`` batches for each rank; sample ``i`` belongs to rank ``i % world``."""

    def __init__(self, batches: int, *, validation: bool = False) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.batches = batches
        self.validation = validation
        self.width = 4096 if "shm_full" in FAULTS else 16

    def __len__(self) -> int:
        return self.batches * BATCH * self.world

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, place = divmod(index // self.world, BATCH)
        strikes = self.validation == ("val_sleep" in FAULTS) and place == 0
        # A worker that stops takes along the batch before: it stops one later.
        early = 1 if wants("worker_stop2", 2) else 0
        if strikes and batch == (2 if self.validation else STEP + early):
            injections.stuck_sample(batch)
        if batch >= STEP and not self.validation:
            self._dawdle(place)
        return torch.full((self.width,), float(index % 7)), torch.ones(1)

    def _dawdle(self, place: int) -> None:
        if wants("data_slow"):
            mark()
            time.sleep(0.06)  # fault: data_slow
        if "all_slow" in FAULTS or wants("data_crawl"):
            mark()
            time.sleep(0.6)  # fault: all_slow
        if "jitter" in FAULTS and place == 0:
            time.sleep(random.random() * 0.96)


class Share(Sampler[int]):
    """This rank's samples, in order; ``batches`` may differ between ranks."""

    def __init__(self, batches: int, *, validation: bool = False) -> None:
        self.world, self.rank = int(os.environ.get("WORLD_SIZE", "1")), rank_here()
        self.batches = batches
        self.validation = validation

    def __iter__(self) -> Iterator[int]:
        for place in range(self.batches * BATCH):
            if place == self.batches * BATCH - 1 and self.short():
                mark()
            yield place * self.world + self.rank

    def short(self) -> bool:
        """Return True if the loader of this rank ends early."""
        uneven = {"uneven", "uneven_ckpt", "uneven_drift"}
        return rank_here() == 1 and bool(
            FAULTS & (uneven if not self.validation else {"val_uneven"})
        )

    def __len__(self) -> int:
        return self.batches * BATCH


class Data(L.LightningDataModule):
    """The loaders; how many batches there are depends on the fault."""

    def __init__(self, batches: int = 0, val_batches: int = 0) -> None:
        super().__init__()
        self.batches = batches or int(os.environ.get("ZOO_BATCHES", "3000"))
        self.val_batches = val_batches or int(os.environ.get("ZOO_VAL_BATCHES", "0"))

    def prepare_data(self) -> None:
        injections.in_prepare_data()

    def setup(self, stage: str) -> None:
        injections.in_setup()

    def train_dataloader(self) -> Any:
        batches = self.batches
        if FAULTS & {"uneven", "uneven_ckpt", "uneven_drift"}:
            batches = 10 if rank_here() == 1 else 12
        return self._loader(Samples(self.batches), Share(batches))

    def val_dataloader(self) -> Any:
        batches = self.val_batches
        if "val_uneven" in FAULTS:
            batches = 5 if rank_here() == 1 else 8
        if not batches:
            return []
        return self._loader(Samples(batches, validation=True), Share(batches, validation=True))

    def _loader(self, samples: Samples, share: Share) -> Any:
        workers = 1 if _with_workers() and not samples.validation else 0
        method = next(iter(FAULTS & {"spawn", "forkserver"}), None)
        loader: DataLoader[Any] = DataLoader(
            samples, batch_size=BATCH, sampler=share, num_workers=workers,
            multiprocessing_context=method if workers else None,
        )  # fmt: skip
        return Swallowing(loader) if "swallowed" in FAULTS else loader


class Swallowing:
    """A loader as careless programs write one: an error ends the epoch without a word."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        with contextlib.suppress(ValueError):
            for number, batch in enumerate(self.loader):
                if number == STEP and wants("swallowed"):
                    mark()
                    raise ValueError("a sample that can't be read")
                yield batch


class Module(L.LightningModule):
    """Two layers and a spare one, so that a rank can leave a parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        width = 4096 if "shm_full" in FAULTS else 16
        self.first = nn.Linear(width, 32)
        self.second = nn.Linear(32, 1)
        self.spare = nn.Linear(32, 1)
        self.saves = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        injections.in_step(self, batch_idx)
        self._compute(batch_idx)
        hidden = torch.relu(self.first(batch[0]))
        predicted = self.second(hidden)
        if wants("unused_params") and batch_idx == STEP:
            mark()
        else:
            predicted = predicted + self.spare(hidden)
        loss = nn.functional.mse_loss(predicted, batch[1])
        if wants("nan") and batch_idx >= STEP:
            mark()
            loss = loss * float("nan")
        self.log("loss", loss)
        if wants("log_rank0", 0) and batch_idx == STEP:
            mark()
            self.log("only_here", loss, sync_dist=True)  # fault: log_rank0
        if wants("exc_swallow") and batch_idx == STEP:
            mark()
            return None
        return loss

    def _compute(self, batch_idx: int) -> None:
        if "contended" in FAULTS:
            until = time.process_time() + 0.05
            while time.process_time() < until:
                torch.ones(64, 64) @ torch.ones(64, 64)
            return
        first_s = float(os.environ.get("ZOO_FIRST_STEP_S", "0"))
        time.sleep(first_s if first_s and self.global_step == 0 else PACE_S)
        if "pauses" in FAULTS and batch_idx % 50 == 49:
            time.sleep(2.2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(float(os.environ.get("ZOO_VAL_PACE_S", "0.02")))
        loss = self.second(torch.relu(self.first(batch[0]))).mean()
        self.log("val_loss", loss, on_step="val_uneven" in FAULTS, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        injections.after_validation()
        time.sleep(float(os.environ.get("ZOO_VAL_END_S", "0")))

    def on_train_epoch_end(self) -> None:
        injections.after_epoch()
        time.sleep(float(os.environ.get("ZOO_EPOCH_END_S", "0")))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        injections.after_batch(batch_idx)
        every = int(os.environ.get("ZOO_SAVE_EVERY", "0"))
        if every and batch_idx % every == every - 1:
            self.trainer.save_checkpoint(FOLDER / "zoo.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        injections.in_checkpoint(self.saves)
        self.saves += 1
        slow_s = float(os.environ.get("ZOO_SAVE_S", "0"))
        if slow_s and rank_here() == 0:
            injections.write_for(slow_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def train() -> None:
    """One rank's training, from the variables that torchrun sets."""
    torch.set_num_threads(1)
    if wants("no_rendezvous"):
        mark()
        time.sleep(3600)  # fault: no_rendezvous
    L.seed_everything(1, verbose=False)
    world = int(os.environ["WORLD_SIZE"])
    saver = ModelCheckpoint(dirpath=FOLDER / "saved", every_n_epochs=1)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=local_world,
        num_nodes=world // local_world,
        strategy=DDPStrategy(process_group_backend="gloo") if world > 1 else "auto",
        max_epochs=int(os.environ.get("ZOO_EPOCHS", "1")),
        check_val_every_n_epoch=int(os.environ.get("ZOO_VAL_EVERY", "1")),
        val_check_interval=int(os.environ["ZOO_VAL_AT"]) if "ZOO_VAL_AT" in os.environ else None,
        accumulate_grad_batches=int(os.environ.get("ZOO_ACCUMULATE", "1")),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing="uneven_ckpt" in FAULTS,
        callbacks=[saver] if "uneven_ckpt" in FAULTS else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(FOLDER),
    )
    trainer.fit(Module(), datamodule=Data())
    injections.after_training()


if __name__ == "__main__":
    train()
