"""FFCV pipelines for the fields of a ``.beton`` file: built on a rank once its device is known.

    pipelines = image_pipelines(file, device=trainer.strategy.root_device,
                                dtype=precision_dtype(trainer.precision),
                                transform=ImageTransformConfig(side=224, flip=True))
    reader = FfcvReader(file, pipelines, batch_size=64, device=device)

A project of one's own can change what ``image_pipelines`` gives, or write its own for
``FfcvReader``. Imports FFCV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ffcv.fields.basics import FloatDecoder, IntDecoder
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage

from ltui.training.data.ffcv.beton_file import (
    ARRAY,
    BYTES,
    FLOAT,
    IMAGE,
    INT,
    JSON,
    TENSOR,
    BetonFile,
)
from ltui.training.data.ffcv.image_transform import ImageTransformConfig
from ltui.training.data.ffcv.pipeline_operations import Augment, DecodeImages, Normalize

_DECODERS = {
    FLOAT: FloatDecoder,
    INT: IntDecoder,
    BYTES: BytesDecoder,
    JSON: BytesDecoder,
    ARRAY: NDArrayDecoder,
    TENSOR: NDArrayDecoder,
}


def image_pipelines(
    file: BetonFile,
    *,
    device: torch.device,
    dtype: torch.dtype,
    transform: ImageTransformConfig,
    names: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """For every field, or those of ``names`` in that order: images as ``look`` says in ``dtype``,
    numbers (n,), arrays as they are. ``BetonError`` where there is no such field."""
    chosen = [f.name for f in file.fields] if names is None else list(names)
    fields = [file.fields[file.field_index(name)] for name in chosen]
    return {
        field.name: _images(device, dtype, transform)
        if field.type_id == IMAGE
        else value_pipeline(field.type_id, device)
        for field in fields
    }


def value_pipeline(type_id: int, device: torch.device) -> list[Any]:
    """Of a field that is no image."""
    one = [Squeeze(1)] if type_id in (FLOAT, INT) else []
    return [_DECODERS[type_id](), ToTensor(), *_there(device), *one]


def _images(device: torch.device, dtype: torch.dtype, transform: ImageTransformConfig) -> list[Any]:
    decode = DecodeImages(
        transform.side,
        scale=transform.scale,
        aspect=transform.aspect,
        center_ratio=transform.center_ratio,
    )
    augments = transform.flip or transform.shift or transform.cutout
    fill = transform.fill
    augment = Augment(
        flip=transform.flip, shift=transform.shift, cutout=transform.cutout, fill=fill
    )
    return [
        decode,
        *([augment] if augments else []),
        ToTensor(),
        *_there(device),
        ToTorchImage(),
        Normalize(dtype, transform.mean, transform.std, channels_last=transform.channels_last),
    ]


def _there(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [ToDevice(device, non_blocking=True)]
