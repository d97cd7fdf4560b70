"""Streaming writer of sequence files, which holds at most one sample in memory.

Data and index are written under temporary names in the folder of the target. ``close`` completes
and renames them, the indexes last. An interrupted writer therefore never leaves files that seem
complete, because a data file without an index is not valid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ltui.training.data.sequence_format.file_format import (
    ALIGNMENT,
    DATA_HEADER,
    DATA_SUFFIX,
    DTYPES,
    ENTRY,
    HEADER_BYTES,
    INDEX_HEADER,
    INDEX_SUFFIX,
    NO_LABEL,
    make_header,
)
from ltui.training.shared.checkpoint_files import fsync_folder

_MAX_COLUMNS = 65535
_MAX_SHARDS = 65535


class SequenceWriter:
    """``with SequenceWriter("train.seq", columns=80) as out: out.add(array, label=3)``.

    With ``shard_bytes`` the dataset is split into several files, ``train-00000.seq`` and so on. A
    file is closed when it has that size. If the block raises, all written files are removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: int,
        dtype: str = "float32",
        shard_bytes: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
        if not 1 <= columns <= _MAX_COLUMNS:
            raise ValueError(f"columns must be 1 to {_MAX_COLUMNS}, not {columns}")
        self.path = Path(path).with_suffix(DATA_SUFFIX)
        self.columns = columns
        self.dtype = np.dtype(dtype)
        self.samples = 0
        self._shard_bytes = shard_bytes
        self._set_id = secrets.token_bytes(8)
        self._shards: list[_ShardWriter] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, values: Any, label: int = NO_LABEL) -> None:
        """Append a sample (rows, columns) with at least one row. Raises ``ValueError`` if it is
        not valid."""
        array = np.ascontiguousarray(values)
        if array.ndim != 2 or array.shape[1] != self.columns or not array.shape[0]:
            raise ValueError(
                f"sample {self.samples} has shape {array.shape}, not (1 or more, {self.columns})"
            )
        if array.dtype != self.dtype:
            if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                raise ValueError(
                    f"sample {self.samples} has dtype {array.dtype}, which can't be cast to "
                    f"{self.dtype}"
                )
            array = array.astype(self.dtype)
        shard = self._shards[-1] if self._shards else None
        if shard is None or (self._shard_bytes is not None and shard.size >= self._shard_bytes):
            if shard is not None:
                shard.flush()
            shard = self._next_shard()
        shard.add(array, label)
        self.samples += 1

    def _next_shard(self) -> _ShardWriter:
        if len(self._shards) == _MAX_SHARDS:
            raise ValueError(f"a dataset has at most {_MAX_SHARDS} files: make them larger")
        base = self.path.with_name(f".{self.path.stem}.{os.getpid()}.{len(self._shards)}")
        self._shards.append(_ShardWriter(base))
        return self._shards[-1]

    def close(self) -> None:
        """Complete and rename the files. Raises ``ValueError`` if there is no sample."""
        if not self.samples:
            raise ValueError(f"{self.path}: no sample was written")
        targets = self._targets()
        for number, shard in enumerate(self._shards):
            shard.complete(
                set_id=self._set_id,
                dtype=DTYPES.index(self.dtype.name),
                shard=number,
                shards=len(self._shards),
                columns=self.columns,
            )
        for suffix in (DATA_SUFFIX, INDEX_SUFFIX):
            for shard, target in zip(self._shards, targets, strict=True):
                os.replace(shard.part(suffix), target.with_suffix(suffix))
        fsync_folder(self.path.parent)
        self._shards.clear()

    def _targets(self) -> list[Path]:
        if self._shard_bytes is None:
            return [self.path]
        stem = self.path.stem
        return [self.path.with_name(f"{stem}-{i:05d}.seq") for i in range(len(self._shards))]

    def abandon(self) -> None:
        """Remove the temporary files."""
        for shard in self._shards:
            shard.remove()
        self._shards.clear()

    def __enter__(self) -> SequenceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()


class _ShardWriter:
    """One data file and its index, under temporary names."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._id = secrets.token_bytes(16)
        self._data: BinaryIO = self.part(DATA_SUFFIX).open("wb")
        self._entries: BinaryIO = self.part(INDEX_SUFFIX).open("wb")
        self._data.write(make_header(DATA_HEADER, file_id=self._id))
        self._entries.write(bytes(HEADER_BYTES))
        self.size = HEADER_BYTES
        self._samples = 0
        self._crc = 0

    def part(self, suffix: str) -> Path:
        """Return the temporary path of the data file or the index."""
        return self._base.with_name(self._base.name + suffix + ".part")

    def add(self, array: np.ndarray[Any, Any], label: int) -> None:
        """Append a sample."""
        gap = -self.size % ALIGNMENT
        self._data.write(bytes(gap))
        self._data.write(array.data)
        entry = np.array(
            [(self.size + gap, len(array), label, zlib.crc32(array.data), 0)], ENTRY
        ).tobytes()
        self._entries.write(entry)
        self._crc = zlib.crc32(entry, self._crc)
        self.size += gap + array.nbytes
        self._samples += 1

    def flush(self) -> None:
        """Write all data to disk and close the data file. No more samples may follow."""
        for file in (self._data, self._entries):
            file.flush()
            os.fsync(file.fileno())
        self._data.close()

    def complete(self, **header_fields: Any) -> None:
        """Write the header of the index and close the files."""
        if not self._data.closed:
            self.flush()
        self._entries.seek(0)
        self._entries.write(
            make_header(
                INDEX_HEADER,
                file_id=self._id,
                samples=self._samples,
                data_bytes=self.size,
                entries_crc=self._crc,
                **header_fields,
            )
        )
        self._entries.flush()
        os.fsync(self._entries.fileno())
        self._entries.close()

    def remove(self) -> None:
        """Close and remove both files."""
        for file in (self._data, self._entries):
            with contextlib.suppress(OSError):
                file.close()
        for suffix in (DATA_SUFFIX, INDEX_SUFFIX):
            self.part(suffix).unlink(missing_ok=True)
