"""Protection of torch's number of threads, which FFCV sets to its own, even when it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
