"""Dataset of a ``.beton`` file for torch's DataLoader, decoded by Pillow.

Crops, flips and labels are the same as with FFCV. It is used on machines without FFCV, and to
compare the two, and to verify a file by decoding every sample.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, JPEG, BetonError, BetonFile, Field
from ltui.training.data.ffcv.image_transform import (
    AUGMENT_SALT,
    CROP_SALT,
    ImageTransformConfig,
    centre_crop,
    draw,
    first_state,
    random_begin,
    random_crop,
    random_shift,
)

NO_LABEL = -1
FILLERS = {INT: NO_LABEL, FLOAT: math.nan}
"""Values of numbers in padding. Other fields keep the values of a sample."""


class BetonSamples(Dataset[tuple[Any, ...]]):
    """Samples as tuples of the fields in ``names``, by default of all: images (height, width, 3) in
    ``dtype``, numbers and arrays.

    The sample after the last one is padding with the label ``NO_LABEL``.
    """

    def __init__(
        self,
        file: BetonFile,
        names: list[str] | None,
        transform: ImageTransformConfig,
        dtype: torch.dtype,
    ) -> None:
        self.file = file
        self.transform = transform
        self.dtype = dtype
        self.key = 0
        """Random key of the augmentation. Set it for each epoch."""
        chosen = file.field_names if names is None else names
        self._columns = [file.field_index(name) for name in chosen]
        self._sizes = {i: file.sizes(i) for i in self._columns if file.fields[i].stored_in_pages}
        self._fd: int | None = None
        self._mean = 255 * np.array(transform.mean, dtype=np.float32)
        self._factor = 1 / (255 * np.array(transform.std, dtype=np.float32))

    def set_side(self, side: int) -> None:
        """Set the resolution from the next batch on."""
        self.transform = replace(self.transform, side=side)

    def __len__(self) -> int:
        return self.file.samples + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}

    def __getitem__(self, sample: int) -> tuple[Any, ...]:
        if sample == self.file.samples:
            types = (self.file.fields[column].type_id for column in self._columns)
            return tuple(FILLERS.get(t, v) for t, v in zip(types, self[0], strict=True))
        return tuple(self._value(sample, i) for i in self._columns)

    def _value(self, sample: int, column: int) -> Any:
        field = self.file.fields[column]
        entry = self.file.metadata[f"f{column}"][sample]
        if not field.stored_in_pages:
            return entry.item()
        data = self.content(sample, column)
        if field.type_id == IMAGE:
            return self._image(self.decode(sample, column, data), sample)
        return torch.from_numpy(_array(field, data))

    def content(self, sample: int, column: int) -> bytes:
        """Return the stored bytes of a field. Raises ``BetonError`` if they can't be read."""
        at, size = int(self.file.pointers(column)[sample]), int(self._sizes[column][sample])
        if self._fd is None:
            self._fd = os.open(self.file.path, os.O_RDONLY)
        try:
            data = os.pread(self._fd, size, at)
        except OSError as error:
            raise self._error(sample, f"it can't be read ({error.strerror})") from error
        if len(data) != size:
            raise self._error(sample, "the file became shorter")
        return data

    def decode(self, sample: int, column: int, data: bytes) -> Image.Image:
        """Return the stored image. Raises ``BetonError`` if it is damaged."""
        entry = self.file.metadata[f"f{column}"][sample]
        shape = int(entry["height"]), int(entry["width"]), 3
        if entry["mode"] != JPEG:
            return Image.fromarray(np.frombuffer(data, dtype=np.uint8).reshape(shape))
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            name = self.file.fields[column].name
            raise self._error(
                sample, f"the image in {name!r} is damaged and can't be decoded ({error})"
            ) from error
        if image.size != (shape[1], shape[0]):
            raise self._error(sample, "its image has another size than the file says")
        return image

    def _error(self, sample: int, reason: str) -> BetonError:
        return BetonError(f"{self.file.path}: sample {sample}: {reason}.")

    def _image(self, image: Image.Image, sample: int) -> torch.Tensor:
        transform = self.transform
        key = np.uint64(self.key)
        with np.errstate(over="ignore"):
            crop_state = first_state(key, sample, CROP_SALT)
            augment_state = first_state(key, sample, AUGMENT_SALT)
            if transform.scale is None:
                crop = centre_crop(image.height, image.width, transform.center_ratio)
            else:
                log_ratio = np.log(transform.aspect)
                crop = random_crop(
                    image.height, image.width, crop_state, transform.scale, log_ratio
                )
            y, x, h, w = crop
            if (h, w) != (transform.side, transform.side) or (h, w) != (image.height, image.width):
                image = image.resize(
                    (transform.side, transform.side),
                    Image.Resampling.BILINEAR,
                    box=(x, y, x + w, y + h),
                )
            values = np.asarray(image)
            if transform.flip or transform.shift or transform.cutout:
                values = augment(values, transform, augment_state)
        exact = (values - self._mean) * self._factor
        return torch.from_numpy(exact).to(self.dtype)


def augment(
    image: npt.NDArray[np.uint8], transform: ImageTransformConfig, state: Any
) -> npt.NDArray[np.uint8]:
    """Return an augmented image, like ``field_pipelines.Augment``."""
    height, width, _ = image.shape
    flip = transform.flip and draw(state, 1) < 0.5
    dy, dx = (random_shift(state, number, transform.shift) for number in (2, 3))
    result = np.empty_like(image)
    result[:] = transform.fill
    flipped = image[:, ::-1] if flip else image
    # Column x of a flipped image is column width - 1 - x + dx of the original.
    right = -dx if flip else dx
    y0, y1 = max(0, -dy), min(height, height - dy)
    x0, x1 = max(0, -right), min(width, width - right)
    result[y0:y1, x0:x1] = flipped[y0 + dy : y1 + dy, x0 + right : x1 + right]
    if transform.cutout:
        top = random_begin(state, 4, height, transform.cutout)
        left = random_begin(state, 5, width, transform.cutout)
        result[top : top + transform.cutout, left : left + transform.cutout] = transform.fill
    return result


def _array(field: Field, data: bytes) -> npt.NDArray[Any]:
    dtype = np.dtype(field.dtype or np.uint8)
    flat = np.frombuffer(bytearray(data), dtype=dtype)
    return flat.reshape(field.shape) if field.shape else flat


def collate(samples: list[tuple[Any, ...]]) -> tuple[torch.Tensor, ...]:
    """Collate samples. Images become (n, 3, height, width), channels last in memory."""
    return tuple(_stack(list(column)) for column in zip(*samples, strict=True))


def _stack(values: list[Any]) -> torch.Tensor:
    if not isinstance(values[0], torch.Tensor):
        return torch.tensor(values)
    stacked = torch.stack(values)
    is_images = stacked.ndim == 4 and stacked.shape[3] == 3 and stacked.is_floating_point()
    return stacked.permute(0, 3, 1, 2) if is_images else stacked


# Verification.

_CHUNK = 64
Bad = tuple[int, str]


def verify(path: Path, workers: int, progress: Callable[[int, int], None]) -> list[Bad]:
    """Return the bad samples and their problems. Raises ``BetonError`` if the file is damaged.

    The decoder is that of FFCV if its library is found, else Pillow.
    """
    file = BetonFile(path)
    samples = BetonSamples(file, None, ImageTransformConfig(side=1), torch.float32)
    decode = _ffcv_decoder()

    def check_chunk(begin: int) -> list[Bad]:
        problems = []
        for sample in range(begin, min(file.samples, begin + _CHUNK)):
            problems += [(sample, text) for text in _check_sample(samples, sample, decode)]
        return problems

    bad: list[Bad] = []
    with ThreadPoolExecutor(workers) as pool:
        for number, problems in enumerate(pool.map(check_chunk, range(0, file.samples, _CHUNK))):
            bad += problems
            progress(min(file.samples, (number + 1) * _CHUNK), file.samples)
    return bad


def _check_sample(
    samples: BetonSamples, sample: int, decode: Callable[[bytes, int, int], bool] | None
) -> Iterator[str]:
    file = samples.file
    for column, field in enumerate(file.fields):
        if not field.stored_in_pages:
            continue
        entry = file.metadata[f"f{column}"][sample]
        try:
            data = samples.content(sample, column)
            if field.type_id != IMAGE or entry["mode"] != JPEG:
                continue
            height, width = int(entry["height"]), int(entry["width"])
            if decode is None:
                samples.decode(sample, column, data)
            elif _size(data) != (width, height):
                yield f"the image in {field.name!r} is not a JPEG of {width}x{height} pixels"
            elif not decode(data, height, width):
                yield f"the image in {field.name!r} is damaged and can't be decoded"
        except BetonError as error:
            yield str(error).partition(f"sample {sample}: ")[2] or str(error)


def _size(data: bytes) -> tuple[int, int] | None:
    try:
        return Image.open(io.BytesIO(data)).size
    except (OSError, SyntaxError, ValueError):
        return None


def _ffcv_decoder() -> Callable[[bytes, int, int], bool] | None:
    """Return whether FFCV decodes a JPEG, as training would meet it; None without FFCV.

    Its library is loaded without the package, which takes seconds to import and needs others.
    Pillow accepts some damaged images that FFCV's decoder refuses.
    """
    spec = find_spec("ffcv")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    libraries = [path for folder in folders for path in Path(folder).glob("_libffcv*.so")]
    if not libraries:
        return None
    imdecode = ctypes.CDLL(str(libraries[0])).imdecode
    number = ctypes.c_uint32
    imdecode.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint64, number, number, ctypes.c_void_p, number, number),
        *(number, number, number, number, ctypes.c_bool, ctypes.c_bool),
    ]

    def decode(data: bytes, height: int, width: int) -> bool:
        pixels = ctypes.create_string_buffer(height * width * 3)
        size = (height, width)
        result = imdecode(data, len(data), *size, pixels, *size, 0, 0, 1, 1, False, False)
        return bool(result == 0)

    return decode
