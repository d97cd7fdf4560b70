"""Reader of the batches of a ``.beton`` file by FFCV's compiled pipelines, in any sample order.

FFCV's own loader (1.0.2) waits forever if its thread meets an error. It returns views of buffers
that it overwrites two batches later, and may write a batch into pinned memory that is still being
copied to the GPU. This module therefore runs FFCV's compiled code in a thread of its own.

FFCV's memory managers never check the result of a read: of 2,000 images in a file that became
shorter, 1,830 were wrong without an error. They wait forever if a reading thread failed, and build
tables of Python objects as long as the dataset. Only the compiled code of the process cache and
its schedule of pages are used.

All returned batches are copies, so that they stay valid. Imports FFCV.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from ffcv.loader.epoch_iterator import select_buffer
from ffcv.memory_managers import ProcessCacheManager
from ffcv.memory_managers.process_cache.schedule import compute_schedule
from ffcv.pipeline import PipelineSpec
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.graph import Graph
from ffcv.reader import Reader

from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.ffcv_environment import cores_per_rank, keep_torch_threads
from ltui.training.data.ffcv.field_pipelines import DecodeImages, Failed, Key
from ltui.training.rank.resume.loader_positions import describe_inexact_operations

Batch = tuple[Any, ...]
Batches = Sequence[npt.NDArray[np.uint64]]


class FfcvReader:
    """A file and its pipelines, which are compiled once. ``batches`` reads any samples."""

    def __init__(
        self,
        file: BetonFile,
        pipelines: Mapping[str, Sequence[Any]],
        *,
        batch_size: int,
        device: torch.device,
        num_workers: int | None = None,
        batches_ahead: int = 3,
        os_cache: bool = True,
    ) -> None:
        """``pipelines``: FFCV operations of each field to read, beginning with the decoder. A batch
        has the fields in this order. Raises ``BetonError`` if there is no such field, or if the
        first sample can't be decoded.
        """
        self.file = file
        self.columns = [file.field_index(name) for name in pipelines]
        """Column indices of the fields of a batch."""
        self.batch_size = batch_size
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The stream of the copies to the GPU; None on the CPU.

        All epochs share it: torch keeps the freed memory of a stream for that stream alone.
        """
        self.batches_ahead = batches_ahead
        max_threads: int = vars(numba.config)["NUMBA_NUM_THREADS"]
        self.threads = min(num_workers or cores_per_rank(), max_threads)
        self.inexact = describe_inexact_operations(o for chain in pipelines.values() for o in chain)
        """Text about operations that a resume can't restore exactly; None if there are none."""
        self.pages = OsCache(file) if os_cache else ProcessCache(file)
        with keep_torch_threads():
            Compiler.set_num_threads(self.threads)
            self._compile(pipelines)
            next(self.batches([0]))

    def _compile(self, pipelines: Mapping[str, Sequence[Any]]) -> None:
        reader = Reader(str(self.file.path))
        self.metadata = reader.metadata
        specs = {}
        for name, operations in pipelines.items():
            decoder, *transforms = operations
            specs[name] = PipelineSpec(name, decoder=decoder, transforms=transforms)
        numbers = {name: number for number, name in enumerate(reader.handlers)}
        self.graph = Graph(
            specs, reader.handlers, numbers, self.metadata, self.pages.compile_reader()
        )
        _, code = self.graph.collect_requirements()
        self.code, self.outputs = self.graph.codegen_all(code)

    def set_side(self, side: int) -> None:
        """Set the resolution of the images from the next epoch on, without compiling again."""
        for node in self.graph.root_nodes:
            if isinstance(node.decoder, DecodeImages):
                node.decoder.transform = replace(node.decoder.transform, side=side)

    def batches(self, order: Sequence[int], key: int = 0) -> Iterator[Batch]:
        """Yield the batches of these samples. The last one may be smaller.

        ``key`` determines the random augmentation. Close the iterator if it is not read to its end.
        """
        numbers = np.asarray(order, dtype=np.uint64)
        batches = [
            numbers[i : i + self.batch_size] for i in range(0, len(numbers), self.batch_size)
        ]
        epoch = _Epoch(self, batches, key)
        thread = ThreadPoolExecutor(1, "ltui-ffcv", numba.set_num_threads, (self.threads,))
        unread = iter(range(len(batches)))
        reading: deque[Future[tuple[Batch, Any]]] = deque()
        try:
            while True:
                next_numbers = itertools.islice(unread, epoch.slots - len(reading))
                reading.extend(thread.submit(epoch.read, number) for number in next_numbers)
                if not reading:
                    return
                yield epoch.on_current_stream(*reading.popleft().result())
        finally:
            thread.shutdown(cancel_futures=True)
            epoch.close()


class _Epoch:
    """The buffers and pages of an epoch, and the pipelines that run on them."""

    def __init__(
        self, reader: FfcvReader, batches: Sequence[npt.NDArray[np.uint64]], key: int
    ) -> None:
        self._reader = reader
        self._batches = batches
        self.slots = reader.batches_ahead + 2
        """Number of batches that have buffers."""
        self.pages = reader.pages.begin(batches)
        self._copied: list[Any] = [None] * self.slots
        leading = self.slots, max(map(len, batches), default=1)
        self._buffers = _Buffers(leading, pin=reader.stream is not None, key=key)
        requirements, _ = reader.graph.collect_requirements()
        fields = {node.id: node.field_name for node in reader.graph.root_nodes}
        with self._on_stream():
            # On another stream, a buffer could be memory that a running kernel still uses.
            self._memory = {
                f"{argument}_{node}": self._buffers.allocate(query, fields.get(node, ""))
                for kind, argument in (("operation", "memory"), ("shared", "shared_memory"))
                for node, query in requirements[kind].items()
            }
        """Buffers by the argument of the compiled code."""

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which memory and work on the GPU belong to the copies' stream."""
        stream = self._reader.stream
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def close(self) -> None:
        """Release the pages. Wait for copies, because the buffers are freed after this call.

        torch does not know that these copies read pinned memory: they read NumPy's views of it.
        """
        self.pages.end()
        if self._reader.stream is not None:
            # An error of the GPU is raised again by every later call, so also where it matters.
            with contextlib.suppress(RuntimeError):
                self._reader.stream.synchronize()

    def read(self, number: int) -> tuple[Batch, Any]:
        """Return a batch, and the event after which it is on the GPU. Runs in the thread."""
        samples, slot = self._batches[number], number % self.slots
        if self._copied[slot] is not None:
            self._copied[slot].synchronize()  # only this thread waits, not the training loop
        try:
            self.pages.need(number)
            with self._on_stream():
                result = tuple(self._buffers.detach(v) for v in self._run(samples, slot))
        except BetonError:
            raise
        except Exception as error:
            raise self._find_failed_sample(error, samples, slot) from error
        self._require_decoded(samples, slot)
        done = None
        if self._reader.stream is not None:
            done = self._copied[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._reader.stream)
        return result, done

    def _run(self, samples: npt.NDArray[np.uint64], slot: int) -> tuple[Any, ...]:
        values = {
            "batch_indices": samples,
            "storage_state": self.pages.state,
            "metadata": self._reader.metadata,
            **{k: select_buffer(b, slot, len(samples)) for k, b in self._memory.items()},
        }
        for stage, defined in self._reader.code:
            for node, result in zip(defined, stage(**values), strict=True):
                values[f"result_{node}"] = result
        return tuple(values[f"result_{node}"] for node in self._reader.outputs)

    def _require_decoded(self, samples: npt.NDArray[np.uint64], slot: int) -> None:
        path = self._reader.file.path
        for field, failed in self._buffers.failed:
            bad = np.flatnonzero(failed[slot][: len(samples)])
            if len(bad):
                raise BetonError(
                    f"{path}: sample {samples[bad[0]]}: the image in {field!r} is damaged and "
                    f"can't be decoded. `ltui data verify {path}` names every such sample."
                )

    def _find_failed_sample(
        self, error: Exception, samples: npt.NDArray[np.uint64], slot: int
    ) -> BetonError:
        """Run each sample alone and return an error that names the failed one."""
        text = f"{type(error).__name__}: {error}"
        path = self._reader.file.path
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return BetonError(f"{path}: {text}")
        bad = []
        for i in range(len(samples)):
            try:
                self._run(samples[i : i + 1], slot)
            except Exception:  # noqa: BLE001  (any error belongs to this sample)
                bad.append(int(samples[i]))
        where = f"sample {bad[0]}" if bad else f"one of the samples {samples.tolist()}"
        return BetonError(f"{path}: {where}: {text}")

    def on_current_stream(self, batch: Batch, done: Any) -> Batch:
        """Return ``batch`` for use on the stream of the training loop."""
        if done is not None:
            stream = torch.cuda.current_stream(self._reader.device)
            stream.wait_event(done)
            for value in batch:
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    # It was created on another stream and may be freed while this one uses it.
                    value.record_stream(stream)
        return batch


class _Buffers:
    """The memory that operations request, with a part for each slot."""

    def __init__(self, leading: tuple[int, int], pin: bool, key: int) -> None:
        self._leading, self._pin, self._key = leading, pin, key
        self._ranges: list[tuple[int, int]] = []
        """Begin and end of each buffer in memory."""
        self.failed: list[tuple[str, npt.NDArray[np.int32]]] = []
        """Field, and the decoder's error code of each sample in each slot."""

    def allocate(self, query: Any, field: str) -> Any:
        """Return the memory of an operation that works on ``field``."""
        if query is None:
            return None
        if isinstance(query, (tuple, list)):
            return tuple(self.allocate(part, field) for part in query)
        as_tensor = isinstance(query.dtype, torch.dtype)
        dtype = query.dtype if as_tensor else torch.from_numpy(np.empty(0, query.dtype)).dtype
        device = torch.device(query.device or "cpu")
        buffer = torch.empty(
            (*self._leading, *query.shape),
            dtype=dtype,
            device=device,
            pin_memory=self._pin and device.type == "cpu",
        )
        self._ranges.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        if as_tensor:
            return buffer
        array = buffer.numpy()
        if isinstance(query, Key):
            array.fill(self._key)
        elif isinstance(query, Failed):
            self.failed.append((field, array))
        return array

    def detach(self, value: Any) -> Any:
        """Return ``value``, cloned if it is a view of a buffer."""
        if isinstance(value, np.ndarray):
            return value.copy() if self._contains(value.ctypes.data) else value
        if isinstance(value, torch.Tensor):
            return value.clone() if self._contains(value.data_ptr()) else value
        return value

    def _contains(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self._ranges)


# The pages of the file.

AHEAD = 3
"""Number of batches for which pages are read ahead."""
_PAGE_READERS = 4


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
        """Return the compiled function that reads the content at an address.

        FFCV's own changes numba's type of writable arrays for the whole process.
        """

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


class ProcessCache(ProcessCacheManager):  # type: ignore[misc]
    """Only the pages of the next batches, for an order that uses a few pages at a time."""

    def __init__(self, file: BetonFile) -> None:
        # ``compile_reader`` reads the page size from it.
        self.reader = self._file = file
        columns = [i for i, field in enumerate(file.fields) if field.stored_in_pages]
        size = np.uint64(file.page_size)
        self._pages_of = np.stack(
            [(file.pointers(i) // size).astype(np.int64) for i in columns]
            or [np.zeros(file.samples, np.int64)]
        )

    def begin(self, batches: Batches) -> _PagesInTurn:
        """Start an epoch."""
        needed = [np.unique(self._pages_of[:, b.astype(np.int64)]).tolist() for b in batches]
        return _PagesInTurn(self._file, needed)


class _PagesInTurn:
    """Pages of one epoch. Each is read once, some batches before its first use."""

    def __init__(self, file: BetonFile, needed: Sequence[Sequence[int]]) -> None:
        self._file = file
        self._needed = needed
        self._plan = compute_schedule(needed, AHEAD)
        self._slot_of = self._plan.page_to_slot
        self.memory = np.empty((max(1, self._plan.num_slots), file.page_size), dtype=np.uint8)
        page_to_slot = np.zeros(max(self._slot_of, default=0) + 1, dtype=np.uint32)
        page_to_slot[list(self._slot_of)] = list(self._slot_of.values())
        table = file.by_address
        addresses, sizes = np.ascontiguousarray(table["ptr"]), np.ascontiguousarray(table["size"])
        self.state = (self.memory, addresses, sizes, page_to_slot)
        self._fd = os.open(file.path, os.O_RDONLY)
        self._pool = ThreadPoolExecutor(_PAGE_READERS, thread_name_prefix="ltui-pages")
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
