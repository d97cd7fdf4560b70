"""Transform of images for a batch, and the random numbers of its crops and augmentation.

The numbers depend only on a key and the number of a sample (SplitMix64). The augmentation of a
sample is therefore equal on every rank, thread and process that decodes it, and after a resume. The
functions work on 64-bit NumPy integers. ``field_pipelines.py`` compiles them; without a compiler,
call them within ``np.errstate(over="ignore")``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTransformConfig:
    """Transform of one loader's images."""

    side: int
    """Side of the square images in pixels."""
    scale: tuple[float, float] | None = None
    """Minimum and maximum fraction of the area for a random crop; None for a centre crop."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Minimum and maximum ratio of width to height of a random crop."""
    center_ratio: float = 1.0
    """Side of the centre crop as a fraction of the shorter side."""
    flip: bool = False
    shift: int = 0
    """Maximum shift in pixels."""
    cutout: int = 0
    """Side of a blank square, in pixels."""
    mean: Triple = (0.485, 0.456, 0.406)
    """Mean of values from 0 to 1. ``std`` uses the same scale."""
    std: Triple = (0.229, 0.224, 0.225)
    channels_last: bool = True

    @property
    def fill(self) -> tuple[int, int, int]:
        """The mean as bytes, the colour of areas left blank by a shift or cutout."""
        red, green, blue = (round(255 * value) for value in self.mean)
        return red, green, blue


def precision_dtype(precision: object) -> torch.dtype:
    """Return the dtype in which a Trainer with this ``precision`` computes."""
    text = str(precision)
    if text.startswith("bf16"):
        return torch.bfloat16
    if text.startswith("16"):
        return torch.float16
    return torch.float64 if text.startswith("64") else torch.float32


CROP_SALT, AUGMENT_SALT = 1, 2
"""Salts of the random crop and of the other augmentation."""
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _R11, _R27, _R30, _R31 = (np.uint64(n) for n in (1, 11, 27, 30, 31))


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of all samples of an epoch."""
    with np.errstate(over="ignore"):
        return int(mix(mix(np.uint64(seed & _MASK)) + _STEP * np.uint64(epoch + 1)))


def mix(state: Any) -> Any:
    """Mix the 64 bits of ``state`` pseudo-randomly."""
    state = (state ^ (state >> _R30)) * _FIRST
    state = (state ^ (state >> _R27)) * _SECOND
    return state ^ (state >> _R31)


def first_state(key: Any, sample: Any, salt: Any) -> Any:
    """Return the state from which the numbers of a sample are drawn."""
    return mix(key + _STEP * (np.uint64(sample) + _ONE)) ^ np.uint64(salt)


def draw(state: Any, number: Any) -> Any:
    """Return number 1, 2 and so on of a sample, in the interval [0, 1)."""
    return np.float64(mix(state + _STEP * np.uint64(number)) >> _R11) / 9007199254740992.0


def random_crop(height: Any, width: Any, state: Any, scale: Any, log_ratio: Any) -> Any:
    """Return row, column, height and width of a random crop, as torchvision's RandomResizedCrop."""
    area = height * width
    for attempt in range(10):
        number = 2 * attempt + 1
        target = area * (scale[0] + (scale[1] - scale[0]) * draw(state, number))
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * draw(state, number + 1))
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            row = int(draw(state, number + 2) * (height - h + 1))
            return row, int(draw(state, number + 3) * (width - w + 1)), h, w
    return centre_crop(height, width, 1.0)


def centre_crop(height: Any, width: Any, ratio: float) -> Any:
    """Return row, column, height and width of the square centre crop."""
    side = max(1, int(ratio * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


def random_shift(state: Any, number: Any, maximum: Any) -> Any:
    """Return a shift by up to ``maximum`` pixels in either direction."""
    return int(draw(state, number) * (2 * maximum + 1)) - maximum


def random_begin(state: Any, number: Any, length: Any, size: Any) -> Any:
    """Return the first pixel of a part with ``size`` pixels of a row or column."""
    return int(draw(state, number) * max(1, length - size + 1))
