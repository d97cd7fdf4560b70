"""Data in the form in which a checkpoint stores it: random states, and containers of tensors.

The random states are those of Python, NumPy, torch on the CPU, and torch on the rank's own GPU. All
is stored as tensors and plain values, so that it can be read without unpickling objects.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

States = dict[str, Any]


def read_random_states(device: torch.device | None = None) -> States:
    """Return all current random states. ``device`` is the GPU of this rank, if it has one."""
    version, numbers, spare = random.getstate()
    states: States = {
        "python": [version, torch.tensor(numbers, device="cpu"), spare],
        "torch": torch.get_rng_state(),
    }
    # Code that draws from NumPy has imported it.
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):
            name, keys, position, has_spare, spare = state
            keys = torch.from_numpy(keys.astype("int64"))
            states["numpy"] = [str(name), keys, int(position), int(has_spare), float(spare)]
    if device is not None and device.type == "cuda":
        # Seed and offset are in host memory, so reading them does not wait for the GPU.
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: States, device: torch.device | None = None) -> None:
    """Set the random states that ``states`` contains. A state that is missing there is kept."""
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers.tolist()), spare))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_spare, spare = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_spare, spare))
    if "cuda" in states and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the host's random states on exit, whatever was drawn in between."""
    states = read_random_states()
    try:
        yield
    finally:
        restore_random_states(states)


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


def load_plain_data(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return the dictionary that a rank saved in the file ``path``, on the CPU."""
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    return saved
