"""Names of the reasons for which a GPU's clocks are reduced, from NVML's bit mask.

The bits are those of NVML's ``nvmlClocksEventReasons``. The bit of an idle GPU has no name here,
because idleness does not slow a run down.
"""

from __future__ import annotations

POWER_CAP = "power cap"
THERMAL = "thermal slowdown"
HARDWARE_THERMAL = "hardware thermal slowdown"
POWER_BRAKE = "power brake"
HARDWARE = "hardware slowdown"

THERMAL_REASONS = frozenset({THERMAL, HARDWARE_THERMAL})

_NAMES = (
    (0x002, "clocks set by a user"),
    (0x004, POWER_CAP),
    (0x008, HARDWARE),
    (0x010, "synchronised with slower GPUs"),
    (0x020, THERMAL),
    (0x040, HARDWARE_THERMAL),
    (0x080, POWER_BRAKE),
    (0x100, "display clock setting"),
)
_CAUSES_OF_HARDWARE = 0x040 | 0x080
"""Bits of specific hardware slowdowns. If one is set, the general bit is ignored."""


def reason_names(mask: int) -> tuple[str, ...]:
    """Return the names of a mask's bits in NVML's order; unknown bits are given as a number."""
    if mask & _CAUSES_OF_HARDWARE:
        mask &= ~0x008
    names = tuple(name for bit, name in _NAMES if mask & bit)
    unknown = mask & ~sum(bit for bit, _ in _NAMES) & ~0x001
    return (*names, f"reason 0x{unknown:x}") if unknown else names
