"""Decode records of the queue into torch tensors, bit by bit, to compare them with what was put."""

from __future__ import annotations

import torch

from ltui.training.tensor_queue.queue_file import Layout, split_parts
from ltui.training.tensor_queue.queue_reader import Record

_COMPRESSED = {
    Layout.CSR: torch.sparse_csr,
    Layout.CSC: torch.sparse_csc,
    Layout.BSR: torch.sparse_bsr,
    Layout.BSC: torch.sparse_bsc,
}


def to_tensor(record: Record) -> torch.Tensor:
    """Restore the tensor of a record bit by bit, with its dtype and layout.

    Raises ``ValueError`` if the record has only a label.
    """
    if record.layout is Layout.NONE:
        raise ValueError("this record carries a label and no tensor")
    if record.layout is Layout.STRIDED:
        return _dense(record.dtype, record.shape, record.payload)
    parts = [_dense(*part) for part in split_parts(record.payload)]
    if record.layout is Layout.COO:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            record.shape,
            is_coalesced=record.coalesced,
            check_invariants=False,
        )
    if record.layout is Layout.QUANTIZED_TENSOR:
        integers, scale, zero_point = parts
        return torch._make_per_tensor_quantized_tensor(
            integers, float(scale.item()), int(zero_point.item())
        )
    if record.layout is Layout.QUANTIZED_CHANNEL:
        integers, scales, zero_points, axis = parts
        return torch._make_per_channel_quantized_tensor(
            integers, scales, zero_points, int(axis.item())
        )
    compressed, plain, values = parts
    layout = _COMPRESSED[record.layout]
    return torch.sparse_compressed_tensor(
        compressed, plain, values, record.shape, layout=layout, check_invariants=False
    )


def _dense(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    # Copy into a bytearray, because a tensor over immutable bytes must not be written to.
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
