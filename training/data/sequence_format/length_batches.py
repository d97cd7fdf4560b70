"""Batches of samples of similar length, equal in number and size on every rank, and their padding.

The order of an epoch is made as follows. All samples are shuffled by seed and epoch and cut into
pools. Each pool is sorted by length and cut into groups of as many samples as all ranks use in one
step, and the groups are shuffled. The samples of this order are assigned to the ranks in turn, so
that in each step all ranks have samples of about the same length. The samples that all ranks have
used are the beginning of the order. A resumed epoch distributes the remaining samples, also over
another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ltui.training.data.sample_order import RankOrder

GROUPS_PER_POOL = 64
"""Number of groups in a pool. With more groups there is less padding and less randomness."""


class LengthOrder(RankOrder):
    """Order of an epoch for ``RankLoader``, for samples of known length."""

    layout_key = "group"
    """Number of samples in a group."""

    def __init__(  # noqa: PLR0913  (keywords, as DataLoader has them)
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
        """``group``: number of samples in a group; by default the samples of one step of all ranks.

        ``drop_last``: leave out samples that do not fill a batch on every rank. Otherwise the ranks
        are padded with ``filler``, or if it is None with samples drawn twice. Without ``shuffle``
        the samples are sorted by length. ``seed``: by default ``PL_GLOBAL_SEED``, which Lightning
        sets.
        """
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"no batches of {batch_size} for rank {rank} of {world_size}")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        super().__init__(
            len(self.lengths),
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            filler=filler,
            drop_last=drop_last,
            batch_size=batch_size,
        )
        if seed is not None:
            self.seed = seed
        self.group_given = group is not None
        self.layout = group or batch_size * world_size

    def global_order(self) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.argsort(self.lengths, kind="stable")
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(self.samples)
        group = self.layout_of(self.epoch)
        pool = group * GROUPS_PER_POOL
        pools = [order[i : i + pool] for i in range(0, self.samples, pool)]
        return np.concatenate([self._shuffle_groups(p, group, random) for p in pools] or [order])

    def _shuffle_groups(
        self, pool: npt.NDArray[np.int64], group: int, random: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        pool = pool[np.argsort(self.lengths[pool], kind="stable")]
        count = len(pool) // group
        groups = pool[: count * group].reshape(count, group)[random.permutation(count)]
        # An incomplete group comes last, so that it does not shift the others.
        return np.concatenate([groups.reshape(-1), pool[count * group :]])


class LengthBatchSampler:
    """Batch sampler of a ``LengthOrder`` for torch's DataLoader.

    Use it as ``DataLoader(dataset, batch_sampler=LengthBatchSampler(order), collate_fn=pad)`` and
    set ``use_distributed_sampler=False`` in Lightning, which calls ``set_epoch``. If the order has
    an explicit ``group``, which is then independent of the number of ranks, an interrupted epoch
    can be resumed with another number of ranks (``deal_rest``).
    """

    def __init__(self, order: LengthOrder) -> None:
        self.sampler = order
        """The order, under the name by which Lightning finds ``set_epoch``."""
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
        """Return this rank's batches after the first ``used`` batches of all ranks together."""
        drawn = self.sampler.draw(used * self.batch_size)
        return [drawn[i : i + self.batch_size] for i in range(0, len(drawn), self.batch_size)]


class Padded(NamedTuple):
    """A batch of samples of different lengths."""

    values: torch.Tensor
    """(samples, longest, columns); zeros after the end of a sample."""
    mask: torch.Tensor
    """(samples, longest), bool: True for rows of the sample, False for padding."""
    labels: torch.Tensor
    """(samples,), int64."""


def pad(samples: Sequence[Any]) -> Padded:
    """Collate (array (rows, columns), label) pairs. The data is copied and the dataset released."""
    rows = [len(values) for values, _ in samples]
    first = np.asarray(samples[0][0])
    values = np.zeros((len(samples), max(rows), first.shape[1]), first.dtype)
    mask = np.zeros(values.shape[:2], np.bool_)
    for i, (sample, _) in enumerate(samples):
        values[i, : rows[i]] = sample
        mask[i, : rows[i]] = True
    labels = torch.tensor([int(label) for _, label in samples], dtype=torch.int64)
    return Padded(torch.from_numpy(values), torch.from_numpy(mask), labels)
