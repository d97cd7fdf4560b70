"""Training data in every way that a script may hand it to Lightning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from ltui.training.data.sample_order import RankLoader, RankOrder, torch_batches
from tests.rank.exactness.world import HERE

BATCHES, BATCH = 5, 4


def samples() -> int:
    return BATCHES * BATCH * HERE.ranks if HERE.samples is None else HERE.samples


class Rows(Dataset):
    """(number, row); in the rank's own process a little noise on top."""

    def __init__(self, count: int | None = None) -> None:
        count = samples() if count is None else count
        self.rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        row = self.rows[number]
        if get_worker_info() is None:
            row = row + 0.1 * torch.rand(8) + 0.1 * np.random.rand() + 0.1 * random.random()
        return number, row.float()


def _rows(numbers: Any) -> Any:
    rows = Rows().rows
    return ((number, rows[number]) for number in numbers)


class Stream(IterableDataset):
    """This rank's share, split among its workers; in another order in every epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        order = torch.randperm(samples(), generator=torch.Generator().manual_seed(3)).tolist()
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        return _rows(order[HERE.rank :: HERE.ranks][worker::workers])


class Lucky(Stream):
    """Draws its order from the worker's random states, or from the rank's own without workers."""

    def __iter__(self) -> Any:
        order = list(range(HERE.rank, samples(), HERE.ranks))
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        left = order[worker::workers]
        while left:
            number = left.pop(int(torch.randint(len(left), ()).item()))
            yield number, Rows().rows[number]


class Stateful(Stream):
    """Keeps its place in the stream, as ``StatefulDataLoader`` asks of a dataset."""

    def __init__(self) -> None:
        self.at = self.resume = 0

    def __iter__(self) -> Any:
        self.at, self.resume = self.resume, 0
        for number, row in list(super().__iter__())[self.at :]:
            self.at += 1
            yield number, row

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume = state["at"]


class Counting(torch.utils.data.Sampler):
    """Counts its epochs by itself."""

    epoch = 0

    def __len__(self) -> int:
        return samples()

    def __iter__(self) -> Any:
        self.epoch += 1
        drawn = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(samples(), generator=drawn).tolist())


class Moody(Counting):
    """Counts them where nobody else looks, so that a new process can't know."""

    def __init__(self) -> None:
        self.epochs = iter(range(1, 1000))

    def __iter__(self) -> Any:
        drawn = torch.Generator().manual_seed(next(self.epochs))
        return iter(torch.randperm(samples(), generator=drawn).tolist())


class Simple:
    """A loader of a user's own: no sampler, no position, no length."""

    def __iter__(self) -> Any:
        for number, (numbers, rows) in enumerate(DataLoader(Stream(), BATCH)):
            if number < BATCHES:
                yield numbers, rows


def plain(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)


def in_order(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, num_workers=workers)


def persistent(workers: int, folder: Path) -> Any:
    keep = workers > 0
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, persistent_workers=keep)


def spawned(workers: int, folder: Path) -> Any:
    return _started(workers, "spawn")


def served(workers: int, folder: Path) -> Any:
    """Workers that a server process forks."""
    return _started(workers, "forkserver")


def _started(workers: int, method: str) -> Any:
    # Kept between the epochs, because each such worker imports torch again.
    if workers == 0:
        return plain(0, Path())
    return DataLoader(
        Rows(),
        BATCH,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=True,
    )


def generator(workers: int, folder: Path) -> Any:
    own = torch.Generator().manual_seed(5)
    return DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, generator=own)


def weighted(workers: int, folder: Path) -> Any:
    sampler = WeightedRandomSampler(torch.arange(1, samples() + 1).double().tolist(), samples())
    return DataLoader(Rows(), BATCH, sampler=sampler, num_workers=workers)


def batched(workers: int, folder: Path) -> Any:
    """A batch sampler."""
    sampler = BatchSampler(RandomSampler(Rows()), BATCH, drop_last=True)
    return DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)


def two(workers: int, folder: Path) -> Any:
    """Two loaders, of which the shorter begins again within an epoch."""
    shorter = torch.utils.data.Subset(Rows(), range(0, samples(), 2))
    other = DataLoader(shorter, BATCH, shuffle=True, num_workers=workers)
    return {"one": plain(workers, folder), "other": other}


def shortest(workers: int, folder: Path) -> Any:
    """Two loaders in a CombinedLoader that ends with the shorter."""
    from lightning.pytorch.utilities import CombinedLoader

    longer = DataLoader(Rows(samples() * 2), BATCH, shuffle=True, num_workers=workers)
    loaders = {"one": plain(workers, folder), "other": longer}
    return CombinedLoader(loaders, "min_size")


def own(workers: int, folder: Path) -> Any:
    order = RankOrder(samples(), rank=HERE.rank, world_size=HERE.ranks, shuffle=True)
    return RankLoader(order, BATCH, torch_batches(Rows(), BATCH, workers))


def stateful(workers: int, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Rows(), num_replicas=HERE.ranks, rank=HERE.rank, seed=7)
    return StatefulDataLoader(Rows(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def stateful_shuffled(workers: int, folder: Path) -> Any:
    """Lightning puts a sampler of its own around torchdata's, where there are several ranks."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=workers)


def stateful_weighted(workers: int, folder: Path) -> Any:
    """A sampler that draws from the rank's own random states."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = WeightedRandomSampler(torch.arange(1, samples() + 1).double().tolist(), samples())
    return StatefulDataLoader(Rows(), batch_size=BATCH, sampler=sampler, num_workers=workers)


def stateful_stream(workers: int, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stateful(), batch_size=BATCH, num_workers=workers)


def counting(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, sampler=Counting(), num_workers=workers)


def moody(workers: int, folder: Path) -> Any:
    return DataLoader(Rows(), BATCH, sampler=Moody(), num_workers=workers)


def stream(workers: int, folder: Path) -> Any:
    return DataLoader(Stream(), BATCH, num_workers=workers)


def lucky(workers: int, folder: Path) -> Any:
    return DataLoader(Lucky(), BATCH, num_workers=workers)


def simple(workers: int, folder: Path) -> Any:
    return Simple()


LOADERS = (
    *(plain, in_order, persistent, spawned, served, generator, weighted, batched, counting),
    *(two, shortest, own),
    *(stateful, stateful_shuffled, stateful_weighted, stateful_stream),
    *(stream, lucky, simple, moody),
)
