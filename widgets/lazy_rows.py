"""Rows of a large table, of which only those that are drawn are built. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

Row = TypeVar("Row")

SAMPLES = 24
"""Number of rows, from the first one, that decide which columns a table has."""


class LazyRows(Sequence[Row], Generic[Row]):
    """A sequence of rows that are built when they are needed, each of them once."""

    def __init__(
        self, keys: Sequence[str], build: Callable[[int], Row], samples: Sequence[int] = ()
    ) -> None:
        """``keys``: the key of each row. ``build``: returns the row at an index. ``samples``:
        further rows, with long texts, that the widths of columns depend on."""
        self.keys = tuple(keys)
        self._build = build
        self._samples = samples
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._rows:
            self._rows[index] = self._build(index)
        return self._rows[index]

    def samples(self) -> tuple[Row, ...]:
        """Return the rows that decide which columns a table has."""
        indices = {*range(min(SAMPLES, len(self))), *self._samples}
        return tuple(self[index] for index in sorted(indices))
