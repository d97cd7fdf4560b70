"""Stop and resume in every way, in one process or as the ranks of one launch.

Arguments: a folder to work in, then cases as ``loader:workers:stop``, ``*`` standing for all. Rank
0 writes ``table.json``: for each case the step at which it stopped and what differs from the
training that was never stopped, on any rank: ``order`` of sample numbers, ``losses``, ``weights``;
also the notes about what is not exact.
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from ltui.training.data.beton import beton_batches, has_ffcv, write_beton
from ltui.training.data.order import RankLoader, RankOrder, torch_batches
from ltui.training.queue.control import Command
from ltui.training.rank.entry import rebuild
from ltui.training.rank.environment import RankEnvironment
from ltui.training.rank.stopped import RunStopped

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.rank.runs import RunFolder

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCHES, BATCH, EPOCHS = 5, 4, 3
SAMPLES = BATCHES * BATCH * RANKS


class Rows(Dataset):
    """(number, row); in the rank's own process a little noise on top."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        row = self.rows[number]
        if torch.utils.data.get_worker_info() is None:
            row = row + 0.1 * torch.rand(8) + 0.1 * np.random.rand() + 0.1 * random.random()
        return number, row.float()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return ((n, row) for n, row in enumerate(Rows().rows))


def plain(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def persistent(workers: int, folder: Path) -> Any:
    keep = workers > 0
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, persistent_workers=keep)


def generator(workers: int, folder: Path) -> Any:
    own = torch.Generator().manual_seed(5)
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, generator=own)


def weighted(workers: int, folder: Path) -> Any:
    sampler = WeightedRandomSampler(torch.arange(1, SAMPLES + 1).double(), SAMPLES)
    return DataLoader(Rows(), BATCH, sampler=sampler, num_workers=workers)


def two(workers: int, folder: Path) -> Any:
    """Two loaders, of which the shorter begins again within an epoch."""
    shorter = torch.utils.data.Subset(Rows(), range(0, SAMPLES, 2))
    other = DataLoader(shorter, BATCH, shuffle=True, num_workers=workers)
    return {"one": plain(workers, folder), "other": other}


def own(workers: int, folder: Path) -> Any:
    order = RankOrder(SAMPLES, rank=RANK, world_size=RANKS, shuffle=True)
    return RankLoader(order, BATCH, torch_batches(Rows(), BATCH, workers))


def ffcv(workers: int, folder: Path) -> Any:
    order = RankOrder(SAMPLES, rank=RANK, world_size=RANKS, shuffle=True)
    opened = beton_batches(folder / "rows.beton", BATCH, torch.device("cpu"))
    # The image's pixels hold the number, too.
    turned = lambda order: ((label.clone(), image.clone()) for image, label in opened(order))  # noqa: E731
    return RankLoader(order, BATCH, turned)


def stateful(workers: int, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Rows(), num_replicas=RANKS, rank=RANK, seed=7)
    return StatefulDataLoader(Rows(), batch_size=BATCH, sampler=sampler, num_workers=workers)


class Moody(torch.utils.data.Sampler):
    """Counts its epochs by itself, which a new process can't know of."""

    epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        self.epoch += 1
        drawn = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(SAMPLES, generator=drawn).tolist())


def moody(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, sampler=Moody(), num_workers=workers)


def stream(workers: int, folder: Path) -> Any:
    return DataLoader(Stream(), BATCH, num_workers=workers)


LOADERS = {
    f.__name__: f
    for f in (plain, persistent, generator, weighted, two, own, ffcv, stateful, moody, stream)
}

# Where the stop is asked for: (epoch, batch, options of the Trainer), batch < 0 in a validation.
STOPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "first epoch": (0, 1, {}),
    "mid-epoch": (1, 2, {}),
    "epoch end": (1, BATCHES - 1, {}),
    "validation": (1, -1, {}),
    "validation within": (1, -1, {"val_check_interval": 3}),
    "accumulation": (1, 2, {"accumulate_grad_batches": 2}),
    "no validation": (1, BATCHES - 1, {"limit_val_batches": 0}),
    "counted steps": (1, 2, {"limit_test_batches": 0}),
    "max steps": (1, 2, {"max_steps": EPOCHS * BATCHES}),
    "all epochs": (-1, 0, {}),
}


class Model(pl.LightningModule):
    def __init__(self, run: RunFolder | None, stop: tuple[int, int]) -> None:
        super().__init__()
        # Another process would have come to other states, too.
        seed = 3 if run is None or run.attempt == 1 else 99
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.run, self.stop = run, stop
        self.order: list[Any] = []
        self.losses: list[float] = []

    def ask(self, batch: int) -> None:
        if RANK == 0 and self.run is not None and (self.trainer.current_epoch, batch) == self.stop:
            self.run.ask(Command.STOP)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ask(batch_idx)
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.order.append([torch.as_tensor(numbers).flatten().tolist() for numbers, _ in parts])
        loss = sum(self.layers(rows.float().flatten(1)).pow(2).mean() for _, rows in parts)
        loss = loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        self.losses.append(float(loss))
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if RANK:
            time.sleep(0.02)  # so that rank 0 is first at the boundary

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ask(-1 - batch_idx)
        torch.rand(3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.trainer.limit_test_batches == 0:  # stands for "counted steps"
            # Lightning sets the loaders up for it, before a checkpoint is loaded.
            assert self.trainer.estimated_stepping_batches == EPOCHS * BATCHES
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def seen(self) -> dict[str, Any]:
        weights = [p.detach().clone() for p in self.parameters()]
        return {"order": self.order, "losses": self.losses, "weights": weights}


def train(run: RunFolder, loader: Any, stop: tuple[int, int], options: Any, **extra: str) -> Model:
    environment = RankEnvironment.read(run.environment(**extra))
    model = Model(run, stop)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": RANKS,
            "strategy": "ddp" if RANKS > 1 else "auto",
            "max_epochs": EPOCHS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 2,
            "default_root_dir": run.path,
            "callbacks": [rebuild("lightning", environment)],
            "use_distributed_sampler": not callable(getattr(loader, "state_dict", None)),
            **options,
        }
    )
    validation = DataLoader(Rows(), BATCH)
    try:
        trainer.fit(model, loader, validation)
    except RunStopped:
        model.stopped = trainer.global_step
    return model


def new_run(folder: Path, name: str) -> RunFolder:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    return RunFolder(path)


def try_case(folder: Path, loader: str, workers: int, stop: str, known: dict[Any, Any]) -> Any:
    epoch, batch, options = STOPS[stop]
    key = (loader, workers, str(options))
    if key not in known:
        run = new_run(folder, "-".join(("never", loader, str(workers), str(len(known)))))
        known[key] = train(run, LOADERS[loader](workers, folder), (-1, 0), options).seen()
    run = new_run(folder, f"{loader}-{workers}-{stop.replace(' ', '-')}")
    at_first = options
    if stop == "all epochs":
        at_first = {**options, "max_epochs": EPOCHS - 1}
    first = train(
        run,
        LOADERS[loader](workers, folder),
        (epoch, batch),
        at_first,
        **({"LTUI_CHECKPOINT_EVERY_S": "600"} if stop == "all epochs" else {}),
    )
    (path,) = run.checkpoints
    run.attempt = 2
    second = train(
        run, LOADERS[loader](workers, folder), (-1, 0), options, LTUI_RESUME_FROM=str(path)
    )
    reference, one, other = known[key], first.seen(), second.seen()
    differs = [n for n in ("order", "losses") if one[n] + other[n] != reference[n]]
    same = all(
        torch.equal(a, b) for a, b in zip(other["weights"], reference["weights"], strict=True)
    )
    differs += [] if same else ["weights"]
    everywhere = [differs]
    if RANKS > 1:
        everywhere = [None] * RANKS
        torch.distributed.all_gather_object(everywhere, differs)
    return {
        "loader": loader,
        "workers": workers,
        "ranks": RANKS,
        "stop": stop,
        "checkpoint": path.name,
        "steps": len(reference["losses"]),
        "differs": sorted({name for each in everywhere for name in each}),
        "notes": [e["text"] for e in run.events("note")],
    }


def main(folder: Path, wanted: list[str]) -> None:
    warnings.filterwarnings("ignore")
    known: dict[Any, Any] = {}
    table = []
    if has_ffcv() and any(w.startswith("ffcv") for w in wanted) and RANK == 0:
        rows = torch.arange(SAMPLES).reshape(-1, 1, 1, 1).repeat(1, 1, 2, 4).to(torch.uint8)
        write_beton(folder / "rows.beton", rows, torch.arange(SAMPLES))
    for loader in LOADERS:
        for workers in (0, 2):
            for stop in STOPS:
                name = f"{loader}:{workers}:{stop}"
                if any(fnmatch.fnmatch(name, pattern) for pattern in wanted):
                    table.append(try_case(folder, loader, workers, stop, known))
                    if RANK == 0:
                        (folder / "table.json").write_text(json.dumps(table, indent=1))
    if RANKS > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
