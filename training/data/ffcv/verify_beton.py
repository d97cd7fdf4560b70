"""Verification of a ``.beton`` file by decoding every sample.

The decoder is that of FFCV if it is installed, else Pillow.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image

from ltui.training.data.ffcv.beton_file import IMAGE, JPEG, BetonError, BetonFile
from ltui.training.data.ffcv.image_transform_config import ImageTransformConfig
from ltui.training.data.ffcv.torch_dataset import BetonSamples

_CHUNK = 64
Bad = tuple[int, str]


def verify(path: Path, workers: int, progress: Callable[[int, int], None]) -> list[Bad]:
    """Return the bad samples and their problems. Raises ``BetonError`` if the file is damaged."""
    file = BetonFile(path)
    samples = BetonSamples(file, None, ImageTransformConfig(side=1), torch.float32)
    decode = _turbo()

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


def _turbo() -> Callable[[bytes, int, int], bool] | None:
    """FFCV's JPEG decoder, without importing FFCV; what it answers is what training would meet.
    None where its library is not found."""
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
        answer = imdecode(data, len(data), *size, pixels, *size, 0, 0, 1, 1, False, False)
        return bool(answer == 0)

    return decode
