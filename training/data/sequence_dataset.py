"""Dataset of variable-length 2-D arrays in memory-mapped files, and its batches of similar length.

A sample is an array (rows, columns). The number of rows differs between samples. The number of
columns and the dtype are equal in the complete file. Each data file ``NAME.seq`` has an index
``NAME.idx`` in the same folder (see ``sequence_writer.py`` for the format and the writer). Both are
mapped read-only and shared through the page cache, so that any number of ranks and loader workers
use one copy, and the files may be larger than memory. Nothing is read before a sample is requested.
A process releases its mapped pages when they exceed ``resident_bytes``.

Each sample is checked against its checksum when it is read. If a file is not valid, the error is
one sentence that names the file and the first affected sample.

Batches are equal in number and size on every rank, and padded. The order of an epoch is made as
follows. All samples are shuffled by seed and epoch and cut into pools. Each pool is sorted by
length and cut into groups of as many samples as all ranks use in one step, and the groups are
shuffled. The samples of this order are assigned to the ranks in turn, so that in each step all
ranks have samples of about the same length. The samples that all ranks have used are the beginning
of the order. A resumed epoch distributes the remaining samples, also over another number of ranks.
"""

from __future__ import annotations

import bisect
import glob
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ltui.training.data.sample_order import RankOrder
from ltui.training.data.sequence_writer import (
    DATA_SUFFIX,
    INDEX_SUFFIX,
    NO_LABEL,
    Index,
    SequenceError,
    read_index,
)

Array = npt.NDArray[Any]


class Sample(NamedTuple):
    """One sample of a dataset."""

    values: Array
    """(rows, columns), a read-only view of the mapped file. Copy it to keep it after ``close``."""
    label: int
    """``NO_LABEL`` if the sample was written without a label."""


class SequenceDataset(Dataset[Sample]):
    """Samples of one or more files, with consecutive numbers. For torch's ``DataLoader`` and ours.

    Sample number ``len(dataset)`` is the padding sample: one row of zeros with the label
    ``NO_LABEL``. It pads the ranks if every sample must count once.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        check: bool = True,
        resident_bytes: int = 256 << 20,
    ) -> None:
        """``files``: a file, which may be split into shards, a folder, a glob pattern, or a list.

        ``check``: compare the checksum of a sample when it is read. ``resident_bytes``: maximum
        size of the files' pages that this process keeps in memory. Raises ``SequenceError``.
        """
        self._check = check
        self._resident_bytes = resident_bytes
        self._shards = [_Shard(path) for path in find_files(files)]
        _require_complete_sets(self._shards)
        first = self._shards[0].index
        for shard in self._shards[1:]:
            _require_equal_format(first, shard.index)
        self.columns = first.columns
        self.dtype: np.dtype[Any] = first.dtype
        self._ends = np.cumsum([len(shard.index.entries) for shard in self._shards]).tolist()
        self._touched = 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def data_bytes(self) -> int:
        """Size of all data files together."""
        return sum(int(shard.index.header["data_bytes"]) for shard in self._shards)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of rows of every sample, as a copy with 8 bytes per sample."""
        return self._of_all("rows")

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label of every sample."""
        return self._of_all("label")

    def _of_all(self, name: str) -> npt.NDArray[np.int64]:
        return np.concatenate([s.index.entries[name].astype(np.int64) for s in self._shards])

    def __getitem__(self, number: int) -> Sample:
        if number == len(self):
            return Sample(np.zeros((1, self.columns), self.dtype), NO_LABEL)
        if not 0 <= number < len(self):
            raise IndexError(f"there is no sample {number} among {len(self)}")
        at = bisect.bisect_right(self._ends, number)
        shard = self._shards[at]
        within = number - (self._ends[at - 1] if at else 0)
        values = shard.read(within, check=self._check)
        self._limit_resident_pages(values.nbytes)
        return Sample(values, int(shard.index.entries["label"][within]))

    def _limit_resident_pages(self, nbytes: int) -> None:
        """Release the pages that were read if they exceed the limit.

        Views stay valid; their pages are read again on access. A sample that is not aligned to
        pages touches up to one more page at either end.
        """
        self._touched += nbytes + 2 * mmap.PAGESIZE
        if self._touched > self._resident_bytes:
            self._touched = 0
            for shard in self._shards:
                shard.release_pages()

    def verify(self) -> Iterable[str]:
        """Read every sample and yield one sentence for each damaged one."""
        for number in range(len(self)):
            try:
                self[number]
            except SequenceError as error:
                yield str(error)

    def close(self) -> None:
        """Unmap the files. A file with remaining views stays mapped."""
        for shard in self._shards:
            shard.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_touched": 0}


class _Shard:
    """One data file and its index. It is mapped at the first read, also in a spawned worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self._map: mmap.mmap | None = None
        self._fd = -1

    def read(self, within: int, *, check: bool) -> Array:
        if self._map is None:
            self._open()
        index = self.index
        entry = index.entries[within]
        begin, rows = int(entry["offset"]), int(entry["rows"])
        nbytes = rows * index.columns * index.dtype.itemsize
        # If a mapped file shrinks, an access past its end would end the process with SIGBUS.
        if os.fstat(self._fd).st_size < begin + nbytes:
            raise SequenceError(self.path, "it became shorter while it was read", sample=within)
        assert self._map is not None
        values = np.frombuffer(self._map, index.dtype, rows * index.columns, begin)
        if check and zlib.crc32(values.data) != int(entry["crc"]):
            raise SequenceError(self.path, "its bytes do not match their checksum", sample=within)
        return values.reshape(rows, index.columns)

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SequenceError(self.path, f"it can't be mapped: {error.strerror}") from error

    def release_pages(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._map is not None:
            self._map = None  # it is unmapped when its last view is deleted
            os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Shard, (self.path,)


def find_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Return data files sorted by name. Files that are listed individually keep their order."""
    entries = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    paths: list[Path] = []
    for name in entries:
        path = Path(os.path.expanduser(os.fspath(name)))
        if path.is_dir():
            matches: Iterable[Path] = path.glob(f"*{INDEX_SUFFIX}")
        elif glob.has_magic(str(path)):
            matches = map(Path, glob.glob(str(path)))
        elif path.with_suffix(INDEX_SUFFIX).exists():
            matches = [path]
        else:
            shards = path.parent.glob(f"{glob.escape(path.stem)}-[0-9]*{INDEX_SUFFIX}")
            matches = list(shards) or [path]
        more = sorted({match.with_suffix(DATA_SUFFIX) for match in matches})
        if not more:
            raise SequenceError(path, f"there is no {DATA_SUFFIX} file with an index")
        paths += more
    if not paths:
        raise ValueError("no sequence file was given")
    return paths


def _require_complete_sets(shards: Sequence[_Shard]) -> None:
    """Check that all files of a dataset that was split into shards are given exactly once."""
    sets: dict[bytes, list[_Shard]] = {}
    for shard in shards:
        sets.setdefault(shard.index.header["set_id"].tobytes(), []).append(shard)
    for members in sets.values():
        count = int(members[0].index.header["shards"])
        numbers = [int(shard.index.header["shard"]) for shard in members]
        for number in range(count):
            if numbers.count(number) != 1:
                problem = "is missing" if number not in numbers else "is listed twice"
                raise SequenceError(
                    members[0].path, f"file {number + 1} of the {count} of its dataset {problem}"
                )


def _require_equal_format(first: Index, other: Index) -> None:
    if (first.columns, first.dtype) != (other.columns, other.dtype):
        raise SequenceError(
            other.path,
            f"its samples have {other.columns} columns of {other.dtype}, "
            f"those of {first.path.name} {first.columns} of {first.dtype}",
        )


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
