"""Random numbers that depend only on a key and the number of a sample (SplitMix64).

The augmentation of a sample is therefore equal on every rank, thread and process that decodes it,
and after a resume. This module is plain Python; ``pipeline_operations.py`` compiles the same
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

CROP_SALT, AUGMENT_SALT = 1, 2
"""Salts of the random crop and of the other augmentation."""
_MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int) -> int:
    """Mix the 64 bits of ``state`` pseudo-randomly."""
    state = ((state ^ (state >> 30)) * FIRST_FACTOR) & _MASK
    state = ((state ^ (state >> 27)) * SECOND_FACTOR) & _MASK
    return state ^ (state >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of all samples of an epoch."""
    return mix((mix(seed & _MASK) + STEP * (epoch + 1)) & _MASK)


@dataclass
class KeyedRandom:
    """Generator of the random numbers of one sample, in the interval [0, 1)."""

    state: int

    @classmethod
    def for_sample(cls, key: int, sample: int, salt: int) -> KeyedRandom:
        """Return the generator of a sample. ``salt`` differs between operations."""
        return cls(mix((key + STEP * (sample + 1)) & _MASK) ^ salt)

    def next(self) -> float:
        """Return the next number."""
        self.state = (self.state + STEP) & _MASK
        return (mix(self.state) >> 11) / (1 << 53)
