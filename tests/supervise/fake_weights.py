"""The weights of fake ranks: a chain of hashes, one link a step."""

from __future__ import annotations

import hashlib
import random


def next_weights(weights: bytes, step: int) -> bytes:
    return hashlib.sha256(weights + step.to_bytes(8, "big")).digest()


def loss_of(weights: bytes) -> float:
    return int.from_bytes(weights[:6], "big") / 2**48


def body_of(weights: bytes, size: int) -> bytes:
    """Return the content of a checkpoint: ``weights`` and as much padding as requested."""
    return weights + random.Random(weights).randbytes(size)
