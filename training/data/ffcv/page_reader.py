"""How FFCV's compiled code reaches a file's pages: through the operating system's cache, or through
a few pages in this process's memory.

In place of FFCV's memory managers, which never look at what a read answers, wait for ever where a
reading thread has failed, and build tables of Python objects as long as the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from ffcv.pipeline.compiler import Compiler

from ltui.training.data.ffcv.beton_file import BetonError, BetonFile

AHEAD = 3
"""Batches whose pages are read before they are needed."""
_READERS = 4

Batches = Sequence[npt.NDArray[np.uint64]]


class OsCache:
    """The whole file, mapped: the ranks of a machine share what of it is in memory."""

    def __init__(self, file: BetonFile) -> None:
        table = file.by_address
        # Copy-on-write, so that the compiled code sees one type of array whatever it reads.
        self._map = np.memmap(file.path, "uint8", mode="c")
        self._state = (
            np.asarray(self._map),
            np.ascontiguousarray(table["ptr"]),
            np.ascontiguousarray(table["size"]),
        )

    def compile_reader(self) -> Callable[..., Any]:
        def read(address: Any, state: Any) -> Any:
            size = state[2][np.searchsorted(state[1], address)]
            return state[0][address : address + size]

        compiled: Callable[..., Any] = Compiler.compile(read)
        return compiled

    def begin(self, batches: Batches) -> _NothingToRead:  # noqa: ARG002
        """Of an epoch."""
        return _NothingToRead(self._state)


class _NothingToRead:
    def __init__(self, state: Any) -> None:
        self.state = state

    def need(self, batch: int) -> None:
        """The operating system reads."""

    def end(self) -> None:
        """Nothing to give back."""


class ProcessCache:
    """Only the pages of the batches to come; for an order that keeps to a few at a time."""

    def __init__(self, file: BetonFile) -> None:
        self._file = file
        table = file.by_address
        self._addresses = np.ascontiguousarray(table["ptr"])
        self._sizes = np.ascontiguousarray(table["size"])
        pointing = [i for i, field in enumerate(file.fields) if field.points]
        size = np.uint64(file.page_size)
        self._pages_of = np.stack(
            [(file.pointers(i) // size).astype(np.int64) for i in pointing]
            or [np.zeros(file.samples, np.int64)]
        )

    def compile_reader(self) -> Callable[..., Any]:
        page_size = np.uint64(self._file.page_size)

        def read(address: Any, state: Any) -> Any:
            size = state[2][np.searchsorted(state[1], address)]
            offset = address % page_size
            return state[0][state[3][address // page_size], offset : offset + size]

        compiled: Callable[..., Any] = Compiler.compile(read)
        return compiled

    def begin(self, batches: Batches) -> _PagesInTurn:
        """Of an epoch."""
        needed = [np.unique(self._pages_of[:, b.astype(np.int64)]).tolist() for b in batches]
        return _PagesInTurn(self._file, needed, self._addresses, self._sizes)


class _PagesInTurn:
    """One epoch's pages, each read once, some batches before its first use."""

    def __init__(
        self,
        file: BetonFile,
        needed: Sequence[Sequence[int]],
        addresses: npt.NDArray[Any],
        sizes: npt.NDArray[Any],
    ) -> None:
        self._file = file
        self._needed = needed
        last_use = {page: batch for batch, pages in enumerate(needed) for page in pages}
        self._begins, self._slot_of, slots = _plan(needed, last_use)
        self.memory = np.empty((max(1, slots), file.page_size), dtype=np.uint8)
        page_to_slot = np.zeros(max(self._slot_of, default=0) + 1, dtype=np.uint32)
        for page, slot in self._slot_of.items():
            page_to_slot[page] = slot
        self.state = (self.memory, addresses, sizes, page_to_slot)
        self._fd = os.open(file.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ltui-pages")
        self._reading: dict[int, Future[None]] = {}

    def need(self, batch: int) -> None:
        """Return once the pages of ``batch`` are there; called for one batch after the other."""
        for page in self._begins[batch]:
            self._reading[page] = self._pool.submit(self._read, page)
        for page in self._needed[batch]:
            if page in self._reading:
                self._reading[page].result()
                del self._reading[page]

    def _read(self, page: int) -> None:
        at, size = page * self._file.page_size, self._file.page_size
        into = memoryview(self.memory[self._slot_of[page]])
        wanted, got = min(size, self._file.bytes - at), 0
        while got < wanted:
            try:
                read = os.preadv(self._fd, [into[got:]], at + got)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise BetonError(
                    f"{self._file.path}: bytes {at} to {at + size} can't be read ({reason})."
                ) from error
            if read == 0:
                raise BetonError(f"{self._file.path}: it has become shorter while it was read.")
            got += read

    def end(self) -> None:
        """Give back the threads, the file and the memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._fd)


def _plan(
    needed: Sequence[Iterable[int]], last_use: dict[int, int]
) -> tuple[list[list[int]], dict[int, int], int]:
    """Which pages to begin reading before each batch, the slot of each page, how many slots.

    A slot is free once the last batch that uses its page is decoded.
    """
    begins: list[list[int]] = [[] for _ in needed]
    slot_of: dict[int, int] = {}
    free: list[int] = []
    leaving: list[list[int]] = [[] for _ in range(len(needed) + 1)]
    begun, slots = 0, 0
    for batch in range(len(needed)):
        free += [slot_of[page] for page in leaving[batch]]
        for ahead in range(begun, min(len(needed), batch + AHEAD + 1)):
            for page in needed[ahead]:
                if page in slot_of:
                    continue
                if not free:
                    free.append(slots)
                    slots += 1
                slot_of[page] = free.pop()
                begins[batch].append(page)
                leaving[last_use[page] + 1].append(page)
            begun = ahead + 1
    return begins, slot_of, slots
