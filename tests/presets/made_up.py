"""Small data for presets, drawn by generators and written in the real formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = ("disc", "stripes", "square")


def drawing(shape: str, width: int, height: int, random: np.random.Generator) -> Image.Image:
    """A picture of ``shape`` in two random colours, with noise."""
    y, x = np.mgrid[0:height, 0:width]
    across, down = random.uniform(0.3, 0.7, 2) * (width, height)
    size = random.uniform(0.15, 0.3) * min(width, height)
    if shape == "disc":
        inside = (x - across) ** 2 + (y - down) ** 2 < size**2
    elif shape == "square":
        inside = (abs(x - across) < size) & (abs(y - down) < size)
    else:
        inside = ((x + y * random.uniform(-1, 1)) // max(3.0, size / 2)) % 2 < 1
    back, front = random.uniform(0, 255, (2, 3))
    values = np.where(inside[..., None], front, back) + random.normal(0, 8, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def image_folder(folder: Path, per_class: int, seed: int = 0) -> Path:
    """``folder/SHAPE/0.jpg`` and on, of several sizes."""
    random = np.random.default_rng(seed)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
        for number in range(per_class):
            width, height = random.integers(48, 96, 2)
            drawing(shape, int(width), int(height), random).save(folder / shape / f"{number}.jpg")
    return folder
