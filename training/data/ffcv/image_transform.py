"""How images are to look in a batch: size, part, augmentation, normalisation. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Triple = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTransformConfig:
    """Of one loader."""

    side: int
    """Of the square images, in pixels."""
    scale: tuple[float, float] | None = None
    """Shares of the area between which a random part has; None: the middle."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Width by height of a random part."""
    center_ratio: float = 1.0
    """Share of the shorter side that the middle has."""
    flip: bool = False
    shift: int = 0
    """Pixels."""
    cutout: int = 0
    """Side of a blank square, in pixels."""
    mean: Triple = (0.485, 0.456, 0.406)
    """Of values from 0 to 1, like ``std``."""
    std: Triple = (0.229, 0.224, 0.225)
    channels_last: bool = True

    @property
    def fill(self) -> tuple[int, int, int]:
        """The mean as bytes: what a shift leaves blank, and a cutout."""
        red, green, blue = (round(255 * value) for value in self.mean)
        return red, green, blue


def precision_dtype(precision: object) -> torch.dtype:
    """What a Trainer's ``precision`` computes in."""
    text = str(precision)
    if text.startswith("bf16"):
        return torch.bfloat16
    if text.startswith("16"):
        return torch.float16
    return torch.float64 if text.startswith("64") else torch.float32
