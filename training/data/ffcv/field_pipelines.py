"""FFCV pipelines of the fields of a ``.beton`` file, built on a rank once its device is known.

    pipelines = image_pipelines(file, device=trainer.strategy.root_device,
                                dtype=precision_dtype(trainer.precision),
                                transform=ImageTransformConfig(side=224, flip=True))
    reader = FfcvReader(file, pipelines, batch_size=64, device=device)

A project can modify the result of ``image_pipelines``, or write its own pipelines for
``FfcvReader``.

Three operations are not FFCV's. Its decoders ignore the result of the JPEG library, so that the
previous contents of the buffer are used in place of a damaged image. Its augmentation draws from
threads with random states that can't be saved. Its normalisation knows no bfloat16. Imports FFCV,
which takes seconds, so import this module locally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage
from ffcv.types import TYPE_ID_HANDLER
from numba.extending import register_jitable

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, BetonFile
from ltui.training.data.ffcv.image_transform import (
    AUGMENT_SALT,
    CROP_SALT,
    ImageTransformConfig,
    centre_crop,
    draw,
    first_state,
    mix,
    random_begin,
    random_crop,
    random_shift,
)

_BYTE = np.dtype("<u1")
_JPEG = IMAGE_MODES["jpg"]
for _function in (mix, first_state, draw, random_crop, centre_crop, random_shift, random_begin):
    register_jitable(_function)


class Key(AllocationQuery):  # type: ignore[misc]
    """The random key of the epoch, once for each sample of the batch. The reader sets it."""

    def __init__(self) -> None:
        super().__init__((), np.dtype("<u8"))


class Failed(AllocationQuery):  # type: ignore[misc]
    """Error code of each sample of the batch; not 0 if the sample could not be decoded."""

    def __init__(self) -> None:
        super().__init__((), np.dtype("<i4"))


@dataclass(eq=False)
class DecodeImages(Operation):  # type: ignore[misc]
    """Decodes images of any size to squares of the transform's side.

    It takes a random crop if the transform has a ``scale``, else a centre crop.
    """

    transform: ImageTransformConfig

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        shape = (self.transform.side, self.transform.side, 3)
        state = replace(previous_state, jit_mode=True, shape=shape, dtype=_BYTE)
        return state, (AllocationQuery(shape, _BYTE), Key(), Failed())

    def generate_code(self) -> Callable[..., Any]:
        threads = Compiler.get_iterator()
        read = self.memory_read
        decode_jpeg, resize = Compiler.compile(imdecode), Compiler.compile(resize_crop)
        copy = Compiler.compile(memcpy)
        transform = self.transform
        is_random = transform.scale is not None
        scale = np.array(transform.scale or (1.0, 1.0))
        log_ratio, ratio = np.log(np.array(transform.aspect)), transform.center_ratio

        def decode(batch_indices: Any, memory: Any, metadata: Any, storage_state: Any) -> Any:
            destination, key, failed = memory
            for i in threads(len(batch_indices)):
                sample = batch_indices[i]
                field = metadata[sample]
                data = read(field["data_ptr"], storage_state)
                height, width = np.uint32(field["height"]), np.uint32(field["width"])
                failed[i] = 0
                if field["mode"] == _JPEG:
                    # One image of memory for each thread, independent of the batch size.
                    buffer = np.empty(3 * height * width, np.uint8)
                    failed[i] = decode_jpeg(
                        data, buffer, height, width, height, width, 0, 0, 1, 1, False, False
                    )
                    image = buffer.reshape(height, width, 3)
                else:
                    image = data.reshape(height, width, 3)
                if is_random:
                    state = first_state(key[i], sample, CROP_SALT)
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


@dataclass(eq=False)
class Augment(Operation):  # type: ignore[misc]
    """Flips and shifts uint8 images (n, height, width, 3) and blanks a square.

    Every second image is flipped on average. Blank areas have the transform's colour ``fill``.
    """

    transform: ImageTransformConfig

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        query = AllocationQuery(previous_state.shape, previous_state.dtype)
        return replace(previous_state, jit_mode=True), (query, Key())

    def generate_code(self) -> Callable[..., Any]:
        threads = Compiler.get_iterator()
        transform = self.transform
        may_flip, shift, cutout = transform.flip, transform.shift, transform.cutout
        fill = np.array(transform.fill, dtype=_BYTE)

        def augment(images: Any, memory: Any, indices: Any) -> Any:
            destination, key = memory
            height, width = images.shape[1], images.shape[2]
            for i in threads(len(indices)):
                state = first_state(key[i], indices[i], AUGMENT_SALT)
                flip = may_flip and draw(state, 1) < 0.5
                dy, dx = random_shift(state, 2, shift), random_shift(state, 3, shift)
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
                    top = random_begin(state, 4, height, cutout)
                    left = random_begin(state, 5, width, cutout)
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


# Pipelines of the fields.


def image_pipelines(
    file: BetonFile,
    *,
    device: torch.device,
    dtype: torch.dtype,
    transform: ImageTransformConfig,
    names: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """Return the pipelines of all fields, or of those in ``names`` in this order.

    Images are transformed by ``transform`` and converted to ``dtype``. Numbers have shape (n,), and
    arrays are unchanged. Raises ``BetonError`` if there is no such field.
    """
    chosen = file.field_names if names is None else names
    fields = [file.fields[file.field_index(name)] for name in chosen]
    return {
        field.name: _image_pipeline(device, dtype, transform)
        if field.type_id == IMAGE
        else value_pipeline(field.type_id, device)
        for field in fields
    }


def value_pipeline(type_id: int, device: torch.device) -> list[Any]:
    """Return the pipeline of a field that is no image."""
    squeeze = [Squeeze(1)] if type_id in (FLOAT, INT) else []
    decoder = TYPE_ID_HANDLER[type_id].get_decoder_class(None)  # equal for all fields of the type
    return [decoder(), ToTensor(), *_to_device(device), *squeeze]


def _image_pipeline(
    device: torch.device, dtype: torch.dtype, transform: ImageTransformConfig
) -> list[Any]:
    augments = transform.flip or transform.shift or transform.cutout
    return [
        DecodeImages(transform),
        *([Augment(transform)] if augments else []),
        ToTensor(),
        *_to_device(device),
        ToTorchImage(),
        Normalize(dtype, transform.mean, transform.std, channels_last=transform.channels_last),
    ]


def _to_device(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [ToDevice(device, non_blocking=True)]
