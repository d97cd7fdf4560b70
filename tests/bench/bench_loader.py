"""FFCV's pipeline beside torch's DataLoader: JPEGs of 256 pixels and more a side to 224, two
workers, in turn in one run of ``ltui bench data``. The bound is on the DataLoader's share of
FFCV's rate: below 1, FFCV is ahead."""

from __future__ import annotations

import os
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from tests.bench.row import Row, row
from tests.ltui_command import LTUI, answer

IMAGES, LEAST_SIDE, WORKERS = 600, 256, 2
_CONFIG = """\
trainer: {{accelerator: cpu, devices: 1, max_epochs: 1}}
model: {{class_path: lightning.pytorch.demos.boring_classes.BoringModel}}
data:
  class_path: ltui.training.data.beton_data.BetonData
  init_args: {{train: {file}, batch_size: 64, resolution: 224, crop: resized}}
"""


def measure() -> list[Row]:
    """Samples a second of both, and how one is to the other."""
    if find_spec("ffcv") is None:
        return [row("FFCV is not installed", None, "")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _photographs(folder / "photos")
        _ltui(folder, "data", "build", "photos", "-o", "photos.beton")
        (folder / "bench.yaml").write_text(_CONFIG.format(file=folder / "photos.beton"))
        said = _ltui(folder, "bench", "data", "bench.yaml", "--workers", str(WORKERS), "--json")
    variants = {v["loader"]: v for v in answer(said)["variants"]}
    rates = {name: median(v["samples_per_s"]) for name, v in variants.items()}
    rows = [row(f"{name}, {WORKERS} workers", rate, "images/s") for name, rate in rates.items()]
    share = rates["DataLoader"] / rates["FFCV"]
    return [*rows, row("DataLoader's rate by FFCV's", share, "", 1)]


def _photographs(folder: Path) -> None:
    folder = folder / "all"
    folder.mkdir(parents=True)
    for number in range(IMAGES):
        drawn = np.random.default_rng(number)
        height, width = LEAST_SIDE + drawn.integers(0, 128, 2)
        small = drawn.integers(0, 255, (height // 16, width // 16, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((int(width), int(height)), Image.Resampling.BICUBIC)
        grain = np.asarray(image, dtype=np.int16) + drawn.integers(-8, 8, (height, width, 3))
        pixels = grain.clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)


def _ltui(folder: Path, *words: str) -> str:
    return subprocess.run(
        [*LTUI, *words],
        cwd=folder,
        env={**os.environ, "LTUI_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout
