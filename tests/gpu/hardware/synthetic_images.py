"""Photographs without a camera: JPEGs that cost as much to decode as real ones, in classes.

The noise has the spectrum of photographs (amplitude falls with frequency), so at quality 90 a JPEG
has about 0.6 bytes a pixel, as ImageNet's have. A class is a hue, which a crop or flip keeps.
"""

from __future__ import annotations

import colorsys
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
_LIGHT, _HUE, _GRAIN = 50.0, 40.0, 12.0
"""Standard deviation of the brightness, strength of the class's hue, and noise of the colours."""


def photograph(number: int, width: int, height: int) -> Image.Image:
    """Return the image with this number; its class is ``number % CLASSES``."""
    random = np.random.default_rng(number)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf  # no constant part
    phases = np.exp(2j * np.pi * random.random((2, height, width // 2 + 1)))
    light, grain = np.fft.irfft2(phases / frequency, s=(height, width))
    light *= _LIGHT / light.std()
    grain *= _GRAIN / grain.std()
    hue = np.array(colorsys.hsv_to_rgb(number % CLASSES / CLASSES, 1.0, 1.0)) - 0.5
    values = 128 + light[..., None] + grain[..., None] * (1, 0, -1) + _HUE * 2 * hue
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def image_folder(folder: Path, count: int, side: int, *, copies: int = 1, first: int = 0) -> Path:
    """Write ``count`` images into ``folder/CLASS`` with all cores, and ``copies`` names for each.

    Up to 100 pixels a ``side`` they are square PNGs; larger ones are JPEGs whose sides differ by
    up to a fifth, such as 400x350. Copies are hard links, which take no space. ``first``: number
    of the first image, so that another folder can have other images.
    """
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
    workers = len(os.sched_getaffinity(0))
    # Spawned, because a fork of a process with threads (of torch or Textual) may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        numbers = range(first, first + count)
        chunks = [numbers[begin :: 4 * workers] for begin in range(min(count, 4 * workers))]
        list(pool.map(partial(_write, folder, side, copies), chunks))
    return folder


def _write(folder: Path, side: int, copies: int, numbers: Iterable[int]) -> None:
    for number in numbers:
        of_class = folder / str(number % CLASSES)
        if side <= 100:
            first = of_class / f"{number}.png"
            photograph(number, side, side).save(first, compress_level=1)
        else:
            first = of_class / f"{number}.jpg"
            width, height = _sides(number, side)
            photograph(number, width, height).save(first, quality=90)
        for copy in range(1, copies):
            os.link(first, first.with_stem(f"{number}-{copy}"))


def _sides(number: int, side: int) -> tuple[int, int]:
    """Return width and height: ``side`` on average, and more often wide than high."""
    random = np.random.default_rng([number, side])
    width, height = random.integers((int(side * 0.96), int(side * 0.84)), (side + 50, side + 20))
    return int(width), int(height)


def bytes_per_pixel(folder: Path, sample: int = 50) -> float:
    """Return the mean size of the first JPEGs in ``folder`` by their pixels."""
    files = sorted(folder.rglob("*.jpg"))[:sample]
    pixels = 0
    for file in files:
        with Image.open(file) as image:
            pixels += image.width * image.height
    return sum(file.stat().st_size for file in files) / pixels
