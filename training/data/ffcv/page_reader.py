"""Access of FFCV's compiled code to a file's pages: by the page cache, or in this process's memory.

This module replaces FFCV's memory managers (1.0.2). They never check the result of a read: of 2,000
images in a file that became shorter, 1,830 were wrong without an error. They wait forever if a
reading thread failed, and build tables of Python objects as long as the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from ffcv.memory_managers.process_cache.schedule import compute_schedule
from ffcv.pipeline.compiler import Compiler

from ltui.training.data.ffcv.beton_file import BetonError, BetonFile

AHEAD = 3
"""Number of batches for which pages are read ahead."""
_READERS = 4

Batches = Sequence[npt.NDArray[np.uint64]]


class OsCache:
    """The complete file, mapped. The ranks of a machine share its pages in memory."""

    def __init__(self, file: BetonFile) -> None:
        table = file.by_address
        # Copy-on-write, so that the compiled code always gets the same type of array.
        self._map = np.memmap(file.path, "uint8", mode="c")
        self.state = (
            np.asarray(self._map),
            np.ascontiguousarray(table["ptr"]),
            np.ascontiguousarray(table["size"]),
        )

    def compile_reader(self) -> Callable[..., Any]:
        """Return the compiled function that reads the content at an address."""

        def read(address: Any, state: Any) -> Any:
            size = state[2][np.searchsorted(state[1], address)]
            return state[0][address : address + size]

        compiled: Callable[..., Any] = Compiler.compile(read)
        return compiled

    def begin(self, batches: Batches) -> OsCache:  # noqa: ARG002
        """Start an epoch."""
        return self

    def need(self, batch: int) -> None:
        """Do nothing: the operating system reads the pages."""

    def end(self) -> None:
        """Do nothing: there is nothing to release."""


class ProcessCache:
    """Only the pages of the next batches, for an order that uses a few pages at a time."""

    def __init__(self, file: BetonFile) -> None:
        self._file = file
        table = file.by_address
        self._addresses = np.ascontiguousarray(table["ptr"])
        self._sizes = np.ascontiguousarray(table["size"])
        columns = [i for i, field in enumerate(file.fields) if field.stored_in_pages]
        size = np.uint64(file.page_size)
        self._pages_of = np.stack(
            [(file.pointers(i) // size).astype(np.int64) for i in columns]
            or [np.zeros(file.samples, np.int64)]
        )

    def compile_reader(self) -> Callable[..., Any]:
        """Return the compiled function that reads the content at an address."""
        page_size = np.uint64(self._file.page_size)

        def read(address: Any, state: Any) -> Any:
            size = state[2][np.searchsorted(state[1], address)]
            offset = address % page_size
            return state[0][state[3][address // page_size], offset : offset + size]

        compiled: Callable[..., Any] = Compiler.compile(read)
        return compiled

    def begin(self, batches: Batches) -> _PagesInTurn:
        """Start an epoch."""
        needed = [np.unique(self._pages_of[:, b.astype(np.int64)]).tolist() for b in batches]
        return _PagesInTurn(self._file, needed, self._addresses, self._sizes)


class _PagesInTurn:
    """Pages of one epoch. Each is read once, some batches before its first use."""

    def __init__(
        self,
        file: BetonFile,
        needed: Sequence[Sequence[int]],
        addresses: npt.NDArray[Any],
        sizes: npt.NDArray[Any],
    ) -> None:
        self._file = file
        self._needed = needed
        self._plan = compute_schedule(needed, AHEAD)
        self._slot_of = self._plan.page_to_slot
        self.memory = np.empty((max(1, self._plan.num_slots), file.page_size), dtype=np.uint8)
        page_to_slot = np.zeros(max(self._slot_of, default=0) + 1, dtype=np.uint32)
        page_to_slot[list(self._slot_of)] = list(self._slot_of.values())
        self.state = (self.memory, addresses, sizes, page_to_slot)
        self._fd = os.open(file.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ltui-pages")
        self._reading: dict[int, Future[None]] = {}

    def need(self, batch: int) -> None:
        """Wait until the pages of ``batch`` are in memory. Called for successive batches."""
        for page in self._plan.can_prefetch_at[batch]:
            self._reading[page] = self._pool.submit(self._read, page)
        for page in self._needed[batch]:
            if page in self._reading:
                self._reading[page].result()
                del self._reading[page]

    def _read(self, page: int) -> None:
        at, size = page * self._file.page_size, self._file.page_size
        into = memoryview(self.memory[self._slot_of[page]])
        expected, got = min(size, self._file.bytes - at), 0
        while got < expected:
            try:
                read = os.preadv(self._fd, [into[got:]], at + got)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise BetonError(
                    f"{self._file.path}: bytes {at} to {at + size} can't be read ({reason})."
                ) from error
            if read == 0:
                raise BetonError(f"{self._file.path}: it became shorter while it was read.")
            got += read

    def end(self) -> None:
        """Stop the threads and close the file."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)
