"""Writer of ``.beton`` files from an indexed dataset. The file is atomic.

The processes of torch's DataLoader read and encode the samples, and this process writes the pages.
FFCV's own writer (1.0.2) waits forever if a sample raises an error, if one of its processes is
killed and if the disk is full. A JPEG that is not resized is stored unchanged. Imports FFCV.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
import numpy.typing as npt
import torch
from ffcv.fields import NDArrayField
from ffcv.fields.rgb_image import encode_jpeg, resizer
from ffcv.libffcv import imdecode
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from ltui.training.data.data_files import atomic_write
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
    BetonError,
    Field,
    metadata_type,
)
from ltui.training.data.ffcv.beton_sources import ImageFile, IndexedDataset

_CHUNK, _CHUNK_BYTES = 8, 64 << 20
"""Maximum number and size of the samples that a worker takes at a time."""
_PR_SET_PDEATHSIG = 1

Stored = tuple[Any, bytes | None]
"""A value as it is stored: its entry in the table of samples, without the address of its content,
and its content in a page; None if there is none."""


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


def write(
    dataset: IndexedDataset,
    path: Path,
    options: WriteOptions,
    progress: Callable[[int, int], None],
) -> list[BadSample]:
    """Write ``dataset`` to ``path`` and return the samples that were left out.

    ``progress(done, samples)`` is called periodically. Raises ``BadSamplesError`` and writes no
    file if there are bad samples and ``skip_bad`` is not set, ``BetonError`` if samples have a
    type that can't be stored, and ``OSError``.
    """
    columns = _columns(dataset)
    samples = _StoredSamples(dataset, columns, options)
    bad: list[BadSample] = []
    chunk = max(1, min(_CHUNK, _CHUNK_BYTES // options.page_bytes))
    with (
        atomic_write(path) as part,
        _open_for_writing(part) as file,
        _read_in_processes(samples, options.workers, chunk) as stored,
    ):
        pages = _BetonFileWriter(file, columns, len(dataset), options.page_bytes)
        for done, sample in enumerate(stored, 1):
            if isinstance(sample, BadSample):
                bad.append(sample)
                if not options.skip_bad:
                    raise BadSamplesError(bad)
            else:
                pages.add(sample)
            if done % _CHUNK == 0 or done == len(dataset):
                progress(done, len(dataset))
        if len(bad) == len(dataset):
            raise BadSamplesError(bad)
        pages.complete()
    return bad


@contextlib.contextmanager
def _open_for_writing(path: Path) -> Iterator[BinaryIO]:
    """Open a file. An ``OSError`` in the block becomes a ``BetonError`` that names the file."""
    try:
        with path.open("r+b") as file:
            yield file
    except OSError as error:
        reason = error.strerror or error
        raise BetonError(f"{path}: it can't be written ({reason}).") from error


# Columns of the samples.


def _columns(dataset: IndexedDataset) -> list[Field]:
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
    columns: list[Field] = []
    for place, (key, value) in enumerate(values):
        kind = kind_of(value)
        if kind is None:
            raise BetonError(
                f"sample 0 of {type(dataset).__name__}: its part {place} is a "
                f"{type(value).__name__}, which can't be stored. Parts may be images, integers, "
                "floats, and arrays or tensors of equal shape."
            )
        name = key or _default_name(kind, place, {c.name for c in columns})
        array = np.asarray(value if kind == ARRAY else 0)
        columns.append(Field(name[:16], kind, array.shape, array.dtype.str))
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


def jpeg_of(value: Any, max_side: int | None) -> tuple[bytes, int, int] | None:
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
    pixels = np.empty(height * width * 3, np.uint8)
    refused = imdecode(np.frombuffer(data, np.uint8), pixels, height, width, height, width)
    return None if refused else (data, height, width)


class _StoredSamples(Dataset[Any]):
    """The samples of a dataset as they are stored. A sample that can't be is a ``BadSample``."""

    def __init__(
        self, dataset: IndexedDataset, columns: Sequence[Field], options: WriteOptions
    ) -> None:
        self._dataset, self._columns, self._options = dataset, columns, options

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> list[Stored] | BadSample:
        try:
            return self._stored(index)
        except UnidentifiedImageError:
            text = "Pillow can't read it as an image"
        except Exception as error:  # noqa: BLE001  (reading a sample may raise anything)
            reason = getattr(error, "strerror", None) or str(error)
            text = f"{type(error).__name__}: {reason}"
        return BadSample(index, _name(self._dataset, index), text)

    def _stored(self, index: int) -> list[Stored]:
        """Return a sample. Raises ``ValueError`` if it does not fit the columns or a page."""
        values = [value for _, value in parts(self._dataset[index])]
        if len(values) != len(self._columns):
            raise ValueError(
                f"it has {len(values)} parts, but the first sample has {len(self._columns)}"
            )
        sample = [self._value(c, v, index) for c, v in zip(self._columns, values, strict=True)]
        if sum(len(content or b"") for _, content in sample) > self._options.page_bytes:
            raise ValueError("it is larger than a page; build with a larger --page-size")
        return sample

    def _value(self, column: Field, value: Any, index: int) -> Stored:
        if column.type_id == IMAGE:
            return self._image(value, index)
        if column.type_id != ARRAY:
            return (np.int64(int(value)) if column.type_id == INT else float(value)), None
        array = np.ascontiguousarray(value)
        if array.shape != column.shape or array.dtype != np.dtype(column.dtype):
            raise ValueError(
                f"{column.name!r} is {array.dtype}{list(array.shape)}, but in the first sample "
                f"{np.dtype(column.dtype)}{list(column.shape)}"
            )
        return (), array.tobytes()

    def _image(self, value: Any, index: int) -> Stored:
        options = self._options
        raw = options.images == "raw" or (options.images == "mixed" and index % 2 == 1)
        unchanged = None if raw else jpeg_of(value, options.max_side)
        if unchanged is not None:
            content, height, width = unchanged
        else:
            pixels = pixels_of(value, options.max_side)
            height, width = pixels.shape[:2]
            if max(height, width) > 65535:
                raise ValueError(f"it has {width} x {height} pixels; the maximum is 65535")
            content = (pixels if raw else encode_jpeg(pixels, options.quality)).tobytes()
        return (RAW if raw else JPEG, width, height), content


# The processes that read the samples.


@contextlib.contextmanager
def _read_in_processes(samples: Dataset[Any], workers: int, chunk: int) -> Iterator[Iterator[Any]]:
    """Yield an iterator of all samples in their order.

    Raises ``BetonError`` if a worker process dies, which interrupts the block at any line.
    """
    loader = DataLoader(
        samples,
        batch_size=chunk,
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=_prepare_worker,
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(0),
    )
    others = set(multiprocessing.active_children())
    with defer_signals():
        chunks: Any = iter(loader)
    processes = set(multiprocessing.active_children()) - others
    try:
        yield itertools.chain.from_iterable(chunks)
    except RuntimeError as error:
        dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
        if not dead:
            raise
        reason = f"killed by signal {-dead[0]}" if dead[0] < 0 else f"exit code {dead[0]}"
        raise BetonError(
            f"a writer process: it ended before it was finished ({reason})."
        ) from error
    finally:
        # torch would wait for a slow sample, and forever for a lock of a killed process. It raises
        # RuntimeError about the end of a worker.
        chunks._shutdown = True
        for process in processes:
            with contextlib.suppress(RuntimeError):
                process.kill()
                process.join()
        # torch keeps their numbers under the iterator's address, which a later iterator may have.
        if getattr(chunks, "_worker_pids_set", False):
            signal_handling._remove_worker_pids(id(chunks))  # type: ignore[attr-defined]


def _prepare_worker(_: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    cv2.setNumThreads(0)


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


# The file.


class _BetonFileWriter:
    """Writes pages, then the tables. All contents of a sample are in one page, as FFCV requires."""

    def __init__(
        self, file: BinaryIO, columns: Sequence[Field], samples: int, page_bytes: int
    ) -> None:
        self._file, self._columns, self._page_bytes = file, columns, page_bytes
        self._table = np.zeros(samples, metadata_type(columns))
        stored = sum(column.stored_in_pages for column in columns)
        self._allocations = np.zeros((samples, stored), ALLOCATION)
        self._written = 0
        head_bytes = HEADER.itemsize + FIELD.itemsize * len(columns) + self._table.nbytes
        self._at = head_bytes + -head_bytes % page_bytes
        file.seek(self._at)

    def add(self, sample: Sequence[Stored]) -> None:
        """Write the contents of the next sample."""
        contents = [content for _, content in sample if content is not None]
        if sum(map(len, contents)) > -self._at % self._page_bytes:
            self._fill_page()
        row, stored = self._table[self._written], 0
        for name, (entry, content) in zip(self._table.dtype.names or (), sample, strict=True):
            if content is None:
                row[name] = entry
            else:
                row[name] = (*entry, self._at) if entry else self._at
                self._allocations[self._written, stored] = self._written, self._at, len(content)
                stored += 1
                self._file.write(content)
                self._at += len(content)
        self._written += 1

    def _fill_page(self) -> None:
        rest = -self._at % self._page_bytes
        self._file.write(bytes(rest))
        self._at += rest

    def complete(self) -> None:
        """Write the tables of the added samples."""
        self._fill_page()
        self._file.truncate(self._at)  # also if no field is stored in pages
        self._file.write(self._allocations[: self._written].tobytes())
        header = np.zeros(1, HEADER)
        header[0] = (VERSION, len(self._columns), self._page_bytes, self._written, self._at)
        fields = np.zeros(len(self._columns), FIELD)
        for row, column in zip(fields, self._columns, strict=True):
            name = np.frombuffer(column.name.encode("ascii", "replace"), np.uint8)
            row["type_id"] = column.type_id
            row["name"][: len(name)] = name
            if column.type_id == ARRAY:
                field = NDArrayField(np.dtype(column.dtype), column.shape)
                row["arguments"][:] = field.to_binary()[0]
        self._file.seek(0)
        for table in (header, fields, self._table[: self._written]):
            self._file.write(table.tobytes())
