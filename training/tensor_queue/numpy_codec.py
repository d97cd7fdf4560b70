"""Decode a record's payload bytes into NumPy arrays. NumPy only; never torch.

Types that NumPy does not have are widened exactly: bfloat16 and float8 to float32, complex32 to
complex64. Arrays are read-only views of the record's own copy of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ltui.training.tensor_queue.file_layout import DTYPE_NAMES, Layout, split_parts

Array = npt.NDArray[Any]

_STORED = {
    "bfloat16": "<u2",
    "complex32": "<u4",
    "qint8": "<i1",
    "quint8": "<u1",
    "qint32": "<i4",
    "complex64": "<c8",
    "complex128": "<c16",
    "bool": "|b1",
}
"""NumPy type of the bytes on the wire, for dtypes where the name does not determine it."""


@dataclass(frozen=True, slots=True)
class SparseArray:
    """Parts of a sparse tensor: ``indices`` (2-D for COO), ``values`` and, except for COO,
    ``compressed``."""

    layout: Layout
    shape: tuple[int, ...]
    indices: Array
    """COO: int64 (sparse dimensions, entries). Other layouts: the plain (column or row) indices."""
    values: Array
    compressed: Array | None = None
    """CSR and BSR: row pointers; CSC and BSC: column pointers; COO: ``None``."""
    coalesced: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedArray:
    """Integers and the affine map from them to the represented numbers."""

    values: Array
    scale: Array
    """0-D, or one scale for each slice along ``axis``."""
    zero_point: Array
    axis: int | None = None

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return ``(values - zero_point) * scale`` in float32."""
        shape = [1] * self.values.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale = self.scale.reshape(shape).astype(np.float64)
        zero_point = self.zero_point.reshape(shape)
        return np.asarray((self.values - zero_point) * scale, dtype=np.float32)


Payload = Array | SparseArray | QuantizedArray


def to_array(dtype: str, shape: Sequence[int], data: bytes) -> Array:
    """Return the row-major elements as an array.

    Raises ``ValueError`` if the number of bytes does not match the shape.
    """
    flat = np.frombuffer(data, dtype=_stored(dtype))
    widen = _WIDEN.get(dtype)
    return (flat if widen is None else widen(flat)).reshape(shape)


def to_payload(
    layout: Layout, dtype: str, shape: tuple[int, ...], coalesced: bool, payload: bytes
) -> Payload:
    """Return the array of a record as the type that belongs to its layout."""
    if layout is Layout.NONE:
        return np.empty(0)
    if layout is Layout.STRIDED:
        if dtype == "float64" and len(shape) == 1:
            # The row of a step is by far the most frequent record.
            row = np.frombuffer(payload)
            if row.size == shape[0]:
                return row
        return to_array(dtype, shape, payload)
    arrays = [to_array(*part) for part in split_parts(payload)]
    if layout is Layout.COO:
        indices, values = arrays
        return SparseArray(layout, shape, indices, values, coalesced=coalesced)
    if layout is Layout.QUANTIZED_TENSOR:
        values, scale, zero_point = arrays
        return QuantizedArray(values, scale, zero_point)
    if layout is Layout.QUANTIZED_CHANNEL:
        values, scale, zero_point, axis = arrays
        return QuantizedArray(values, scale, zero_point, int(axis))
    compressed, indices, values = arrays
    return SparseArray(layout, shape, indices, values, compressed)


@cache
def _stored(dtype: str) -> np.dtype[Any]:
    if dtype.startswith("float8"):
        return np.dtype("<u1")
    stored: np.dtype[Any] = np.dtype(_STORED.get(dtype) or dtype).newbyteorder("<")
    return stored


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _from_complex32(bits: Array) -> Array:
    return bits.view("<f2").astype(np.float32).view(np.complex64)


def _from_float8(dtype: str) -> Callable[[Array], Array]:
    return lambda bits: _float8_values(dtype)[bits]


@cache
def _float8_values(dtype: str) -> Array:
    """Return all 256 values of an eight-bit format such as e4m3fn, e5m2 or e4m3fnuz."""
    number_format = dtype.removeprefix("float8_")
    bits = np.arange(256)
    if number_format == "e8m0fnu":
        values = np.ldexp(1.0, bits - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    exponent_bits, mantissa_bits = int(number_format[1]), int(number_format[3])
    unsigned_zero = number_format.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if unsigned_zero else 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    values = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - mantissa_bits)
    values = np.where(bits & 0x80, -values, values)
    if unsigned_zero:
        values[0x80] = np.nan
    elif number_format == "e5m2":
        top = exponent == 0x1F
        values = np.where(top & (mantissa == 0), np.copysign(np.inf, values), values)
        values = np.where(top & (mantissa != 0), np.nan, values)
    else:
        values[(bits & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


_WIDEN: dict[str, Callable[[Array], Array]] = {
    "bfloat16": _from_bfloat16,
    "complex32": _from_complex32,
    **{name: _from_float8(name) for name in DTYPE_NAMES if name.startswith("float8")},
}
