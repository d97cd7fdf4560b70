"""Files of sequences: their format, and a streaming writer that holds at most one sample in memory.

A data file ``NAME.seq`` has an index ``NAME.idx``. Both files begin with a little-endian header of
64 bytes, which ends with its own CRC-32. The data file contains the rows of all samples, each
sample aligned to 64 bytes. The index contains one entry of 32 bytes per sample, and the CRC-32 of
all entries in its header. A random id in both headers ensures that an index is not used with
another data file. The files of one dataset (shards) share the id of the set.

Data and index are written under temporary names in the folder of the target. ``close`` completes
and renames them, the indexes last. An interrupted writer therefore never leaves files that seem
complete, because a data file without an index is not valid.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ltui.training.shared.checkpoint_files import fsync_folder

DATA_SUFFIX, INDEX_SUFFIX = ".seq", ".idx"
HEADER_BYTES = 64
ALIGNMENT = 64
NO_LABEL = -1
DTYPES = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool",
)  # fmt: skip

DATA_HEADER = np.dtype([("magic", "V8"), ("file_id", "V16"), ("_", "V36"), ("crc", "<u4")])
INDEX_HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("set_id", "V8"),
        ("file_id", "V16"),
        ("dtype", "<u2"),
        ("shard", "<u2"),
        ("shards", "<u2"),
        ("columns", "<u2"),
        ("samples", "<u8"),
        ("data_bytes", "<u8"),
        ("entries_crc", "<u4"),
        ("crc", "<u4"),
    ]
)
_MAGIC = {DATA_HEADER: b"SEQDATA1", INDEX_HEADER: b"SEQINDX1"}
_FILE_KINDS = {DATA_HEADER: "data file", INDEX_HEADER: "index"}
ENTRY = np.dtype(
    [("offset", "<u8"), ("rows", "<u8"), ("label", "<i8"), ("crc", "<u4"), ("_", "<u4")]
)


class SequenceError(ValueError):
    """A sequence file is not valid. The text is one sentence that names the file and the sample."""

    def __init__(self, path: Path, what: str, sample: int | None = None) -> None:
        sample_text = "" if sample is None else f"sample {sample}: "
        super().__init__(f"{path}: {sample_text}{what}.")
        self.path = path
        self.what = what
        self.sample = sample
        """Number of the sample within the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker of a DataLoader pickles the error to send it to the rank.
        return SequenceError, (self.path, self.what, self.sample)


@dataclass(frozen=True, slots=True)
class Index:
    """Contents of an index."""

    path: Path
    header: Any
    """A record of the type ``INDEX_HEADER``."""
    entries: npt.NDArray[Any]
    """A view of the mapped file, of the type ``ENTRY``."""

    @property
    def columns(self) -> int:
        """Number of columns of a sample."""
        return int(self.header["columns"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of a sample."""
        return np.dtype(DTYPES[self.header["dtype"]])


def make_header(kind: np.dtype[Any], **values: Any) -> bytes:
    """Return the header of a data file or an index."""
    header = np.zeros((), kind)
    for name, value in {"magic": _MAGIC[kind], **values}.items():
        header[name] = value
    header["crc"] = zlib.crc32(header.tobytes()[:-4])
    return header.tobytes()


def _read_header(path: Path, kind: np.dtype[Any]) -> Any:
    """Read and check the header of a file. Raises ``SequenceError``."""
    file_kind = _FILE_KINDS[kind]
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise SequenceError(path, f"the {file_kind} can't be read: {error.strerror}") from error
    if len(head) < HEADER_BYTES:
        raise SequenceError(path, f"the {file_kind} is cut off within its header")
    header = np.frombuffer(head, kind)[0]
    if header["magic"].tobytes() != _MAGIC[kind]:
        raise SequenceError(path, f"it is not a sequence {file_kind}")
    if zlib.crc32(head[:-4]) != header["crc"]:
        raise SequenceError(path, f"the header of the {file_kind} does not match its checksum")
    return header


def read_index(data_path: Path) -> Index:
    """Map the index of a data file and check it against the data file. Reads no sample.

    Raises ``SequenceError`` if either file is missing, truncated or damaged, if the index belongs
    to another data file, or if a sample lies outside the data.
    """
    path = data_path.with_suffix(INDEX_SUFFIX)
    header = _read_header(path, INDEX_HEADER)
    if header["dtype"] >= len(DTYPES):
        raise SequenceError(path, "it was written by a newer version")
    samples = int(header["samples"])
    entry_bytes = path.stat().st_size - HEADER_BYTES
    if entry_bytes != samples * ENTRY.itemsize:
        present = min(samples, max(0, entry_bytes) // ENTRY.itemsize)
        text = f"the index is cut off: it has entries of {present} of {samples} samples"
        raise SequenceError(path, text, sample=present if present < samples else None)
    entries: npt.NDArray[Any] = (
        np.memmap(path, ENTRY, "r", HEADER_BYTES, (samples,)) if samples else np.empty(0, ENTRY)
    )
    index = Index(path, header, entries)
    _check_data_file(data_path, index)
    if zlib.crc32(entries.data) != header["entries_crc"]:
        raise SequenceError(path, "the entries of the index do not match their checksum")
    return index


def _check_data_file(data_path: Path, index: Index) -> None:
    if _read_header(data_path, DATA_HEADER)["file_id"] != index.header["file_id"]:
        raise SequenceError(
            index.path, f"it is the index of another data file than {data_path.name}"
        )
    size = data_path.stat().st_size
    offsets, rows = index.entries["offset"], index.entries["rows"]
    # Compare without overflow: 2**64 rows must not become a small number of bytes.
    row_bytes = max(1, index.columns * index.dtype.itemsize)
    available = np.uint64(size) - np.minimum(offsets, np.uint64(size))
    beyond = np.flatnonzero((rows > available // np.uint64(row_bytes)) | (offsets > size))
    if len(beyond):
        first = int(beyond[0])
        end = int(offsets[first]) + int(rows[first]) * row_bytes
        text = f"its index points to byte {end}, past the end of the data ({size} bytes)"
        raise SequenceError(data_path, text, sample=first)
    if size != index.header["data_bytes"]:
        text = f"the data has {size} bytes, its index says {index.header['data_bytes']}"
        raise SequenceError(data_path, text)


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
