"""Encode torch tensors into the queue's payloads and decode them, bit by bit.

This is the only module that knows torch's tensor layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ltui.training.tensor_queue.queue_file import (
    COALESCED,
    DTYPE_CODES,
    DTYPE_NAMES,
    PART,
    Layout,
    align8,
    split_parts,
)

if TYPE_CHECKING:
    from ltui.training.tensor_queue.queue_reader import Record
    from ltui.training.tensor_queue.ring_writer import Chunk

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for name, code in DTYPE_CODES.items()
    if name and hasattr(torch, name)
}
"""Wire code of each dtype that the queue carries and the installed torch has."""

_COMPRESSED = {
    torch.sparse_csr: Layout.CSR,
    torch.sparse_csc: Layout.CSC,
    torch.sparse_bsr: Layout.BSR,
    torch.sparse_bsc: Layout.BSC,
}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_BY_ROW = (Layout.CSR, Layout.BSR)
_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


@dataclass(slots=True)
class EncodedTensor:
    """The header fields of a tensor's record, and dense contiguous tensors that hold its bytes."""

    dtype: int
    layout: Layout
    shape: Sequence[int]
    parts: list[torch.Tensor] = field(default_factory=list)
    flags: int = 0

    def on_cuda(self) -> bool:
        """Return True if bytes must be copied from a device first."""
        for part in self.parts:  # noqa: SIM110  (a generator costs as much as the whole answer)
            if part.is_cuda:
                return True
        return False

    def payload_bytes(self) -> int:
        """Return the size of the payload that ``chunks`` returns."""
        if self.layout is Layout.STRIDED:
            return self.parts[0].nbytes
        return sum(PART.size + 8 * part.dim() + align8(part.nbytes) for part in self.parts)

    def chunks(self) -> list[Chunk]:
        """Return the payload. All parts are in CPU memory, and the caller keeps them alive."""
        if self.layout is Layout.STRIDED:
            return [_memory(self.parts[0])]
        chunks: list[Chunk] = []
        for part in self.parts:
            size = part.numel() * part.element_size()
            head = PART.pack(DTYPES[part.dtype], part.dim(), 0, 0, size)
            sizes = b"".join(n.to_bytes(8, "little") for n in part.shape)
            chunks += [head + sizes, _memory(part), bytes(align8(size) - size)]
        return chunks


def encode(tensor: torch.Tensor) -> EncodedTensor:
    """Encode ``tensor`` without copying it if possible: strided parts share its memory.

    Raises ``TypeError`` for a layout, dtype or device that the queue can't carry.
    """
    if type(tensor) not in _PLAIN_TYPES:
        tensor = _without_subclass(tensor)
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"the queue cannot carry a tensor on device {tensor.device.type}")
    if tensor.is_nested:
        raise TypeError("the queue cannot carry a nested tensor; put its components")
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"the queue cannot carry dtype {tensor.dtype}")
    shape = tensor.shape
    if tensor.layout is torch.strided:
        if tensor.is_quantized:
            return _encode_quantized(tensor, code, shape)
        return EncodedTensor(code, Layout.STRIDED, shape, [_plain(tensor)])
    if tensor.layout is torch.sparse_coo:
        parts = [_plain(tensor._indices()), _plain(tensor._values())]
        flags = COALESCED if tensor.is_coalesced() else 0
        return EncodedTensor(code, Layout.COO, shape, parts, flags)
    layout = _COMPRESSED.get(tensor.layout)
    if layout is None:
        raise TypeError(f"the queue cannot carry layout {tensor.layout}")
    if layout in _BY_ROW:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return EncodedTensor(code, layout, shape, [_plain(part) for part in parts])


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a plain ``torch.Tensor``.

    Subclasses that only add behaviour are converted. Raises ``TypeError`` for subclasses that wrap
    other tensors, because they have no bytes of their own.
    """
    if hasattr(tensor, "__tensor_flatten__") or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the queue cannot carry a {type(tensor).__name__}")
    return tensor.as_subclass(torch.Tensor)


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
    layout = next(
        torch_layout for torch_layout, code in _COMPRESSED.items() if code is record.layout
    )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, record.shape, layout=layout, check_invariants=False
    )


def _encode_quantized(tensor: torch.Tensor, code: int, shape: Sequence[int]) -> EncodedTensor:
    if DTYPE_NAMES[code] not in _INTEGERS:
        raise TypeError(f"the queue cannot carry dtype {tensor.dtype}")
    scheme = tensor.qscheme()
    integers = _plain(tensor.int_repr())
    if scheme == torch.per_tensor_affine:
        scale = torch.tensor(tensor.q_scale(), dtype=torch.float64)
        zero_point = torch.tensor(tensor.q_zero_point(), dtype=torch.int64)
        return EncodedTensor(code, Layout.QUANTIZED_TENSOR, shape, [integers, scale, zero_point])
    if scheme != torch.per_channel_affine:
        raise TypeError(f"the queue cannot carry a tensor quantized by {scheme}")
    axis = torch.tensor(tensor.q_per_channel_axis(), dtype=torch.int64)
    scales = _plain(tensor.q_per_channel_scales())
    zero_points = _plain(tensor.q_per_channel_zero_points())
    return EncodedTensor(
        code, Layout.QUANTIZED_CHANNEL, shape, [integers, scales, zero_points, axis]
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached and row-major, with lazy conjugation and negation resolved.

    The bytes in memory are then the values of the tensor.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    address, size = tensor.data_ptr(), tensor.nbytes
    if size and not address:
        # FSDP frees the storage of parameters that it has sharded away.
        raise TypeError("the queue cannot carry a tensor whose storage was freed")
    return address, size


def _dense(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    # Copy into a bytearray, because a tensor over immutable bytes must not be written to.
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
