"""The samples of a ``.beton`` file for torch's DataLoader: the same crops, flips and labels as
through FFCV, decoded by Pillow. For machines without FFCV, and to compare the two."""

from __future__ import annotations

import io
import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, JPEG, BetonError, BetonFile, Field
from ltui.training.data.ffcv.image_transform import ImageTransformConfig
from ltui.training.data.ffcv.keyed_random import AUGMENT_SALT, CROP_SALT, KeyedRandom

NO_LABEL = -1
Part = tuple[int, int, int, int]
"""Row, column, height, width."""


class BetonSamples(Dataset[tuple[Any, ...]]):
    """A sample is a tuple of the fields that ``names`` lists: an image (height, width, 3) in
    ``dtype``, a number, an array. The one past the last is padding: labelled ``NO_LABEL``."""

    def __init__(
        self, file: BetonFile, names: list[str], transform: ImageTransformConfig, dtype: torch.dtype
    ) -> None:
        self.file = file
        self.transform = transform
        self.dtype = dtype
        self.key = 0
        """What augmentation is drawn from; to be set for each epoch."""
        self._columns = [file.field_index(name) for name in names]
        self._sizes = {i: file.sizes(i) for i in self._columns if file.fields[i].points}
        self._fd: int | None = None
        self._mean = 255 * np.array(transform.mean, dtype=np.float32)
        self._factor = 1 / (255 * np.array(transform.std, dtype=np.float32))

    def set_side(self, side: int) -> None:
        """Another resolution from the next batch on."""
        self.transform = replace(self.transform, side=side)

    def __len__(self) -> int:
        return self.file.samples + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}

    def __getitem__(self, sample: int) -> tuple[Any, ...]:
        if sample == self.file.samples:
            return tuple(self._padding(i, v) for i, v in zip(self._columns, self[0], strict=True))
        return tuple(self._value(sample, i) for i in self._columns)

    def _padding(self, column: int, value: Any) -> Any:
        kind = self.file.fields[column].type_id
        return NO_LABEL if kind == INT else math.nan if kind == FLOAT else value

    def _value(self, sample: int, column: int) -> Any:
        field = self.file.fields[column]
        described = self.file.metadata[f"f{column}"][sample]
        if not field.points:
            return described.item()
        data = self.content(sample, column)
        if field.type_id == IMAGE:
            return self._image(self.decode(sample, column, data), sample)
        return torch.from_numpy(_array(field, data))

    def content(self, sample: int, column: int) -> bytes:
        """What stands in the file. ``BetonError`` where it can't be read."""
        at, size = int(self.file.pointers(column)[sample]), int(self._sizes[column][sample])
        if self._fd is None:
            self._fd = os.open(self.file.path, os.O_RDONLY)
        try:
            data = os.pread(self._fd, size, at)
        except OSError as error:
            raise self._bad(sample, f"it can't be read ({error.strerror})") from error
        if len(data) != size:
            raise self._bad(sample, "the file has become shorter")
        return data

    def decode(self, sample: int, column: int, data: bytes) -> Image.Image:
        """The image as it was stored. ``BetonError`` where it is damaged."""
        described = self.file.metadata[f"f{column}"][sample]
        shape = int(described["height"]), int(described["width"]), 3
        if described["mode"] != JPEG:
            return Image.fromarray(np.frombuffer(data, dtype=np.uint8).reshape(shape))
        try:
            image = Image.open(io.BytesIO(data)).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            name = self.file.fields[column].name
            raise self._bad(
                sample, f"the image in {name!r} is damaged and can't be decoded ({error})"
            ) from error
        if image.size != (shape[1], shape[0]):
            raise self._bad(sample, "its image is of another size than the file says")
        return image

    def _bad(self, sample: int, why: str) -> BetonError:
        return BetonError(f"{self.file.path}: sample {sample}: {why}.")

    def _image(self, image: Image.Image, sample: int) -> torch.Tensor:
        transform = self.transform
        y, x, h, w = self._part(image.height, image.width, sample)
        if (h, w) != (transform.side, transform.side) or (h, w) != (image.height, image.width):
            box = (x, y, x + w, y + h)
            image = image.resize(
                (transform.side, transform.side), Image.Resampling.BILINEAR, box=box
            )
        values = np.asarray(image)
        if transform.flip or transform.shift or transform.cutout:
            values = augmented(
                values, transform, KeyedRandom.for_sample(self.key, sample, AUGMENT_SALT)
            )
        exact = (values - self._mean) * self._factor
        return torch.from_numpy(exact).to(self.dtype)

    def _part(self, height: int, width: int, sample: int) -> Part:
        transform = self.transform
        if transform.scale is None:
            side = max(1, int(transform.center_ratio * min(height, width)))
            return (height - side) // 2, (width - side) // 2, side, side
        return random_part(
            height, width, transform, KeyedRandom.for_sample(self.key, sample, CROP_SALT)
        )


def random_part(
    height: int, width: int, transform: ImageTransformConfig, draws: KeyedRandom
) -> Part:
    """As ``ffcv_operations.random_part``."""
    assert transform.scale is not None
    low, high = transform.scale
    thin, wide = (math.log(aspect) for aspect in transform.aspect)
    for _ in range(10):
        target = height * width * (low + (high - low) * draws.next())
        aspect = math.exp(thin + (wide - thin) * draws.next())
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            y = int(draws.next() * (height - h + 1))
            return y, int(draws.next() * (width - w + 1)), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def augmented(
    image: npt.NDArray[np.uint8], transform: ImageTransformConfig, draws: KeyedRandom
) -> npt.NDArray[np.uint8]:
    """As ``ffcv_operations.Augment``."""
    height, width, _ = image.shape
    flip = draws.next() < 0.5 and transform.flip
    dy = int(draws.next() * (2 * transform.shift + 1)) - transform.shift
    dx = int(draws.next() * (2 * transform.shift + 1)) - transform.shift
    made = np.empty_like(image)
    made[:] = transform.fill
    flipped = image[:, ::-1] if flip else image
    # Column x of a flipped image is taken from width - 1 - x + dx.
    right = -dx if flip else dx
    y0, y1 = max(0, -dy), min(height, height - dy)
    x0, x1 = max(0, -right), min(width, width - right)
    made[y0:y1, x0:x1] = flipped[y0 + dy : y1 + dy, x0 + right : x1 + right]
    if transform.cutout:
        top = int(draws.next() * max(1, height - transform.cutout + 1))
        left = int(draws.next() * max(1, width - transform.cutout + 1))
        made[top : top + transform.cutout, left : left + transform.cutout] = transform.fill
    return made


def _array(field: Field, data: bytes) -> npt.NDArray[Any]:
    dtype = np.dtype(field.dtype or np.uint8)
    flat = np.frombuffer(bytearray(data), dtype=dtype)
    return flat.reshape(field.shape) if field.shape else flat


def collate(samples: list[tuple[Any, ...]]) -> tuple[torch.Tensor, ...]:
    """Images become (n, 3, height, width), channels last in memory."""
    return tuple(_together(list(column)) for column in zip(*samples, strict=True))


def _together(values: list[Any]) -> torch.Tensor:
    if not isinstance(values[0], torch.Tensor):
        return torch.tensor(values)
    stacked = torch.stack(values)
    is_images = stacked.ndim == 4 and stacked.shape[3] == 3 and stacked.is_floating_point()
    return stacked.permute(0, 3, 1, 2) if is_images else stacked
