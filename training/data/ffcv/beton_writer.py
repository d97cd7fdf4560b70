"""Writer of ``.beton`` files from an indexed dataset, with several processes. The file is atomic.

FFCV's own writer waits forever if one of its processes raises, and keeps its table in ``/dev/shm``,
which is small in containers. This writer uses FFCV's page allocator and field formats, but its own
processes. A JPEG that is not resized is stored unchanged. Imports FFCV.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from ffcv.fields import FloatField, IntField, NDArrayField, RGBImageField
from ffcv.fields.rgb_image import encode_jpeg, resizer
from ffcv.libffcv import imdecode
from ffcv.memory_allocator import MemoryAllocator
from ffcv.types import get_metadata_type
from PIL import Image, UnidentifiedImageError

from ltui.training.data.atomic_file import atomic_write
from ltui.training.data.ffcv.beton_file import (
    ALLOCATION,
    ARRAY,
    FIELD,
    FLOAT,
    HEADER,
    IMAGE,
    INT,
    JPEG,
    RAW,
    VERSION,
)
from ltui.training.data.ffcv.beton_sources import ImageFile, IndexedDataset, SourceError

_CHUNK = 32
"""Number of samples that a worker takes at a time."""
_POLL_S = 0.1
"""Seconds to wait for a result of the workers before their state is checked."""
_PR_SET_PDEATHSIG = 1
_TYPES = {IMAGE: RGBImageField, INT: IntField, FLOAT: FloatField}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """Options of the storage of samples."""

    images: str = "jpeg"
    """``jpeg``, ``raw`` or ``mixed``, which stores every second image raw."""
    max_side: int | None = None
    """Maximum length of an image's longer side in pixels. Larger images are resized."""
    quality: int = 90
    """Quality of encoded JPEGs, 1 to 100."""
    page_bytes: int = 8 << 20
    workers: int = 1
    skip_bad: bool = False
    """Leave out samples that can't be read, instead of failing."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read or stored."""

    index: int
    name: str
    """File of the sample; empty if it has none."""
    what: str

    def __str__(self) -> str:
        return f"sample {self.index}" + (f" ({self.name})" if self.name else "") + f": {self.what}"


class BadSamplesError(ValueError):
    """Some samples can't be stored."""

    def __init__(self, bad: Sequence[BadSample]) -> None:
        self.bad = tuple(bad)
        super().__init__("; ".join(str(b) for b in bad[:3]))


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    type_id: int
    field: Any


def write(
    dataset: IndexedDataset,
    path: Path,
    options: WriteOptions,
    progress: Callable[[int, int], None],
) -> list[BadSample]:
    """Write ``dataset`` to ``path`` and return the samples that were left out.

    ``progress(done, samples)`` is called periodically. Raises ``BadSamplesError`` and writes no
    file if there are bad samples and ``skip_bad`` is not set, ``SourceError`` if samples have a
    type that can't be stored, and ``OSError``.
    """
    columns = _columns(dataset)
    with atomic_write(path) as part:
        bad = _WriteJob(dataset, part, columns, options, progress).run()
        if bad and not options.skip_bad:
            raise BadSamplesError(bad)
    return bad


# Columns of the samples.


def _columns(dataset: IndexedDataset) -> list[_Column]:
    """Return the columns of the first readable sample."""
    first, error = None, None
    for index in range(min(len(dataset), 100)):
        try:
            first = dataset[index]
            break
        except Exception as failed:  # noqa: BLE001  (reported as the error of that sample later)
            error = failed
    if first is None:
        raise BadSamplesError([BadSample(0, _name(dataset, 0), f"{type(error).__name__}: {error}")])
    values = parts(first)
    columns: list[_Column] = []
    for place, (key, value) in enumerate(values):
        kind = kind_of(value)
        if kind is None:
            raise SourceError(
                f"sample 0 of {type(dataset).__name__}",
                f"its part {place} is a {type(value).__name__}, which can't be stored.",
                "Parts may be images, integers, floats, and arrays or tensors of equal shape.",
            )
        name = key or _default_name(kind, place, {c.name for c in columns})
        columns.append(_Column(name[:16], kind, _field(kind, value)))
    return columns


def parts(sample: Any) -> list[tuple[str, Any]]:
    """Return name (empty if it has none) and value of each part of a sample."""
    if isinstance(sample, dict):
        return [(str(key), value) for key, value in sample.items()]
    if isinstance(sample, (tuple, list)):
        names = getattr(sample, "_fields", [""] * len(sample))
        return list(zip(names, sample, strict=True))
    return [("", sample)]


def kind_of(value: Any) -> int | None:
    """Return the type id with which a value is stored; None if it can't be stored."""
    if isinstance(value, (ImageFile, Image.Image)):
        return IMAGE
    if isinstance(value, (bool, int, np.integer)):
        return INT
    if isinstance(value, (float, np.floating)):
        return FLOAT
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return None
    if value.ndim == 0:
        return INT if value.dtype.kind in "iub" else FLOAT
    return IMAGE if _as_pixels(value) is not None else ARRAY


def _as_pixels(value: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    """Return uint8 pixels (height, width, 3) of such an array or of (3, height, width), or None."""
    if value.dtype != np.uint8 or value.ndim != 3:
        return None
    if value.shape[2] == 3:
        return value
    return value.transpose(1, 2, 0) if value.shape[0] == 3 else None


def _default_name(kind: int, place: int, taken: set[str]) -> str:
    name = {IMAGE: "image", INT: "label"}.get(kind, f"field{place}")
    return name if name not in taken else f"field{place}"


def _field(kind: int, value: Any) -> Any:
    if kind != ARRAY:
        return _TYPES[kind]()
    array = np.asarray(value)
    return NDArrayField(array.dtype, array.shape)


def _name(dataset: Any, index: int) -> str:
    name_of = getattr(dataset, "name_of", None)
    return str(name_of(index)) if callable(name_of) else ""


# Storing one sample.


def pixels_of(value: Any, max_side: int | None) -> npt.NDArray[np.uint8]:
    """Return the pixels (height, width, 3) of an image, resized if its longer side is too long."""
    if isinstance(value, ImageFile):
        value = Image.open(value.path)
    if isinstance(value, Image.Image):
        pixels = np.asarray(value.convert("RGB"))
    else:
        array = _as_pixels(np.asarray(value))
        if array is None:
            raise ValueError(f"it is not a uint8 image; its shape is {np.asarray(value).shape}")
        pixels = array
    return np.ascontiguousarray(resizer(pixels, max_side))


def jpeg_of(value: Any, max_side: int | None) -> tuple[npt.NDArray[np.uint8], int, int] | None:
    """Return the bytes of an image file with height and width if it can be stored unchanged.

    That requires a small enough JPEG in colour that FFCV's decoder accepts. Otherwise return None.
    """
    if not isinstance(value, ImageFile):
        return None
    data = value.path.read_bytes()
    image = Image.open(io.BytesIO(data))
    width, height = image.size
    if image.format != "JPEG" or image.mode != "RGB" or max(image.size) > (max_side or 65535):
        return None
    source, pixels = np.frombuffer(data, np.uint8), np.empty(height * width * 3, np.uint8)
    return (
        (source, height, width)
        if imdecode(source, pixels, height, width, height, width) == 0
        else None
    )


class _Storer:
    """Stores samples in pages and in the table of samples."""

    def __init__(
        self,
        columns: Sequence[_Column],
        options: WriteOptions,
        table: npt.NDArray[Any],
        allocator: Any,
    ) -> None:
        self._columns, self._options = columns, options
        self._table, self._allocator = table, allocator

    def store(self, index: int, sample: Any) -> None:
        """Store a sample. Raises ``ValueError`` if it does not fit the columns or a page."""
        values = [value for _, value in parts(sample)]
        if len(values) != len(self._columns):
            raise ValueError(
                f"it has {len(values)} parts, but the first sample has {len(self._columns)}"
            )
        writers = [self._prepare(c, v, index) for c, v in zip(self._columns, values, strict=True)]
        try:
            for _ in range(2):
                self._allocator.set_current_sample(index)
                try:
                    for number, write_value in enumerate(writers):
                        write_value(self._table[f"f{number}"][index : index + 1])
                    return
                except MemoryError:  # it does not fit into the current page: try again in a new one
                    continue
            raise ValueError("it is larger than a page; build with a larger --page-size")
        except Exception:
            self._remove_allocations(index)
            raise

    def _remove_allocations(self, index: int) -> None:
        allocations = self._allocator.allocations
        while allocations and allocations[-1][0] == index:
            allocations.pop()

    def _prepare(self, column: _Column, value: Any, index: int) -> Callable[[Any], None]:
        """Return a function that writes the value. All errors due to the value are raised here."""
        if column.type_id == IMAGE:
            return self._image(value, index)
        if column.type_id == ARRAY:
            array = np.ascontiguousarray(value)
            if array.shape != column.field.shape or array.dtype != column.field.dtype:
                raise ValueError(
                    f"{column.name!r} is {array.dtype}{list(array.shape)}, but in the first sample "
                    f"{column.field.dtype}{list(column.field.shape)}"
                )
            return lambda row: column.field.encode(row, array, self._allocator.malloc)
        number = int(value) if column.type_id == INT else float(value)

        def write_number(row: Any) -> None:
            row[0] = number

        return write_number

    def _image(self, value: Any, index: int) -> Callable[[Any], None]:
        options = self._options
        raw = options.images == "raw" or (options.images == "mixed" and index % 2 == 1)
        jpeg = None if raw else jpeg_of(value, options.max_side)
        if jpeg is not None:
            data, height, width = jpeg
        else:
            pixels = pixels_of(value, options.max_side)
            height, width = pixels.shape[:2]
            if max(height, width) > 65535:
                raise ValueError(f"it has {width} x {height} pixels; the maximum is 65535")
            data = pixels.reshape(-1) if raw else encode_jpeg(pixels, options.quality)

        def write_image(row: Any) -> None:
            row["mode"], row["height"], row["width"] = RAW if raw else JPEG, height, width
            row["data_ptr"], memory = self._allocator.malloc(data.nbytes)
            memory[:] = data

        return write_image


# The processes.


class _WriteJob:
    """Writes one file."""

    def __init__(
        self,
        dataset: IndexedDataset,
        path: Path,
        columns: Sequence[_Column],
        options: WriteOptions,
        progress: Callable[[int, int], None],
    ) -> None:
        self._dataset, self._path, self._columns = dataset, path, columns
        self._options, self._progress = options, progress
        self._samples = len(dataset)
        self._type = get_metadata_type([c.field for c in columns])
        # Shared with the forked processes.
        self._memory = mmap.mmap(-1, max(1, self._samples * self._type.itemsize))
        self._table = np.frombuffer(self._memory, dtype=self._type, count=self._samples)
        fork = multiprocessing.get_context("fork")
        self._next, self._done = fork.Value(ctypes.c_uint64, 0), fork.Value(ctypes.c_uint64, 0)
        self._results: Any = fork.Queue()
        """Allocations of finished workers, bad samples, and texts of errors of the output file."""
        self._process = fork.Process
        begin = HEADER.itemsize + FIELD.itemsize * len(columns)
        self._allocator = MemoryAllocator(
            str(path), begin + self._samples * self._type.itemsize, options.page_bytes
        )

    def run(self) -> list[BadSample]:
        """Write the file and return the bad samples."""
        self._write_head(samples=self._samples, table_at=0)
        workers = [self._process(target=self._work) for _ in range(self._options.workers)]
        allocations: list[npt.NDArray[Any]] = []
        bad: list[BadSample] = []
        try:
            with defer_signals():
                for worker in workers:
                    worker.start()
            running = len(workers)
            while running:
                with contextlib.suppress(queue.Empty):
                    result = self._results.get(timeout=_POLL_S)
                    if isinstance(result, BadSample):
                        bad.append(result)
                    elif isinstance(result, str):
                        raise SourceError(str(self._path), f"it can't be written ({result}).")
                    else:
                        allocations.append(result)
                        running -= 1
                self._progress(min(self._done.value, self._samples), self._samples)
                if bad and not self._options.skip_bad:
                    return bad
                _check_workers(workers, running)
        finally:
            for worker in workers:
                if worker.pid is not None:
                    if is_still_running(worker):
                        worker.kill()
                    worker.join()
        self._write_tables(np.concatenate(allocations), bad)
        return sorted(bad, key=lambda b: b.index)

    def _work(self) -> None:
        """Store samples in a worker process until there are no more."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        cv2.setNumThreads(0)
        torch.set_num_threads(1)
        try:
            self._results.put(self._store_all())
        except OSError as error:
            self._results.put(error.strerror or str(error))

    def _store_all(self) -> npt.NDArray[Any]:
        """Store this worker's samples, write all its pages and return its allocations."""
        storer = _Storer(self._columns, self._options, self._table, self._allocator)
        with self._allocator:
            while (begin := self._next_chunk()) < self._samples:
                for index in range(begin, min(self._samples, begin + _CHUNK)):
                    self._store_sample(storer, index)
            if self._allocator.page_offset == 0:
                self._allocator.page_offset = 1  # a started page that is still empty
        rows = [tuple(int(n) for n in row) for row in self._allocator.allocations]
        return np.array(rows, dtype=ALLOCATION)

    def _next_chunk(self) -> int:
        with self._next.get_lock():
            begin = int(self._next.value)
            self._next.value = begin + _CHUNK
        return begin

    def _store_sample(self, storer: _Storer, index: int) -> None:
        try:
            storer.store(index, self._dataset[index])
        except OSError as error:
            if error.errno is not None and error.filename is None:
                raise  # an error of the output file
            self._results.put(self._bad_sample(index, error))
        except Exception as error:  # noqa: BLE001  (reading a sample may raise anything)
            self._results.put(self._bad_sample(index, error))
        with self._done.get_lock():
            self._done.value += 1

    def _bad_sample(self, index: int, error: Exception) -> BadSample:
        if isinstance(error, UnidentifiedImageError):
            text = "Pillow can't read it as an image"
            return BadSample(index, _name(self._dataset, index), text)
        reason = getattr(error, "strerror", None) or str(error)
        return BadSample(index, _name(self._dataset, index), f"{type(error).__name__}: {reason}")

    def _write_head(self, samples: int, table_at: int) -> None:
        header = np.zeros(1, dtype=HEADER)
        header["version"], header["num_fields"] = VERSION, len(self._columns)
        header["page_size"], header["num_samples"] = self._options.page_bytes, samples
        header["alloc_table_ptr"] = table_at
        fields = np.zeros(len(self._columns), dtype=FIELD)
        for row, column in zip(fields, self._columns, strict=True):
            name = np.frombuffer(column.name.encode("ascii", "replace")[:16], dtype=np.uint8)
            row["type_id"] = column.type_id
            row["name"][: len(name)] = name
            row["arguments"][:] = column.field.to_binary()[0]
        with self._path.open("r+b") as file:
            file.write(header.tobytes())
            file.write(fields.tobytes())

    def _write_tables(self, rows: npt.NDArray[Any], bad: Sequence[BadSample]) -> None:
        """Write the tables without the samples that were left out, then the header."""
        left_out = np.zeros(self._samples, dtype=bool)
        left_out[[b.index for b in bad]] = True
        if left_out.all():
            raise BadSamplesError(bad)
        new_index = np.cumsum(~left_out) - 1
        rows = rows.copy()
        rows["sample_id"] = new_index[rows["sample_id"].astype(np.int64)]
        with self._path.open("r+b") as file:
            file.seek(HEADER.itemsize + FIELD.itemsize * len(self._columns))
            file.write(self._table[~left_out].tobytes())
            end = file.seek(0, os.SEEK_END)
            file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._write_head(int((~left_out).sum()), end)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer this process's signal handlers to the end of the block.

    While Python runs the fork handlers of libraries, it drops exceptions, also that of an exit.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
    }
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda signum, _: received.append(signum))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


def is_still_running(worker: Any) -> bool:
    """Return True if the worker still runs after half a second, in which it may exit."""
    worker.join(0.5)
    return bool(worker.is_alive())


def _check_workers(workers: Sequence[Any], running: int) -> None:
    """Raise ``SourceError`` if a worker died.

    A killed worker has reserved a page, for which the others would wait forever.
    """
    dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
    if dead and running:
        time.sleep(_POLL_S)
        code = dead[0]
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        raise SourceError("a writer process", f"it ended before it was finished ({reason}).")
