"""Reader of the batches of a ``.beton`` file by FFCV's compiled pipelines, in any sample order.

FFCV's own loader thread only handles the end of its iteration. After any other error, the training
loop waits forever. It also returns views of buffers that it overwrites two batches later, and may
write a batch into pinned memory that is still being copied to the GPU. This module therefore uses
its own thread to run FFCV's code.

All returned batches are copies, so that they stay valid. Imports FFCV.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from ffcv.pipeline import PipelineSpec
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.graph import Graph
from ffcv.reader import Reader

from ltui.training.data.cpu_memory_limits import cores_per_rank
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.page_reader import OsCache, ProcessCache
from ltui.training.data.ffcv.pipeline_operations import DecodeImages, Failed, Key, PerThread, Shared
from ltui.training.rank.resume.ffcv_random_operations import describe_inexact_operations

Batch = tuple[Any, ...]
_ALIVE_CHECK_S = 5.0
"""Seconds to wait for a batch before checking that the thread is alive."""
_open_epochs: weakref.WeakSet[_Epoch] = weakref.WeakSet()


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
        self.batches_ahead = batches_ahead
        max_threads: int = vars(numba.config)["NUMBA_NUM_THREADS"]
        self.threads = min(num_workers or cores_per_rank(), max_threads)
        self.inexact = describe_inexact_operations(o for chain in pipelines.values() for o in chain)
        """Text about operations that a resume can't restore exactly; None if there are none."""
        self.pages = OsCache(file) if os_cache else ProcessCache(file)
        torch_threads = torch.get_num_threads()
        try:
            Compiler.set_num_threads(self.threads)
            self._compile(pipelines)
            next(self.batches([0]))
        finally:
            # FFCV sets the number of torch's threads to its own.
            torch.set_num_threads(torch_threads)

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
                node.decoder.side = side

    def batches(self, order: Sequence[int], key: int = 0) -> Iterator[Batch]:
        """Yield the batches of these samples. The last one may be smaller.

        ``key`` determines the random augmentation. Close the iterator if it is not read to its end.
        """
        numbers = np.asarray(order, dtype=np.uint64)
        batches = [
            numbers[i : i + self.batch_size] for i in range(0, len(numbers), self.batch_size)
        ]
        epoch = _Epoch(self, batches, key)
        try:
            yield from epoch
        finally:
            epoch.close()


class _Memory:
    """The buffers of an epoch and their addresses."""

    def __init__(self, reader: FfcvReader, key: int, longest: int) -> None:
        self._batch_size = longest
        self._slots = reader.batches_ahead + 2
        self._threads = reader.threads
        self._pin = reader.device.type == "cuda"
        self._key = key
        self._ranges: list[tuple[int, int]] = []
        self.failed: list[tuple[str, npt.NDArray[np.int32]]] = []
        """Field, and the decoder's error code of each sample of the batch."""
        self._field = ""
        requirements, _ = reader.graph.collect_requirements()
        fields = {node.id: node.field_name for node in reader.graph.root_nodes}
        self.operation = {
            node: self._allocate(query, fields.get(node, ""))
            for node, query in requirements["operation"].items()
        }
        self.shared = {
            node: self._allocate(query, "") for node, query in requirements["shared"].items()
        }

    def _allocate(self, query: Any, field: str) -> Any:
        if query is None:
            return None
        if isinstance(query, (tuple, list)):
            return tuple(self._allocate(part, field) for part in query)
        if isinstance(query, Shared):
            return _SharedByBatches(self._allocate_shared(query, field))
        shape = (self._batch_size, *query.shape)
        if isinstance(query.dtype, torch.dtype):
            device = query.device
            pin = self._pin and (device is None or torch.device(device).type == "cpu")
            tensors = [
                torch.empty(shape, dtype=query.dtype, device=device, pin_memory=pin)
                for _ in range(self._slots)
            ]
            return [self._register(tensor) for tensor in tensors]
        dtype = torch.from_numpy(np.empty(0, dtype=query.dtype)).dtype
        buffer = torch.empty((self._slots, *shape), dtype=dtype, pin_memory=self._pin)
        return self._register(buffer).numpy()

    def _allocate_shared(self, query: Shared, field: str) -> npt.NDArray[Any]:
        if isinstance(query, Key):
            return np.array([self._key], dtype=np.uint64)
        if isinstance(query, Failed):
            failed = np.zeros(self._batch_size, dtype=np.int32)
            self.failed.append((field, failed))
            return failed
        leading = (self._threads,) if isinstance(query, PerThread) else ()
        return np.empty((*leading, *query.shape), dtype=query.dtype)

    def _register(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = tensor.data_ptr()
        self._ranges.append((begin, begin + tensor.nbytes))
        return tensor

    def detach(self, value: Any) -> Any:
        """Return ``value``, cloned if it is a view of a buffer."""
        if isinstance(value, np.ndarray):
            return value.copy() if self._contains(value.ctypes.data) else value
        if isinstance(value, torch.Tensor):
            return value.clone() if self._contains(value.data_ptr()) else value
        return value

    def _contains(self, address: int) -> bool:
        return any(begin <= address < end for begin, end in self._ranges)


class _SharedByBatches:
    """Memory that all batches share."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array


def _batch_memory(memory: Any, slot: int, count: int) -> Any:
    """Return the part of an operation's memory that belongs to a batch."""
    if memory is None:
        return None
    if isinstance(memory, tuple):
        return tuple(_batch_memory(part, slot, count) for part in memory)
    if isinstance(memory, _SharedByBatches):
        return memory.array
    return memory[slot][:count]


class _Epoch(threading.Thread):
    """Runs the pipelines ahead of the training loop, which iterates it."""

    def __init__(
        self, reader: FfcvReader, batches: Sequence[npt.NDArray[np.uint64]], key: int
    ) -> None:
        super().__init__(daemon=True, name="ltui-ffcv")
        self._reader = reader
        self._batches = batches
        self._memory = _Memory(reader, key, max((len(b) for b in batches), default=1))
        self._pages = reader.pages.begin(batches)
        self._ready: queue.Queue[Any] = queue.Queue(reader.batches_ahead)
        self._closed = threading.Event()
        self._stream: Any = None
        self._copied: list[Any] = [None] * (reader.batches_ahead + 2)
        if reader.device.type == "cuda":
            self._stream = torch.cuda.Stream(reader.device)  # type: ignore[no-untyped-call]
        _open_epochs.add(self)
        self.start()

    # Methods of the thread.

    def run(self) -> None:
        try:
            numba.set_num_threads(self._reader.threads)
            for number, samples in enumerate(self._batches):
                if not self._hand_over(self._batch(number, samples)):
                    return
            self._hand_over(None)
        except BaseException as error:  # noqa: BLE001  (any error is passed to the training loop)
            self._hand_over(error)

    def _hand_over(self, item: Any) -> bool:
        """Pass ``item`` to the training loop. Return False if the epoch is closed."""
        if not self._closed.is_set():
            self._ready.put(item)
        return not self._closed.is_set()

    def _batch(self, number: int, samples: npt.NDArray[np.uint64]) -> Any:
        slot = number % len(self._copied)
        if self._copied[slot] is not None:
            self._copied[slot].synchronize()  # only this thread waits, not the training loop
        try:
            self._pages.need(number)
            stream = (
                contextlib.nullcontext()
                if self._stream is None
                else torch.cuda.stream(self._stream)
            )
            with stream:
                result = tuple(self._memory.detach(v) for v in self._run(samples, slot))
        except BetonError:
            raise
        except Exception as error:
            raise self._find_failed_sample(error, samples, slot) from error
        self._require_decoded(samples)
        done = None
        if self._stream is not None:
            done = self._copied[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return result, done

    def _run(self, samples: npt.NDArray[np.uint64], slot: int) -> tuple[Any, ...]:
        count = len(samples)
        memory = self._memory
        values = {
            "batch_indices": samples,
            "storage_state": self._pages.state,
            "metadata": self._reader.metadata,
            **{
                f"memory_{n}": _batch_memory(part, slot, count)
                for n, part in memory.operation.items()
            },
            **{
                f"shared_memory_{n}": _batch_memory(part, slot, count)
                for n, part in memory.shared.items()
            },
        }
        for stage, defined in self._reader.code:
            for node, result in zip(defined, stage(**values), strict=True):
                values[f"result_{node}"] = result
        return tuple(values[f"result_{node}"] for node in self._reader.outputs)

    def _require_decoded(self, samples: npt.NDArray[np.uint64]) -> None:
        path = self._reader.file.path
        for field, failed in self._memory.failed:
            bad = np.flatnonzero(failed[: len(samples)])
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

    # Methods of the training loop.

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Batch:
        item = self._take()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        batch, done = item
        if done is not None:
            stream = torch.cuda.current_stream(self._reader.device)
            stream.wait_event(done)
            for value in batch:
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    # It was created on another stream and may be freed while this one uses it.
                    value.record_stream(stream)
        return batch  # type: ignore[no-any-return]

    def _take(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=_ALIVE_CHECK_S)
            except queue.Empty:
                if not self.is_alive() and self._ready.empty():
                    text = f"{self._reader.file.path}: the reader thread has died."
                    raise BetonError(text) from None

    def close(self) -> None:
        """Stop the thread. If it still decoded while Python exits, the process would abort."""
        if threading.current_thread() is self:
            return
        self._closed.set()
        while self.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self.join(0.01)
        if self in _open_epochs:
            _open_epochs.discard(self)
            self._pages.end()


@atexit.register
def _close_all() -> None:
    for epoch in list(_open_epochs):
        epoch.close()
