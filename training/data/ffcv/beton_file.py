"""Tables of a ``.beton`` file and the check that it is complete. NumPy only; no torch, no FFCV.

FFCV follows the pointers in such a file without checking them. A pointer past the end of the file
causes a crash, and any other wrong pointer reads the bytes of other samples. All pointers are
therefore checked here, before anything is read. Format: version 2, as FFCV 1.0 writes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 2
HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ],
    align=True,
)
FIELD = np.dtype([("type_id", "<u1"), ("name", ("<u1", 16)), ("arguments", ("<u1", (1024,)))], True)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
_IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
_BYTES = np.dtype([("ptr", "<u8"), ("size", "<u8")])

FLOAT, INT, IMAGE, BYTES, ARRAY, JSON, TENSOR = range(7)
_TYPES: dict[int, tuple[str, npt.DTypeLike]] = {
    FLOAT: ("number", "<f8"),
    INT: ("whole number", "<i8"),
    IMAGE: ("image", _IMAGE),
    BYTES: ("bytes", _BYTES),
    ARRAY: ("array", "<u8"),
    JSON: ("JSON", _BYTES),
    TENSOR: ("tensor", "<u8"),
}
"""Displayed name of a type, and the dtype of its column in the table of samples."""
JPEG, RAW = 0, 1


class BetonError(ValueError):
    """A ``.beton`` file can't be read or built.

    The text begins with the file or its source and a colon, and names the sample if it is known.
    """


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the samples."""

    name: str
    type_id: int
    shape: tuple[int, ...] = ()
    """Shape of an array or tensor."""
    dtype: str = ""
    """NumPy dtype string of an array or tensor."""

    @property
    def kind(self) -> str:
        """Displayed name of the type."""
        return _TYPES[self.type_id][0]

    @property
    def item_bytes(self) -> int | None:
        """Size of a sample's array in bytes; None if the field is no array."""
        if self.type_id not in (ARRAY, TENSOR):
            return None
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    @property
    def stored_in_pages(self) -> bool:
        """True if the contents are stored in pages, False if in the table of samples."""
        return self.type_id not in (FLOAT, INT)


def metadata_type(fields: Sequence[Field]) -> np.dtype[Any]:
    """Return the structured dtype of one sample, with fields ``f0``, ``f1`` and so on."""
    return np.dtype([(f"f{i}", _TYPES[f.type_id][1]) for i, f in enumerate(fields)], align=True)


class BetonFile:
    """The tables of one file, held in memory with at least 30 bytes per sample."""

    def __init__(self, path: Path) -> None:
        """Read and check the tables.

        Raises ``BetonError`` if the file is truncated, has another format, or stored_in_pages past
        its data.
        """
        self.path = path
        try:
            self.bytes = path.stat().st_size
            with path.open("rb") as file:
                self._read_tables(file)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise BetonError(f"{path}: it can't be read ({reason}).") from error
        except MemoryError as error:
            raise self._damaged("its header has an impossible number of samples") from error

    def _read_tables(self, file: Any) -> None:
        header = self._read_table(file, HEADER, 1, "the header")[0]
        if header["version"] != VERSION or header["num_fields"] == 0:
            raise BetonError(
                f"{self.path}: it is not a .beton file of version {VERSION} (FFCV 1.0)."
            )
        self.page_size = int(header["page_size"])
        self.samples = int(header["num_samples"])
        self.table_at = int(header["alloc_table_ptr"])
        if self.table_at == 0:
            raise BetonError(f"{self.path}: it was not completed. Build it again.")
        if self.table_at > self.bytes:
            raise self._cut_off(f"its allocation table should begin at byte {self.table_at}")
        fields = self._read_table(file, FIELD, int(header["num_fields"]), "the fields")
        self.fields = tuple(self._parse_field(f) for f in fields)
        self.metadata = self._read_table(
            file, metadata_type(self.fields), self.samples, "the samples"
        )
        self.data_at = file.tell()
        file.seek(self.table_at)
        self.allocations = self._read_allocations(file)
        self._check()

    def _read_table(
        self, file: Any, dtype: np.dtype[Any], count: int, table_name: str
    ) -> npt.NDArray[Any]:
        size = dtype.itemsize * count
        if size > self.bytes - file.tell():
            raise self._cut_off(f"{table_name} would not fit")
        return np.frombuffer(file.read(size), dtype=dtype, count=count)

    def _parse_field(self, described: Any) -> Field:
        name = bytes(described["name"]).split(b"\0")[0].decode("ascii", "replace")
        kind = int(described["type_id"])
        if kind not in _TYPES:
            raise BetonError(
                f"{self.path}: its field {name!r} has a custom type, which only the code that "
                "wrote it can read."
            )
        if kind not in (ARRAY, TENSOR):
            return Field(name, kind)
        try:
            shape, dtype = _array_arguments(described["arguments"])
        except (ValueError, TypeError, IndexError) as error:
            raise self._damaged(f"its field {name!r} has no shape") from error
        return Field(name, kind, shape, dtype)

    def _read_allocations(self, file: Any) -> npt.NDArray[Any]:
        expected = self.samples * sum(field.stored_in_pages for field in self.fields)
        size = self.bytes - self.table_at
        if size < expected * ALLOCATION.itemsize:
            raise self._cut_off("its allocation table is incomplete")
        if size > expected * ALLOCATION.itemsize:
            raise self._damaged("its allocation table is longer than its samples need")
        return np.frombuffer(file.read(size), dtype=ALLOCATION)

    # Checks of all pointers.

    def _check(self) -> None:
        if self.samples == 0:
            raise BetonError(f"{self.path}: it holds no samples.")
        if self.page_size == 0 or self.page_size & (self.page_size - 1):
            raise self._damaged(f"its page size is {self.page_size} bytes")
        table, zero = self.allocations, np.uint64(0)
        ends = table["ptr"] + table["size"]
        page = np.uint64(self.page_size)
        last = np.where(table["size"] > zero, ends - np.uint64(1), table["ptr"])
        outside = (table["ptr"] < self.data_at) | (ends > self.table_at) | (ends < table["ptr"])
        self._require_none(table["sample_id"], outside, "points past the data")
        crosses = table["ptr"] // page != last // page
        self._require_none(table["sample_id"], crosses, "is not within one page")
        for index, field in enumerate(self.fields):
            if field.stored_in_pages:
                self._check_field(index, field)

    def _check_field(self, index: int, field: Field) -> None:
        pointers, sizes = self.pointers(index), self.sizes(index)
        table = self.by_address
        at = np.minimum(np.searchsorted(table["ptr"], pointers), max(0, len(table) - 1))
        allocations = table[at]
        samples = np.arange(self.samples)
        # A sample without content has the address of the next one.
        wrong = (allocations["ptr"] != pointers) | ((allocations["size"] != sizes) & (sizes > 0))
        self._require_none(samples, wrong, f"has no {field.kind} where {field.name!r} should be")

    def _require_none(self, samples: npt.NDArray[Any], bad: npt.NDArray[Any], problem: str) -> None:
        if bad.any():
            first = int(samples[int(np.argmax(bad))])
            more = int(bad.sum()) - 1
            others = f" (and {more} more)" if more else ""
            raise self._damaged(f"sample {first}{others} {problem}")

    @cached_property
    def by_address(self) -> npt.NDArray[Any]:
        """Allocations sorted by address."""
        return self.allocations[np.argsort(self.allocations["ptr"], kind="stable")]

    def pointers(self, index: int) -> npt.NDArray[np.uint64]:
        """Return the file offset of each sample's content of a field."""
        column = self.metadata[f"f{index}"]
        kind = self.fields[index].type_id
        pointers: npt.NDArray[np.uint64] = (
            column["data_ptr"] if kind == IMAGE else column["ptr"] if column.dtype.names else column
        )
        return pointers

    def sizes(self, index: int) -> npt.NDArray[np.int64]:
        """Return the bytes of each sample's content of a field; for a JPEG, as allocated."""
        field, column = self.fields[index], self.metadata[f"f{index}"]
        if field.item_bytes is not None:
            return np.full(self.samples, field.item_bytes, dtype=np.int64)
        if field.type_id != IMAGE:
            return column["size"].astype(np.int64)
        table = self.by_address
        at = np.minimum(np.searchsorted(table["ptr"], column["data_ptr"]), len(table) - 1)
        raw = column["height"].astype(np.int64) * column["width"] * 3
        sizes: npt.NDArray[np.int64] = np.where(column["mode"] == RAW, raw, table["size"][at])
        return sizes

    # Queries of loaders.

    @property
    def field_names(self) -> list[str]:
        """Names of all fields."""
        return [field.name for field in self.fields]

    def field_index(self, name: str) -> int:
        """Return the index of a field. Raises ``BetonError``, which lists all fields."""
        if name not in self.field_names:
            raise BetonError(
                f"{self.path}: it has no field {name!r}. "
                f"Its fields are: {', '.join(self.field_names)}."
            )
        return self.field_names.index(name)

    def image_field(self) -> int | None:
        """Return the index of the first image field; None if there is none."""
        return next((i for i, f in enumerate(self.fields) if f.type_id == IMAGE), None)

    def image_sides(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return heights and widths of the images in a field."""
        column = self.metadata[f"f{index}"]
        return column["height"].astype(np.int64), column["width"].astype(np.int64)

    @cached_property
    def pages(self) -> int:
        """Number of pages that contain data."""
        return len(np.unique(self.allocations["ptr"] // np.uint64(self.page_size)))

    def page_of_samples(self) -> npt.NDArray[np.int64]:
        """Return the page of each sample, which is the page of its first field stored in pages."""
        first = next((i for i, f in enumerate(self.fields) if f.stored_in_pages), None)
        if first is None:
            return np.zeros(self.samples, dtype=np.int64)
        pages: npt.NDArray[np.int64] = (self.pointers(first) // np.uint64(self.page_size)).astype(
            np.int64
        )
        return pages

    def _cut_off(self, reason: str) -> BetonError:
        return BetonError(
            f"{self.path}: it is cut off after {self.bytes} bytes ({reason}). "
            "Copy or build it again."
        )

    def _damaged(self, reason: str) -> BetonError:
        return BetonError(f"{self.path}: it is damaged: {reason}. Copy or build it again.")


def _array_arguments(arguments: npt.NDArray[np.uint8]) -> tuple[tuple[int, ...], str]:
    raw = arguments.tobytes()
    sides = np.frombuffer(raw, dtype="<u8", count=32).tolist()
    length = int(np.frombuffer(raw, dtype="<u8", count=1, offset=256)[0])
    ((_, dtype),) = json.loads(raw[264 : 264 + length].decode("ascii"))
    while sides and sides[-1] == 0:
        sides.pop()
    return tuple(sides), str(np.dtype(dtype).str)


def summary(file: BetonFile) -> dict[str, Any]:
    """Return plain values: sizes in bytes, fractions from 0 to 1, None if unknown."""
    used = int(file.allocations["size"].sum())
    return {
        "file": str(file.path),
        "samples": file.samples,
        "bytes": file.bytes,
        "page_bytes": file.page_size,
        "pages": file.pages,
        "page_use": used / (file.pages * file.page_size) if file.pages else None,
        "fields": [_field_summary(file, index) for index in range(len(file.fields))],
    }


def _field_summary(file: BetonFile, index: int) -> dict[str, Any]:
    field = file.fields[index]
    values: dict[str, Any] = {"name": field.name, "kind": field.kind}
    column = file.metadata[f"f{index}"]
    if field.type_id == IMAGE:
        heights, widths = file.image_sides(index)
        values["width"], values["height"] = _range(widths), _range(heights)
        values["jpeg"] = float((column["mode"] == JPEG).mean())
    if field.stored_in_pages:
        values["bytes"] = int(file.sizes(index).sum())
    if field.item_bytes is not None:
        values["shape"], values["dtype"] = list(field.shape), field.dtype
    if field.type_id in (INT, FLOAT):
        values["low"], values["high"] = float(np.nanmin(column)), float(np.nanmax(column))
        values["different"] = len(np.unique(column)) if field.type_id == INT else None
    return values


def _range(sides: Any) -> list[int]:
    """Return minimum, median and maximum."""
    return [int(sides.min()), int(np.median(sides)), int(sides.max())]
