"""The random states of a rank, in the form in which a checkpoint stores them.

They are those of Python, NumPy, torch on the CPU, and torch on the rank's own GPU. They are stored
as tensors and plain numbers, so that a checkpoint can be read without unpickling objects.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
