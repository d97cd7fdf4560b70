"""Operations for FFCV pipelines that FFCV does not have: decoding that detects damaged images,
reproducible augmentation, and normalisation to any dtype.

FFCV's own decoders ignore the result of the JPEG library, so that the previous contents of the
buffer are used in place of a damaged image. Its augmentation draws from threads with random states
that can't be saved. Imports FFCV, which takes seconds, so import this module locally.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import torch
from ffcv.fields.rgb_image import IMAGE_MODES
from ffcv.libffcv import imdecode, memcpy, resize_crop
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.operation import Operation
from numba.np.ufunc.parallel import get_thread_id as _get_thread_id

from ltui.training.data.ffcv.keyed_random import (
    AUGMENT_SALT,
    CROP_SALT,
    FIRST_FACTOR,
    SECOND_FACTOR,
    STEP,
)

get_thread_id: Any = _get_thread_id
_BYTE = np.dtype("<u1")
_JPEG = IMAGE_MODES["jpg"]
_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(FIRST_FACTOR), np.uint64(SECOND_FACTOR)
_ONE, _R11, _R27, _R30, _R31 = (np.uint64(n) for n in (1, 11, 27, 30, 31))


@dataclass(frozen=True)
class Shared(AllocationQuery):  # type: ignore[misc]
    """Memory that all batches of an epoch use in turn, instead of separate memory for each."""


class PerThread(Shared):
    """Shared memory with a separate part for each decoding thread."""


class Key(Shared):
    """One number (1,), the random key that the reader sets for each epoch."""

    def __init__(self) -> None:
        super().__init__((1,), np.dtype("<u8"))


class Failed(Shared):
    """Error code of each sample of the batch; not 0 if the sample could not be decoded."""

    def __init__(self) -> None:
        super().__init__((), np.dtype("<i4"))


@numba.njit(inline="always")
def _mix(state: Any) -> Any:
    state = (state ^ (state >> _R30)) * _FIRST
    state = (state ^ (state >> _R27)) * _SECOND
    return state ^ (state >> _R31)


@numba.njit(inline="always")
def _first_state(key: Any, sample: Any, salt: Any) -> Any:
    return _mix(key + _STEP * (np.uint64(sample) + _ONE)) ^ np.uint64(salt)


@numba.njit(inline="always")
def _as_fraction(state: Any) -> Any:
    return np.float64(_mix(state) >> _R11) / 9007199254740992.0


@numba.njit
def random_crop(height: Any, width: Any, state: Any, scale: Any, log_ratio: Any) -> Any:
    """Return row, column, height and width of a random crop, as torchvision's RandomResizedCrop."""
    area = height * width
    for _ in range(10):
        state += _STEP
        target = area * (scale[0] + (scale[1] - scale[0]) * _as_fraction(state))
        state += _STEP
        aspect = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * _as_fraction(state))
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            state += _STEP
            row = int(_as_fraction(state) * (height - h + 1))
            state += _STEP
            column = int(_as_fraction(state) * (width - w + 1))
            return row, column, h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


@numba.njit
def centre_crop(height: Any, width: Any, ratio: float) -> Any:
    """Return row, column, height and width of the square centre crop."""
    side = max(1, int(ratio * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


class DecodeImages(Operation):  # type: ignore[misc]
    """Decodes images of any size to ``side`` x ``side`` pixels.

    It takes a random crop if ``scale`` is given, else a centre crop. Each thread decodes into one
    buffer, independent of the batch size.
    """

    def __init__(
        self,
        side: int,
        *,
        scale: tuple[float, float] | None = None,
        aspect: tuple[float, float] = (3 / 4, 4 / 3),
        center_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.side = side
        self.scale = scale
        self.aspect = aspect
        self.center_ratio = center_ratio

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        shape = (self.side, self.side, 3)
        area = self.metadata["height"].astype(np.int64) * self.metadata["width"]
        scratch = PerThread((int(area.max()) * 3,), _BYTE)
        state = replace(previous_state, jit_mode=True, shape=shape, dtype=_BYTE)
        return state, (AllocationQuery(shape, _BYTE), scratch, Key(), Failed())

    def generate_code(self) -> Callable[..., Any]:
        threads = Compiler.get_iterator()
        read = self.memory_read
        decode_jpeg, resize = Compiler.compile(imdecode), Compiler.compile(resize_crop)
        copy = Compiler.compile(memcpy)
        is_random = self.scale is not None
        scale = np.array(self.scale or (1.0, 1.0))
        log_ratio, ratio = np.log(np.array(self.aspect)), self.center_ratio

        def decode(batch_indices: Any, memory: Any, metadata: Any, storage_state: Any) -> Any:
            destination, scratch, key, failed = memory
            for i in threads(len(batch_indices)):
                sample = batch_indices[i]
                field = metadata[sample]
                data = read(field["data_ptr"], storage_state)
                height, width = np.uint32(field["height"]), np.uint32(field["width"])
                failed[i] = 0
                if field["mode"] == _JPEG:
                    buffer = scratch[get_thread_id()][: 3 * height * width]
                    failed[i] = decode_jpeg(
                        data, buffer, height, width, height, width, 0, 0, 1, 1, False, False
                    )
                    image = buffer.reshape(height, width, 3)
                else:
                    image = data.reshape(height, width, 3)
                if is_random:
                    state = _first_state(key[0], sample, CROP_SALT)
                    y, x, h, w = random_crop(height, width, state, scale, log_ratio)
                else:
                    y, x, h, w = centre_crop(height, width, ratio)
                target = destination[i]
                if h == target.shape[0] and h == height and w == width and w == target.shape[1]:
                    copy(image, target)
                else:
                    resize(image, y, y + h, x, x + w, target)
            return destination[: len(batch_indices)]

        decode.is_parallel = True  # type: ignore[attr-defined]
        return decode


class Augment(Operation):  # type: ignore[misc]
    """Flips and shifts uint8 images (n, height, width, 3) and blanks a square."""

    def __init__(
        self,
        *,
        flip: bool = False,
        shift: int = 0,
        cutout: int = 0,
        fill: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """``flip``: flip every second image on average. ``shift``: maximum shift in pixels; blank
        areas are set to ``fill``. ``cutout``: side of the square that is set to ``fill``."""
        super().__init__()
        self.flip, self.shift, self.cutout, self.fill = flip, shift, cutout, fill

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        query = AllocationQuery(previous_state.shape, previous_state.dtype)
        return replace(previous_state, jit_mode=True), (query, Key())

    def generate_code(self) -> Callable[..., Any]:
        threads = Compiler.get_iterator()
        may_flip, shift, cutout = self.flip, self.shift, self.cutout
        fill = np.array(self.fill, dtype=_BYTE)

        def augment(images: Any, memory: Any, indices: Any) -> Any:
            destination, key = memory
            height, width = images.shape[1], images.shape[2]
            for i in threads(len(indices)):
                state = _first_state(key[0], indices[i], AUGMENT_SALT) + _STEP
                flip = may_flip and _as_fraction(state) < 0.5
                state += _STEP
                dy = int(_as_fraction(state) * (2 * shift + 1)) - shift
                state += _STEP
                dx = int(_as_fraction(state) * (2 * shift + 1)) - shift
                for y in range(height):
                    for x in range(width):
                        from_y = y + dy
                        from_x = (width - 1 - x if flip else x) + dx
                        if 0 <= from_y < height and 0 <= from_x < width:
                            for c in range(3):
                                destination[i, y, x, c] = images[i, from_y, from_x, c]
                        else:
                            for c in range(3):
                                destination[i, y, x, c] = fill[c]
                if cutout > 0:
                    state += _STEP
                    top = int(_as_fraction(state) * max(1, height - cutout + 1))
                    state += _STEP
                    left = int(_as_fraction(state) * max(1, width - cutout + 1))
                    for y in range(top, min(height, top + cutout)):
                        for x in range(left, min(width, left + cutout)):
                            for c in range(3):
                                destination[i, y, x, c] = fill[c]
            return destination[: len(indices)]

        augment.is_parallel = True  # type: ignore[attr-defined]
        augment.with_indices = True  # type: ignore[attr-defined]
        return augment


class Normalize(Operation):  # type: ignore[misc]
    """Normalises uint8 images (n, 3, height, width), channels last in memory, to ``dtype``.

    It subtracts ``mean`` and divides by ``std``, both for values from 0 to 1. The result is new
    memory on the device of the images.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        *,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.mean = torch.tensor(mean, dtype=torch.float64) * 255
        self.factor = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
        self.channels_last = channels_last

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        return replace(previous_state, jit_mode=False, dtype=self.dtype), None

    def generate_code(self) -> Callable[..., Any]:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.dtype.itemsize]
        values = (torch.arange(256, dtype=torch.float64)[:, None] - self.mean) * self.factor
        table = values.to(self.dtype).view(bits).numpy()
        apply_table = _compile_table(Compiler.num_threads > 1)
        constants = [x.float().view(1, 3, 1, 1) for x in (self.mean, self.factor)]
        constants_on: dict[torch.device, list[torch.Tensor]] = {}

        def on_device(images: torch.Tensor) -> torch.Tensor:
            if images.device not in constants_on:
                constants_on[images.device] = [x.to(images.device) for x in constants]
            mean, factor = constants_on[images.device]
            return images.to(torch.float32).sub_(mean).mul_(factor).to(self.dtype)

        def normalize(images: torch.Tensor, _: Any) -> torch.Tensor:
            if images.device.type != "cpu":
                result = on_device(images)
            else:
                flat = images.permute(0, 2, 3, 1)
                result = torch.empty(flat.shape, dtype=self.dtype)
                apply_table(flat.numpy(), table, result.view(bits).numpy())
                result = result.permute(0, 3, 1, 2)
            return result if self.channels_last else result.contiguous()

        return normalize


def _compile_table(parallel: bool) -> Callable[..., None]:
    """Return a compiled function that replaces bytes (n, height, width, 3) by values of a table.

    The table has shape (256, 3).
    """
    images_in_parallel = numba.prange if parallel else range

    def apply_table(images: Any, table: Any, out: Any) -> None:
        for i in images_in_parallel(images.shape[0]):
            for y in range(images.shape[1]):
                for x in range(images.shape[2]):
                    for c in range(3):
                        out[i, y, x, c] = table[images[i, y, x, c], c]

    compiled: Callable[..., None] = numba.njit(parallel=parallel, nogil=True)(apply_table)
    return compiled
