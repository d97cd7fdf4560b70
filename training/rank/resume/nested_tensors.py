"""Nested containers (dictionaries, lists, tuples) whose leaves may be tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None), torch.Tensor)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in ``value``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of ``value`` with ``function`` applied to its tensors; tuples become lists."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def is_plain_data(value: Any) -> bool:
    """Return True if ``value`` can be loaded without unpickling objects (weights-only)."""
    if isinstance(value, dict):
        return all(is_plain_data(k) and is_plain_data(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain_data, value))
    return type(value) in _PLAIN_TYPES or type(value) is torch.nn.Parameter


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two values of the same structure are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)
