"""The bytes of a file of sequences: a data file ``NAME.seq`` and its index ``NAME.idx``.

Both begin with a header of 64 bytes, little-endian, ended by its own CRC-32. The data file holds
the samples' rows one after the other, each sample aligned to 64 bytes; the index one entry of 32
bytes a sample, with the CRC-32 of all entries in its header. An identity drawn by the writer stands
in both headers, so that an index never passes for that of another data file; files of one dataset
(shards) share the identity of the set.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DATA_SUFFIX, INDEX_SUFFIX = ".seq", ".idx"
DATA_MAGIC, INDEX_MAGIC = b"SEQDATA1", b"SEQINDX1"
HEADER_BYTES = 64
DATA_HEADER_BYTES = HEADER_BYTES
ALIGNMENT = 64
NO_LABEL = -1
DTYPES = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool",
)  # fmt: skip

_DATA_HEADER = struct.Struct("<8s16s36x")
"""Magic, identity of the file."""
_INDEX_HEADER = struct.Struct("<8s8s16sHHHHQQI")
"""Magic, identity of the set, identity of the file, dtype, shard, shards, columns, samples, bytes
of data, CRC of the entries."""
ENTRY = np.dtype(
    [("offset", "<u8"), ("rows", "<u8"), ("label", "<i8"), ("crc", "<u4"), ("_", "<u4")]
)


class SequenceError(ValueError):
    """A file of sequences that can't be right. The text is one sentence that names the sample."""

    def __init__(self, path: Path, what: str, *, sample: int | None = None) -> None:
        named = "" if sample is None else f"sample {sample}: "
        super().__init__(f"{path}: {named}{what}.")
        self.path = path
        self.what = what
        self.sample = sample
        """Number within the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Raised in a loader's worker, it travels to the rank.
        return _again, (self.path, self.what, self.sample)


def _again(path: Path, what: str, sample: int | None) -> SequenceError:
    return SequenceError(path, what, sample=sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """An index as read: its columns are views of the mapped file."""

    path: Path
    set_id: bytes
    shard: int
    shards: int
    columns: int
    dtype: np.dtype[Any]
    data_bytes: int
    """Where the data file ends."""
    offsets: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    labels: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]


def data_header(file_id: bytes) -> bytes:
    return _sealed(_DATA_HEADER.pack(DATA_MAGIC, file_id))


def index_header(
    *,
    set_id: bytes,
    file_id: bytes,
    dtype: str,
    shard: int,
    shards: int,
    columns: int,
    samples: int,
    data_bytes: int,
    crc: int,
) -> bytes:
    return _sealed(
        _INDEX_HEADER.pack(
            INDEX_MAGIC,
            set_id,
            file_id,
            DTYPES.index(dtype),
            shard,
            shards,
            columns,
            samples,
            data_bytes,
            crc,
        )
    )


def _sealed(head: bytes) -> bytes:
    head = head.ljust(HEADER_BYTES - 4, b"\0")
    return head + struct.pack("<I", zlib.crc32(head))


def _unsealed(path: Path, magic: bytes, what: str) -> bytes:
    """A file's header, or ``SequenceError``."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise SequenceError(path, f"the {what} can't be read: {error.strerror}") from error
    if len(head) < HEADER_BYTES:
        raise SequenceError(path, f"the {what} is cut off within its header")
    if head[:8] != magic:
        raise SequenceError(path, f"it is no {what} of sequences")
    if struct.pack("<I", zlib.crc32(head[:-4])) != head[-4:]:
        raise SequenceError(path, f"the header of the {what} does not match its checksum")
    return head


def read_index(data_path: Path) -> Index:
    """The index of a data file, mapped and compared with it. Reads no sample.

    Raises ``SequenceError``: either file missing, cut off or damaged, an index of other data, a
    sample that the index has outside of the data.
    """
    path = data_path.with_suffix(INDEX_SUFFIX)
    head = _unsealed(path, INDEX_MAGIC, "index")
    (_, set_id, file_id, kind, shard, shards, columns, samples, data_bytes, crc) = (
        _INDEX_HEADER.unpack_from(head)
    )
    if kind >= len(DTYPES):
        raise SequenceError(path, "it was written by a newer version")
    there = path.stat().st_size - HEADER_BYTES
    if there != samples * ENTRY.itemsize:
        cut = min(samples, max(0, there) // ENTRY.itemsize)
        what = f"the index is cut off: it has entries of {cut} of {samples} samples"
        raise SequenceError(path, what, sample=cut if cut < samples else None)
    entries: npt.NDArray[Any] = (
        np.memmap(path, ENTRY, "r", HEADER_BYTES, (samples,)) if samples else np.empty(0, ENTRY)
    )
    index = Index(
        path=path,
        set_id=set_id,
        shard=shard,
        shards=shards,
        columns=columns,
        dtype=np.dtype(DTYPES[kind]),
        data_bytes=data_bytes,
        offsets=entries["offset"],
        rows=entries["rows"],
        labels=entries["label"],
        checksums=entries["crc"],
    )
    _compare(data_path, file_id, index)
    if zlib.crc32(entries.data) != crc:
        raise SequenceError(path, "the entries of the index do not match their checksum")
    return index


def _compare(data_path: Path, file_id: bytes, index: Index) -> None:
    head = _unsealed(data_path, DATA_MAGIC, "data file")
    if _DATA_HEADER.unpack_from(head)[1] != file_id:
        raise SequenceError(index.path, f"it is the index of other data than {data_path.name}")
    size = data_path.stat().st_size
    # Compared without overflow: 2**64 rows must not come out small.
    row_bytes = max(1, index.columns * index.dtype.itemsize)
    room = np.uint64(size) - np.minimum(index.offsets, np.uint64(size))
    beyond = np.nonzero((index.rows > room // np.uint64(row_bytes)) | (index.offsets > size))[0]
    if len(beyond):
        first = int(beyond[0])
        at = int(index.offsets[first]) + int(index.rows[first]) * row_bytes
        what = f"its index points to byte {at}, past the end of the data ({size} bytes)"
        raise SequenceError(data_path, what, sample=first)
    if size != index.data_bytes:
        what = f"the data has {size} bytes, its index says {index.data_bytes}"
        raise SequenceError(data_path, what)
