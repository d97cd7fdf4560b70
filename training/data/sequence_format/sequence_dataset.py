"""Variable-length 2-D arrays in a file larger than memory: one data file and its index, mapped.

A sample is an array (rows, columns): rows differ from sample to sample, columns and dtype are those
of the file. Beside each data file ``NAME.seq`` stands its index ``NAME.idx`` (``sequence_files.py``
has the bytes, ``sequence_writer.py`` writes them). Both are mapped read-only and shared through the
page cache, so that any number of ranks and loader workers hold one copy; nothing is read until a
sample is asked for. What a process keeps mapped is given back once it exceeds ``resident_bytes``.

Each sample is checked against its checksum when it is read. A file that can't be right is told in
one sentence that names the file and the first sample that is affected.
"""

from __future__ import annotations

import bisect
import glob
import mmap
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ltui.training.data.sequence_format.file_format import (
    DATA_SUFFIX,
    INDEX_SUFFIX,
    NO_LABEL,
    Index,
    SequenceError,
    read_index,
)

Array = npt.NDArray[Any]


class Sample(NamedTuple):
    values: Array
    """(rows, columns), read-only, a view of the mapped file: copy what must outlive the dataset."""
    label: int
    """``NO_LABEL`` where the writer was given none."""


class SequenceDataset(Dataset[Sample]):
    """Samples of one or more files, numbered through. For torch's ``DataLoader`` and for ours.

    Sample number ``len(dataset)`` is the filler: one row of zeros labelled ``NO_LABEL``, with which
    ranks are evened out where every sample must count once.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        check: bool = True,
        resident_bytes: int = 256 << 20,
    ) -> None:
        """``files``: a file (also one that was written as several), a folder, a glob pattern, or a
        list of these.

        ``check``: whether a sample's checksum is compared when it is read. ``resident_bytes``: how
        much of the files this process keeps mapped at once. Raises ``SequenceError``.
        """
        self._check = check
        self._resident_bytes = resident_bytes
        self._shards = [_Shard(path) for path in find_files(files)]
        _require_whole_sets(self._shards)
        first = self._shards[0].index
        for shard in self._shards[1:]:
            _require_alike(first, shard.index)
        self.columns = first.columns
        self.dtype: np.dtype[Any] = first.dtype
        self._ends = np.cumsum([len(shard.index.rows) for shard in self._shards]).tolist()
        self._touched = 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def data_bytes(self) -> int:
        """Of all samples."""
        return sum(shard.index.data_bytes for shard in self._shards)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Rows of every sample: 8 bytes each, in this process's own memory."""
        return np.concatenate([shard.index.rows.astype(np.int64) for shard in self._shards])

    def labels(self) -> npt.NDArray[np.int64]:
        return np.concatenate([shard.index.labels.astype(np.int64) for shard in self._shards])

    def __getitem__(self, number: int) -> Sample:
        if number == len(self):
            return Sample(np.zeros((1, self.columns), self.dtype), NO_LABEL)
        if not 0 <= number < len(self):
            raise IndexError(f"there is no sample {number} among {len(self)}")
        at = bisect.bisect_right(self._ends, number)
        shard = self._shards[at]
        within = number - (self._ends[at - 1] if at else 0)
        values = shard.read(within, check=self._check)
        self._keep_bounded(values.nbytes)
        return Sample(values, int(shard.index.labels[within]))

    def _keep_bounded(self, nbytes: int) -> None:
        """Give back the pages of what was read; views stay valid, and are mapped again when read.

        A sample in the middle of pages touches up to one more at either end.
        """
        self._touched += nbytes + 2 * mmap.PAGESIZE
        if self._touched > self._resident_bytes:
            self._touched = 0
            for shard in self._shards:
                shard.give_back()

    def verify(self) -> Iterable[str]:
        """Read every sample; one sentence for each that is damaged."""
        for number in range(len(self)):
            try:
                self[number]
            except SequenceError as error:
                yield str(error)

    def close(self) -> None:
        """Unmap the files. Views that are still held keep theirs mapped."""
        for shard in self._shards:
            shard.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_touched": 0}


class _Shard:
    """One data file and its index. Mapped where it is first read: also in a spawned worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: Index = read_index(path)
        self._map: mmap.mmap | None = None
        self._fd = -1

    def read(self, within: int, *, check: bool) -> Array:
        if self._map is None:
            self._open()
        index = self.index
        begin = int(index.offsets[within])
        rows = int(index.rows[within])
        nbytes = rows * index.columns * index.dtype.itemsize
        # A file that shrinks while it is mapped would end the process with SIGBUS.
        if os.fstat(self._fd).st_size < begin + nbytes:
            raise SequenceError(self.path, "it became shorter while it was read", sample=within)
        assert self._map is not None
        values = np.frombuffer(self._map, index.dtype, rows * index.columns, begin)
        if check and zlib.crc32(values.data) != int(index.checksums[within]):
            raise SequenceError(self.path, "its bytes do not match their checksum", sample=within)
        return values.reshape(rows, index.columns)

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SequenceError(self.path, f"it can't be mapped: {error.strerror}") from error

    def give_back(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._map is not None:
            self._map = None  # unmapped with the last view of it
            os.close(self._fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _Shard.__init__(self, state["path"])


def find_files(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    """Data files in order of their names; those that are named one by one in the order given."""
    named = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    found: list[Path] = []
    for name in named:
        path = Path(os.path.expanduser(os.fspath(name)))
        if path.is_dir():
            more = sorted({p.with_suffix(DATA_SUFFIX) for p in path.glob(f"*{INDEX_SUFFIX}")})
        elif glob.has_magic(str(path)):
            matches = (Path(p).with_suffix(DATA_SUFFIX) for p in glob.glob(str(path)))
            more = sorted(set(matches))
        else:
            more = [path.with_suffix(DATA_SUFFIX)]
            if not more[0].with_suffix(INDEX_SUFFIX).exists():
                shards = path.parent.glob(f"{glob.escape(path.stem)}-[0-9]*{INDEX_SUFFIX}")
                more = sorted(p.with_suffix(DATA_SUFFIX) for p in shards) or more
        if not more:
            raise SequenceError(path, f"there is no {DATA_SUFFIX} file with its index there")
        found += more
    if not found:
        raise ValueError("no file of sequences was named")
    return found


def _require_whole_sets(shards: Sequence[_Shard]) -> None:
    """Of a dataset written as several files, each must be there, once."""
    sets: dict[bytes, list[_Shard]] = {}
    for shard in shards:
        sets.setdefault(shard.index.set_id, []).append(shard)
    for members in sets.values():
        of = members[0].index.shards
        there = [shard.index.shard for shard in members]
        for number in range(of):
            if there.count(number) != 1:
                what = "is missing" if number not in there else "is named twice"
                raise SequenceError(
                    members[0].path, f"file {number + 1} of the {of} of its dataset {what}"
                )


def _require_alike(first: Index, other: Index) -> None:
    if (first.columns, first.dtype) != (other.columns, other.dtype):
        raise SequenceError(
            other.path,
            f"its samples have {other.columns} columns of {other.dtype}, "
            f"those of {first.path.name} {first.columns} of {first.dtype}",
        )
