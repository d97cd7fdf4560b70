"""One small training, stopped where a case says, with everything compared that it saw."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from ltui.training.models.sharding import ShardedStrategy
from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.tensor_queue.control_block import Command
from tests.rank.exactness.loaders import BATCH, BATCHES, Rows
from tests.rank.exactness.world import GIVE_UP, HERE
from tests.rank.runs import QUIET, RunFolder
from tests.required import required

EPOCHS = 3

# Where the stop is asked for: (epoch, batch, options of the Trainer), batch < 0 in a validation.
STOPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "first epoch": (0, 1, {}),
    "mid-epoch": (1, 2, {}),
    "epoch end": (1, BATCHES - 1, {}),
    "validation": (1, -1, {}),
    "validation within": (1, -1, {"val_check_interval": 3}),
    "sanity check": (0, -100, {}),
    "accumulation": (1, 2, {"accumulate_grad_batches": 2}),
    "no validation": (1, BATCHES - 1, {"limit_val_batches": 0}),
    "fewer batches": (1, 2, {"limit_train_batches": 3}),
    "counted steps": (1, 2, {"limit_test_batches": 0}),
    "max steps": (1, 2, {"max_steps": EPOCHS * BATCHES}),
    "all epochs": (-1, 0, {}),
    "more steps": (-2, 0, {"max_steps": EPOCHS * BATCHES}),
    "all steps": (-1, 0, {"max_steps": EPOCHS * BATCHES}),
}
# What else a training may be made of; tried with one loader.
PARTS = (
    *("average", "swap", "callbacks", "plateau", "scaler", "manual", "validations", "hooks"),
    "sharded",
)


class Model(pl.LightningModule):
    def __init__(self, run: RunFolder | None, stop: tuple[int, int], part: str = "") -> None:
        super().__init__()
        # Another process would have come to other states, too.
        seed = 3 if run is None or run.attempt == 1 else 99
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.mean = MeanMetric()
        self.automatic_optimization = part != "manual"
        self.run, self.stop, self.part = run, stop, part
        self.order: list[Any] = []
        self.epochs: list[int] = []
        self.losses: list[float] = []
        self.means: list[Any] = []
        self.stopped: int | None = None

    def configure_model(self) -> None:
        if self.part == "sharded":
            mesh = required(self.device_mesh)["data_parallel"]
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=mesh)

    def ask(self, batch: int) -> None:
        if self.run is not None and (self.trainer.current_epoch, batch) == self.stop:
            self.stop = (-9, -9)
            if HERE.rank == 0:
                self.run.request(Command.STOP)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ask(batch_idx)
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.order.append([torch.as_tensor(numbers).flatten().tolist() for numbers, _ in parts])
        self.epochs.append(self.trainer.current_epoch)
        loss: Any = sum(self.layers(rows.float().flatten(1)).pow(2).mean() for _, rows in parts)
        loss = loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        self.losses.append(float(loss))
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss.detach(), on_epoch=True, batch_size=BATCH)
        self.log("most", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        if self.part == "manual":
            optimizer: Any = self.optimizers()
            scheduler: Any = self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        return torch.as_tensor(loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.part == "hooks":
            # An average kept by hand, after the callbacks' hooks.
            with torch.no_grad():
                last: Any = self.layers[2]
                last.bias.mul_(0.9)
            self.log("from a hook", float(batch_idx), on_epoch=True, batch_size=BATCH)

    def on_train_epoch_end(self) -> None:
        kept = {n: float(v) for n, v in self.trainer.callback_metrics.items() if "step" not in n}
        lrs = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.means.append((sorted(kept.items()), lrs))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if HERE.rank:
            time.sleep(0.005)  # so that rank 0 is first at the boundary

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ask(-100 if self.trainer.sanity_checking else -1 - batch_idx - 2 * dataloader_idx)
        loss = self.layers(batch[1]).pow(2).mean() + torch.rand(()) * 0.1
        self.log("val", loss, batch_size=BATCH, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.trainer.limit_test_batches == 0:  # stands for "counted steps"
            # Lightning sets the loaders up for it, before a checkpoint is loaded.
            assert self.trainer.estimated_stepping_batches == EPOCHS * BATCHES
        if self.part == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": "epoch"},
            }
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def seen(self) -> dict[str, Any]:
        weights = [p.detach() for p in self.parameters()]
        weights = [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in weights]
        kept = {"order": self.order, "losses": self.losses, "means": self.means}
        return {**kept, "weights": weights, "callbacks": callbacks_of(self.trainer)}


class SwapAverage(pl.Callback):
    """An average as people write it: validates with it, keeps the trained weights meanwhile."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.trained: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, value in module.state_dict().items():
            kept = self.average.setdefault(name, value.clone())
            if value.is_floating_point():
                kept.mul_(0.9).add_(value, alpha=0.1)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.average:
            self.trained = {k: v.clone() for k, v in module.state_dict().items()}
            module.load_state_dict(self.average)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.trained:
            module.load_state_dict(self.trained)
            self.trained = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": {k: v.clone() for k, v in self.average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def callbacks_of(trainer: Any) -> list[Any]:
    found: list[Any] = []
    for callback in trainer.callbacks:
        if isinstance(callback, EMAWeightAveraging):
            average = callback._average_model
            found += [] if average is None else [p.tolist() for p in average.parameters()]
        elif isinstance(callback, SwapAverage):
            found += [v.tolist() for v in callback.average.values()]
        elif isinstance(callback, EarlyStopping):
            found.append((float(callback.best_score), callback.wait_count))
        elif isinstance(callback, ModelCheckpoint):
            if HERE.rank:
                continue  # of a metric that is not synchronised, Lightning saves rank 0's values
            best = callback.best_model_score
            names = {Path(path).name: float(v) for path, v in callback.best_k_models.items()}
            found.append((None if best is None else float(best), sorted(names.items())))
    return found


def options_of(part: str, run: RunFolder) -> dict[str, Any]:
    """What a part adds to the Trainer."""
    if part == "average":
        return {"callbacks": [EMAWeightAveraging(decay=0.9)]}
    if part == "swap":
        return {"callbacks": [SwapAverage()]}
    if part == "callbacks":
        best = ModelCheckpoint(run.path / "best", "{step}", monitor="val", save_top_k=2)
        often = ModelCheckpoint(
            run.path / "often", "{step}", monitor="loss", save_top_k=-1, every_n_train_steps=1
        )
        return {
            "callbacks": [EarlyStopping("val", patience=50, strict=False), best, often],
            "enable_checkpointing": True,
        }
    if part == "scaler":
        # Lightning makes no scaler on a CPU by itself; torch has one.
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if part == "sharded":
        return {"strategy": ShardedStrategy()}
    if part == "plateau":
        return {"check_val_every_n_epoch": 1}
    return {}


def train(  # noqa: PLR0913  (the parts of an experiment)
    run: RunFolder,
    loader: Any,
    stop: tuple[int, int],
    options: dict[str, Any],
    *,
    part: str = "",
    shares: bool = True,
    watched: bool = True,
    more: Sequence[pl.Callback] = (),
    ckpt_path: Path | None = None,
    keep: Path | None = None,
    **extra: str,
) -> Model:
    """``shares``: Lightning's sampler shares the data among ranks. ``watched``: with ltui's
    callback. ``keep``: where to write what was seen, however the training ends."""
    model = Model(run, stop, part)
    added = options_of(part, run)
    callbacks = [*added.pop("callbacks", []), *more]
    if watched:
        callbacks = [*callbacks, run.callback(**extra)]
    trainer = pl.Trainer(
        **{
            **QUIET,
            "devices": HERE.ranks // HERE.nodes,
            "num_nodes": HERE.nodes,
            "strategy": DDPStrategy(timeout=GIVE_UP) if HERE.ranks > 1 else "auto",
            "max_epochs": EPOCHS,
            "num_sanity_val_steps": 2,
            "default_root_dir": run.path,
            "use_distributed_sampler": shares,
            **options,
            **added,
            "callbacks": callbacks,
        }
    )
    validation: Any = DataLoader(Rows(), BATCH)
    if part == "validations":
        validation = [validation, DataLoader(Rows(), BATCH, shuffle=True)]
    trusted: dict[str, Any] = {} if ckpt_path is None else {"weights_only": False}
    try:
        trainer.fit(model, loader, validation, ckpt_path=ckpt_path, **trusted)
    except RunStopped:
        model.stopped = trainer.global_step
    finally:
        if keep is not None:
            seen = {"losses": model.losses, "order": model.order, "epochs": model.epochs}
            keep.write_text(json.dumps(seen))
    return model
