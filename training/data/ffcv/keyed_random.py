"""Random numbers that depend on a key and a sample's number alone (SplitMix64).

Augmentation drawn from them is the same on whichever rank, thread or process a sample is decoded,
and after a resume. Here in plain Python; ``ffcv_operations.py`` compiles the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

CROP_SALT, AUGMENT_SALT = 1, 2
"""What tells apart the draws of the random part and those of the other augmentation."""
_MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(state: int) -> int:
    """64 bits that look random."""
    state = ((state ^ (state >> 30)) * FIRST_FACTOR) & _MASK
    state = ((state ^ (state >> 27)) * SECOND_FACTOR) & _MASK
    return state ^ (state >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """The key of all samples of an epoch."""
    return mix((mix(seed & _MASK) + STEP * (epoch + 1)) & _MASK)


@dataclass
class KeyedRandom:
    """Numbers from 0 (included) to 1, one after the other, of one sample."""

    state: int

    @classmethod
    def for_sample(cls, key: int, sample: int, salt: int) -> KeyedRandom:
        """``salt`` tells apart what different operations draw."""
        return cls(mix((key + STEP * (sample + 1)) & _MASK) ^ salt)

    def next(self) -> float:
        self.state = (self.state + STEP) & _MASK
        return (mix(self.state) >> 11) / (1 << 53)
