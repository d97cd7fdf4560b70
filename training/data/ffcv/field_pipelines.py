"""FFCV pipelines of the fields of a ``.beton`` file, built on a rank once its device is known.

    pipelines = image_pipelines(file, device=trainer.strategy.root_device,
                                dtype=precision_dtype(trainer.precision),
                                transform=ImageTransformConfig(side=224, flip=True))
    reader = FfcvReader(file, pipelines, batch_size=64, device=device)

A project can modify the result of ``image_pipelines``, or write its own pipelines for
``FfcvReader``. Imports FFCV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage
from ffcv.types import TYPE_ID_HANDLER

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, BetonFile
from ltui.training.data.ffcv.image_transform_config import ImageTransformConfig
from ltui.training.data.ffcv.pipeline_operations import Augment, DecodeImages, Normalize


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
        *_to_device(device),
        ToTorchImage(),
        Normalize(dtype, transform.mean, transform.std, channels_last=transform.channels_last),
    ]


def _to_device(device: torch.device) -> list[Any]:
    return [] if device.type == "cpu" else [ToDevice(device, non_blocking=True)]
