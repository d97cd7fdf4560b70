"""What the driver's XID codes mean, in our own words, and how bad they are. Pure.

Codes and their causes after NVIDIA's "XID Errors" catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    text: str
    from_program: bool = False
    """Usually the fault of the program that ran, not of the GPU."""
    unusable: bool = False
    """Work on the GPU can't go on: it needs a reset, a reboot or a hand."""


MEANINGS = {
    8: Meaning("a kernel ran into the driver's time limit", from_program=True),
    13: Meaning("a kernel did something illegal (graphics engine exception)", from_program=True),
    31: Meaning("a kernel accessed memory that it does not own (page fault)", from_program=True),
    32: Meaning("a command buffer was corrupt (bus or driver)"),
    43: Meaning("the driver ended a channel after a program's fault", from_program=True),
    44: Meaning("the GPU's context switch failed"),
    45: Meaning("the driver cleaned up after a program that ended", from_program=True),
    48: Meaning("an uncorrectable memory error (double bit)", unusable=True),
    56: Meaning("display engine error"),
    61: Meaning("the GPU's microcontroller stopped at a breakpoint", unusable=True),
    62: Meaning("the GPU's microcontroller halted", unusable=True),
    63: Meaning("a faulty memory row was retired; it takes effect at the next reset"),
    64: Meaning("a faulty memory row could not be retired", unusable=True),
    68: Meaning("video processor exception", from_program=True),
    69: Meaning("a kernel did something illegal (graphics class error)", from_program=True),
    74: Meaning("NVLink error: a link to another GPU or the switch failed", unusable=True),
    79: Meaning("the GPU fell off the bus", unusable=True),
    92: Meaning("a high rate of corrected single-bit memory errors"),
    94: Meaning("an uncorrectable memory error, contained: only the affected program must end"),
    95: Meaning("an uncorrectable memory error that could not be contained", unusable=True),
    109: Meaning("a context switch timed out"),
    110: Meaning("security fault", unusable=True),
    119: Meaning("the GPU's system processor (GSP) does not answer", unusable=True),
    120: Meaning("the GPU's system processor (GSP) failed", unusable=True),
    121: Meaning("error on the chip-to-chip link"),
    137: Meaning(
        "NVLink: a program accessed a peer's memory without permission", from_program=True
    ),
    140: Meaning("unrecovered memory error", unusable=True),
    143: Meaning("the GPU could not be initialised", unusable=True),
    144: Meaning("NVLink: an error in a link's hardware"),
    154: Meaning("the driver asks for a recovery action; see its log"),
    156: Meaning("a resource was retired: recorded"),
}


def meaning(code: int) -> Meaning:
    return MEANINGS.get(code, Meaning("not in ltui's table; see NVIDIA's XID catalogue"))


def sentence(code: int) -> str:
    """``XID 79: the GPU fell off the bus``."""
    return f"XID {code}: {meaning(code).text}"
