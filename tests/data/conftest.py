"""A small folder of photographs of several sizes, and the ``.beton`` that is built from it."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ltui.training.data.ffcv.beton_file import BetonFile
from tests.ltui_command import run_ltui

needs_ffcv = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
everything = pytest.mark.skipif(os.environ.get("LTUI_DATA") != "all", reason="make data")
PHOTOS = 45


def ltui(*words: str, folder: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The command line as a person would call it in ``folder``."""
    environment = {**os.environ, "LTUI_HOME": str(folder / "home")}
    return run_ltui(*words, cwd=folder, environment=environment, timeout=timeout)


def damage(path: Path, sample: int) -> None:
    """Blanks the middle of a sample's JPEG."""
    file = BetonFile(path)
    at, size = int(file.pointers(0)[sample]), int(file.sizes(0)[sample])
    with path.open("r+b") as out:
        out.seek(at + size // 2)
        out.write(bytes(size // 3))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth noise; the sides differ."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(PHOTOS):
        folder = root / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        drawn = np.random.default_rng(number)
        small = Image.fromarray(drawn.integers(0, 255, (6, 6, 3), dtype=np.uint8))
        large = small.resize((70 + number % 5, 64 + number % 7), Image.Resampling.BICUBIC)
        large.save(folder / f"{number:03d}.jpg", quality=95)
    return root


@pytest.fixture(scope="session")
def beton(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once by the command; the tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("beton")
    done = ltui(
        "data", "build", str(photos), "-o", "photos.beton", "--page-size", "2", folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in folder.iterdir() if p.is_file()] == ["photos.beton"]
    assert f"{PHOTOS} samples" in done.stdout
    return folder / "photos.beton"
