"""Batches of samples of similar length, the same number and size on every rank, and their padding.

An epoch's order: all samples shuffled by seed and epoch, cut into pools, each pool sorted by
length, the pool's groups (as many samples as all ranks use in one step) shuffled. It is dealt to
the ranks like cards, so at each step all ranks hold samples of about the same length, and what all
have used is the beginning of the order: a resumed epoch shares out the rest, also among another
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ltui.training.data.sample_order import OpenBatches, RankLoader, RankOrder, split_among_ranks

GROUPS_A_POOL = 64
"""More groups pad less and shuffle less."""


class LengthOrder(RankOrder):
    """What ``RankLoader`` draws from, for samples whose lengths are known."""

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.int64],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        filler: int | None = None,
        group: int | None = None,
        seed: int | None = None,
    ) -> None:
        """``group``: samples that stay together; by default what all ranks use in one step.

        ``drop_last``: leave out what does not fill a batch on every rank. Without it the ranks are
        evened out with ``filler``, or where that is None with samples drawn twice. Not shuffled,
        the order is by length alone. ``seed``: by default ``PL_GLOBAL_SEED``, as Lightning sets it.
        """
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"no batches of {batch_size} for rank {rank} of {world_size}")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        super().__init__(
            len(self.lengths), rank=rank, world_size=world_size, shuffle=shuffle, filler=filler
        )
        if seed is not None:
            self.seed = seed
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.group_given = group is not None
        self.group = group or batch_size * world_size
        self._as_of: tuple[int, int] | None = None

    def group_of_epoch(self, epoch: int) -> int:
        """Samples that stay together: in an epoch that goes on, those of when it began."""
        return self._as_of[1] if self._as_of is not None and self._as_of[0] == epoch else self.group

    def keep_group(self, epoch: int, group: int) -> None:
        """``epoch`` was begun with another ``group``: its order is drawn as it was."""
        self._as_of = epoch, group

    def order(self) -> npt.NDArray[np.int64]:
        """All samples in this epoch's order."""
        if not self.shuffle:
            return np.argsort(self.lengths, kind="stable")
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(self.samples)
        group = self.group_of_epoch(self.epoch)
        pool = group * GROUPS_A_POOL
        pools = [order[i : i + pool] for i in range(0, self.samples, pool)]
        return np.concatenate([self._grouped(p, group, random) for p in pools] or [order])

    def _grouped(
        self, pool: npt.NDArray[np.int64], group: int, random: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        pool = pool[np.argsort(self.lengths[pool], kind="stable")]
        whole = len(pool) // group
        groups = pool[: whole * group].reshape(whole, group)[random.permutation(whole)]
        # What makes no whole group comes last, so that it moves no other's borders.
        return np.concatenate([groups.reshape(-1), pool[whole * group :]])

    def draw(self, used: int = 0) -> list[int]:
        rest = self.order()[used:]
        if self.drop_last:
            rest = rest[: self.remaining(used) * self.world_size]
        return split_among_ranks(rest.tolist(), 0, self.rank, self.world_size, self.filler)

    def remaining(self, used: int) -> int:
        rest = max(0, self.samples - used)
        if self.drop_last:
            return rest // (self.batch_size * self.world_size) * self.batch_size
        return math.ceil(rest / self.world_size)

    def __len__(self) -> int:
        return self.remaining(0)


class LengthLoader(RankLoader):
    """A ``RankLoader`` that remembers how the epoch that it left was grouped."""

    sampler: LengthOrder

    def state_dict(self) -> dict[str, int]:
        group = self.sampler.group_of_epoch(self.sampler.epoch)
        return {**super().state_dict(), "group": group}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        if "group" in state:
            self.sampler.keep_group(state["epoch"], state["group"])


class LengthBatchSampler:
    """``DataLoader(dataset, batch_sampler=LengthBatchSampler(order), collate_fn=pad)``.

    Lightning calls ``set_epoch``, and must be told ``use_distributed_sampler=False``. Where the
    order was given a ``group``, which then is the same for any number of ranks, an interrupted
    epoch can be dealt to another number of them (``deal_rest``).
    """

    def __init__(self, order: LengthOrder) -> None:
        self.sampler = order
        """Under the name at which Lightning looks for ``set_epoch``."""
        self.batch_size = order.batch_size
        self.drop_last = order.drop_last
        self.rank, self.world_size = order.rank, order.world_size
        if order.group_given:
            self.deal_rest = self.batches_after

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches_after(0))

    def batches_after(self, used: int) -> list[list[int]]:
        """This rank's batches of this epoch without the first ``used`` of all ranks together."""
        drawn = self.sampler.draw(used * self.batch_size)
        return [drawn[i : i + self.batch_size] for i in range(0, len(drawn), self.batch_size)]


class Padded(NamedTuple):
    """A batch of samples of different length."""

    values: torch.Tensor
    """(samples, longest, columns); zeros where a sample has ended."""
    mask: torch.Tensor
    """(samples, longest), bool: True where there is a row."""
    labels: torch.Tensor
    """(samples,), int64."""


def pad(samples: Sequence[Any]) -> Padded:
    """Collate (array (rows, columns), label) pairs; copies, so nothing of the dataset is held."""
    rows = [len(values) for values, _ in samples]
    first = np.asarray(samples[0][0])
    values = np.zeros((len(samples), max(rows), first.shape[1]), first.dtype)
    mask = np.zeros(values.shape[:2], np.bool_)
    for i, (sample, _) in enumerate(samples):
        values[i, : rows[i]] = sample
        mask[i, : rows[i]] = True
    labels = torch.tensor([int(label) for _, label in samples], dtype=torch.int64)
    return Padded(torch.from_numpy(values), torch.from_numpy(mask), labels)


def padded_batches(dataset: Dataset[Any], batch_size: int, workers: int = 0) -> OpenBatches:
    """What ``RankLoader`` opens an epoch with."""

    def open_batches(order: list[int]) -> Any:
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        return torch.utils.data.DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=pad,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )

    return open_batches
