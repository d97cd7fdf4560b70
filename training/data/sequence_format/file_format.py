"""File format of sequences: a data file ``NAME.seq`` and its index ``NAME.idx``.

Both files begin with a little-endian header of 64 bytes, which ends with its own CRC-32. The data
file contains the rows of all samples, each sample aligned to 64 bytes. The index contains one entry
of 32 bytes per sample, and the CRC-32 of all entries in its header. A random id in both headers
ensures that an index is not used with another data file. The files of one dataset (shards) share
the id of the set.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
