"""File format of sequences: a data file ``NAME.seq`` and its index ``NAME.idx``.

Both files begin with a little-endian header of 64 bytes, which ends with its own CRC-32. The data
file contains the rows of all samples, each sample aligned to 64 bytes. The index contains one entry
of 32 bytes per sample, and the CRC-32 of all entries in its header. A random id in both headers
ensures that an index is not used with another data file. The files of one dataset (shards) share
the id of the set.
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
"""Magic, id of the file."""
_INDEX_HEADER = struct.Struct("<8s8s16sHHHHQQI")
"""Magic, id of the set, id of the file, dtype, shard, shards, columns, samples, data bytes, CRC of
the entries."""
ENTRY = np.dtype(
    [("offset", "<u8"), ("rows", "<u8"), ("label", "<i8"), ("crc", "<u4"), ("_", "<u4")]
)


class SequenceError(ValueError):
    """A sequence file is not valid. The text is one sentence that names the file and the sample."""

    def __init__(self, path: Path, what: str, *, sample: int | None = None) -> None:
        sample_text = "" if sample is None else f"sample {sample}: "
        super().__init__(f"{path}: {sample_text}{what}.")
        self.path = path
        self.what = what
        self.sample = sample
        """Number of the sample within the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker of a DataLoader pickles the error to send it to the rank.
        return _restore_error, (self.path, self.what, self.sample)


def _restore_error(path: Path, what: str, sample: int | None) -> SequenceError:
    return SequenceError(path, what, sample=sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Contents of an index. Its arrays are views of the mapped file."""

    path: Path
    set_id: bytes
    shard: int
    shards: int
    columns: int
    dtype: np.dtype[Any]
    data_bytes: int
    """Size of the data file."""
    offsets: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint64]
    labels: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint32]


def data_header(file_id: bytes) -> bytes:
    """Return the header of a data file."""
    return _append_crc(_DATA_HEADER.pack(DATA_MAGIC, file_id))


def index_header(  # noqa: PLR0913  (the fields of the header)
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
    """Return the header of an index."""
    return _append_crc(
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


def _append_crc(head: bytes) -> bytes:
    head = head.ljust(HEADER_BYTES - 4, b"\0")
    return head + struct.pack("<I", zlib.crc32(head))


def _read_header(path: Path, magic: bytes, file_kind: str) -> bytes:
    """Read and check the header of a file. Raises ``SequenceError``."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise SequenceError(path, f"the {file_kind} can't be read: {error.strerror}") from error
    if len(head) < HEADER_BYTES:
        raise SequenceError(path, f"the {file_kind} is cut off within its header")
    if head[:8] != magic:
        raise SequenceError(path, f"it is not a sequence {file_kind}")
    if struct.pack("<I", zlib.crc32(head[:-4])) != head[-4:]:
        raise SequenceError(path, f"the header of the {file_kind} does not match its checksum")
    return head


def read_index(data_path: Path) -> Index:
    """Map the index of a data file and check it against the data file. Reads no sample.

    Raises ``SequenceError`` if either file is missing, truncated or damaged, if the index belongs
    to another data file, or if a sample lies outside the data.
    """
    path = data_path.with_suffix(INDEX_SUFFIX)
    head = _read_header(path, INDEX_MAGIC, "index")
    (_, set_id, file_id, dtype_code, shard, shards, columns, samples, data_bytes, crc) = (
        _INDEX_HEADER.unpack_from(head)
    )
    if dtype_code >= len(DTYPES):
        raise SequenceError(path, "it was written by a newer version")
    entry_bytes = path.stat().st_size - HEADER_BYTES
    if entry_bytes != samples * ENTRY.itemsize:
        present = min(samples, max(0, entry_bytes) // ENTRY.itemsize)
        text = f"the index is cut off: it has entries of {present} of {samples} samples"
        raise SequenceError(path, text, sample=present if present < samples else None)
    entries: npt.NDArray[Any] = (
        np.memmap(path, ENTRY, "r", HEADER_BYTES, (samples,)) if samples else np.empty(0, ENTRY)
    )
    index = Index(
        path=path,
        set_id=set_id,
        shard=shard,
        shards=shards,
        columns=columns,
        dtype=np.dtype(DTYPES[dtype_code]),
        data_bytes=data_bytes,
        offsets=entries["offset"],
        rows=entries["rows"],
        labels=entries["label"],
        checksums=entries["crc"],
    )
    _check_data_file(data_path, file_id, index)
    if zlib.crc32(entries.data) != crc:
        raise SequenceError(path, "the entries of the index do not match their checksum")
    return index


def _check_data_file(data_path: Path, file_id: bytes, index: Index) -> None:
    head = _read_header(data_path, DATA_MAGIC, "data file")
    if _DATA_HEADER.unpack_from(head)[1] != file_id:
        raise SequenceError(
            index.path, f"it is the index of another data file than {data_path.name}"
        )
    size = data_path.stat().st_size
    # Compare without overflow: 2**64 rows must not become a small number of bytes.
    row_bytes = max(1, index.columns * index.dtype.itemsize)
    available = np.uint64(size) - np.minimum(index.offsets, np.uint64(size))
    beyond = np.nonzero((index.rows > available // np.uint64(row_bytes)) | (index.offsets > size))[
        0
    ]
    if len(beyond):
        first = int(beyond[0])
        end = int(index.offsets[first]) + int(index.rows[first]) * row_bytes
        text = f"its index points to byte {end}, past the end of the data ({size} bytes)"
        raise SequenceError(data_path, text, sample=first)
    if size != index.data_bytes:
        text = f"the data has {size} bytes, its index says {index.data_bytes}"
        raise SequenceError(data_path, text)
