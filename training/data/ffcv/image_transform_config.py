"""Transform of images for a batch: size, crop, augmentation, normalisation. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

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
