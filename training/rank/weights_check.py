"""Whether the weights of a checkpoint are ``finite``, ``NaN`` or ``inf``, as its manifest says.

The check adds no synchronisation of a GPU: it is queued there before the weights are copied to be
saved, and its result is read when that copy is complete. Files that a program wrote are read only
in a rank, and never unpickled as objects.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank.resume.plain_data import tensors_of

FINITE, NAN, INFINITE = "finite", "NaN", "inf"
"""Values of ``weights`` in a manifest. Without the key the weights were not checked."""
_TORCH_FILES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
"""Beginnings of the names of files that the Hugging Face Trainer saves beside the weights."""


class WeightsCheck:
    """The check of the weights of one checkpoint: begun before they are saved, read afterwards."""

    def __init__(self, weights: Mapping[str, Any], buffers: Collection[str] = ()) -> None:
        """``buffers`` are names of tensors that may be infinite, such as attention masks."""
        self._extremes: list[torch.Tensor] = []
        """On the CPU: a row with the minimum and the maximum of each tensor, by device."""
        self._copies: list[torch.cuda.Event] = []
        self._may_be_infinite: list[bool] = []
        try:
            self._begin(weights, buffers)
        except (RuntimeError, TypeError, AttributeError):
            # There are kinds of tensors, such as float8, of which torch finds no minimum.
            self._extremes = []

    @torch.no_grad()
    def _begin(self, weights: Mapping[str, Any], buffers: Collection[str]) -> None:
        rows: dict[torch.device, list[tuple[torch.Tensor, bool]]] = {}
        for name, value in weights.items():
            for tensor in filter(_is_checked, _local_tensors(value)):
                rows.setdefault(tensor.device, []).append((_extremes(tensor), name in buffers))
        for device, pairs in rows.items():
            table = torch.stack([extremes for extremes, _ in pairs])
            self._extremes.append(table.to("cpu", non_blocking=True))
            self._may_be_infinite += [is_buffer for _, is_buffer in pairs]
            if device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(torch.cuda.current_stream(device))
                self._copies.append(copied)

    def result(self) -> str | None:
        """Return ``finite``, ``NaN`` or ``inf``; None if the weights could not be checked.

        Call it after the weights were saved.
        """
        for copied in self._copies:
            copied.synchronize()  # Saving has waited for it already.
        pairs = [pair for table in self._extremes for pair in table.tolist()]
        return _worst(zip(pairs, self._may_be_infinite, strict=True)) if pairs else None


def weights_in_files(folder: Path) -> str | None:
    """Return the result for the files that a program wrote into ``folder``.

    None if a file with weights cannot be read as tensors alone, or if there is none.
    """
    pairs: list[list[float]] = []
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if not path.name.startswith(_NO_WEIGHTS):
                pairs += [_extremes(t).tolist() for t in _tensors_in(path) if _is_checked(t)]
    except Exception:  # noqa: BLE001 - whatever a reader raises, the checkpoint is complete
        return None
    # A program may also save single numbers, such as a best loss that is still infinite.
    return _worst((pair, pair[1] != math.inf) for pair in pairs) if pairs else None


def _tensors_in(path: Path) -> Iterator[torch.Tensor]:
    if path.suffix == ".safetensors":
        # Imported here: only programs that have the library write such files.
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            yield from (file.get_tensor(name) for name in file.keys())  # noqa: SIM118
    elif path.suffix in _TORCH_FILES:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        yield from (tensor for tensor in tensors_of(saved) if tensor.dim())


def _is_checked(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


def _local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an entry that are on this rank; a sharded one has a part on each."""
    if hasattr(value, "local_shards"):
        yield from (shard.tensor for shard in value.local_shards())
    elif hasattr(value, "to_local"):
        yield value.to_local()
    else:
        yield from tensors_of(value)


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Return minimum and maximum; both are NaN if the tensor contains NaN."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.stack(torch.aminmax(values.detach())).double()


def _worst(extremes: Iterable[tuple[list[float], bool]]) -> str:
    """Return the result for pairs of minimum and maximum, and whether infinities are allowed."""
    result = FINITE
    for (low, high), may_be_infinite in extremes:
        if math.isnan(low):
            return NAN
        if not may_be_infinite and math.isinf(max(-low, high)):
            result = INFINITE
    return result
