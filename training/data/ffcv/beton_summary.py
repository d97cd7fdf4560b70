"""Summary of a ``.beton`` file in numbers. NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from ltui.training.data.ffcv.beton_file import FLOAT, IMAGE, INT, JPEG, BetonFile


def summary(file: BetonFile) -> dict[str, Any]:
    """Return plain values: sizes in bytes, fractions from 0 to 1, None if unknown."""
    used = int(file.allocations["size"].sum())
    return {
        "file": str(file.path),
        "samples": file.samples,
        "bytes": file.bytes,
        "page_bytes": file.page_size,
        "pages": file.pages,
        "page_use": used / (file.pages * file.page_size) if file.pages else None,
        "fields": [_field_summary(file, index) for index in range(len(file.fields))],
    }


def _field_summary(file: BetonFile, index: int) -> dict[str, Any]:
    field = file.fields[index]
    values: dict[str, Any] = {"name": field.name, "kind": field.kind}
    column = file.metadata[f"f{index}"]
    if field.type_id == IMAGE:
        heights, widths = file.image_sides(index)
        values["width"], values["height"] = _range(widths), _range(heights)
        values["jpeg"] = float((column["mode"] == JPEG).mean())
    if field.stored_in_pages:
        values["bytes"] = int(file.sizes(index).sum())
    if field.item_bytes is not None:
        values["shape"], values["dtype"] = list(field.shape), field.dtype
    if field.type_id in (INT, FLOAT):
        values["low"], values["high"] = float(np.nanmin(column)), float(np.nanmax(column))
        values["different"] = len(np.unique(column)) if field.type_id == INT else None
    return values


def _range(sides: Any) -> list[int]:
    """Return minimum, median and maximum."""
    return [int(sides.min()), int(np.median(sides)), int(sides.max())]
