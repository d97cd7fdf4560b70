"""Why a GPU's clocks are held down: NVML's mask in words.

Bits as in NVML's ``nvmlClocksEventReasons``. That a GPU is idle is no hindrance and gives no word.
"""

from __future__ import annotations

POWER_CAP = "power cap"
THERMAL = "thermal slowdown"
HARDWARE_THERMAL = "hardware thermal slowdown"
POWER_BRAKE = "power brake"
HARDWARE = "hardware slowdown"

THERMAL_REASONS = frozenset({THERMAL, HARDWARE_THERMAL})

_WORDS = (
    (0x002, "clocks set by a user"),
    (0x004, POWER_CAP),
    (0x008, HARDWARE),
    (0x010, "in step with slower GPUs"),
    (0x020, THERMAL),
    (0x040, HARDWARE_THERMAL),
    (0x080, POWER_BRAKE),
    (0x100, "display clock setting"),
)
_CAUSES_OF_HARDWARE = 0x040 | 0x080
"""Bits that say which kind of hardware slowdown it is; the general one is then left out."""


def reasons(mask: int) -> tuple[str, ...]:
    """The words of a mask, in NVML's order; unknown bits are named by their number."""
    if mask & _CAUSES_OF_HARDWARE:
        mask &= ~0x008
    known = tuple(word for bit, word in _WORDS if mask & bit)
    rest = mask & ~sum(bit for bit, _ in _WORDS) & ~0x001
    return (*known, f"reason 0x{rest:x}") if rest else known
