"""A ``.beton`` file in figures, for a person. NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, JPEG, KINDS, BetonFile


def summary(file: BetonFile) -> dict[str, Any]:
    """Plain values; sizes in bytes, shares from 0 to 1, None where there is nothing to say."""
    used = int(file.allocations["size"].sum())
    return {
        "file": str(file.path),
        "samples": file.samples,
        "bytes": file.bytes,
        "page_bytes": file.page_size,
        "pages": file.pages,
        "page_use": used / (file.pages * file.page_size) if file.pages else None,
        "fields": [_field(file, index) for index in range(len(file.fields))],
    }


def _field(file: BetonFile, index: int) -> dict[str, Any]:
    field = file.fields[index]
    said: dict[str, Any] = {"name": field.name, "kind": KINDS[field.type_id]}
    column = file.metadata[f"f{index}"]
    if field.type_id == IMAGE:
        heights, widths = file.image_sides(index)
        said["width"], said["height"] = _range(widths), _range(heights)
        said["jpeg"] = float((column["mode"] == JPEG).mean())
    if field.points:
        said["bytes"] = int(file.sizes(index).sum())
    if field.item_bytes is not None:
        said["shape"], said["dtype"] = list(field.shape), field.dtype
    if field.type_id in (INT, FLOAT):
        said["low"], said["high"] = float(np.nanmin(column)), float(np.nanmax(column))
        said["different"] = len(np.unique(column)) if field.type_id == INT else None
    return said


def _range(sides: Any) -> list[int]:
    """Least, median, largest."""
    return [int(sides.min()), int(np.median(sides)), int(sides.max())]
