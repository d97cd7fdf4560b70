"""Meaning and severity of the driver's XID error codes. Pure.

The codes and causes follow NVIDIA's "XID Errors" catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class XidMeaning:
    """Description and severity of one XID code."""

    text: str
    unusable: bool = False
    """True if the GPU can't be used until a reset, a reboot or a repair."""


XID_MEANINGS = {
    8: XidMeaning("a kernel ran into the driver's time limit"),
    13: XidMeaning("a kernel did something illegal (graphics engine exception)"),
    31: XidMeaning("a kernel accessed memory that it does not own (page fault)"),
    32: XidMeaning("a command buffer was corrupt (bus or driver)"),
    43: XidMeaning("the driver ended a channel after a program's fault"),
    44: XidMeaning("the GPU's context switch failed"),
    45: XidMeaning("the driver cleaned up after a program that ended"),
    48: XidMeaning("an uncorrectable memory error (double bit)", unusable=True),
    56: XidMeaning("display engine error"),
    61: XidMeaning("the GPU's microcontroller stopped at a breakpoint", unusable=True),
    62: XidMeaning("the GPU's microcontroller halted", unusable=True),
    63: XidMeaning("a faulty memory row was retired; it takes effect at the next reset"),
    64: XidMeaning("a faulty memory row could not be retired", unusable=True),
    68: XidMeaning("video processor exception"),
    69: XidMeaning("a kernel did something illegal (graphics class error)"),
    74: XidMeaning("NVLink error: a link to another GPU or the switch failed", unusable=True),
    79: XidMeaning("the GPU fell off the bus", unusable=True),
    92: XidMeaning("a high rate of corrected single-bit memory errors"),
    94: XidMeaning("an uncorrectable memory error, contained: only the affected program must end"),
    95: XidMeaning("an uncorrectable memory error that could not be contained", unusable=True),
    109: XidMeaning("a context switch timed out"),
    110: XidMeaning("security fault", unusable=True),
    119: XidMeaning("the GPU's system processor (GSP) does not answer", unusable=True),
    120: XidMeaning("the GPU's system processor (GSP) failed", unusable=True),
    121: XidMeaning("error on the chip-to-chip link"),
    137: XidMeaning("NVLink: a program accessed a peer's memory without permission"),
    140: XidMeaning("unrecovered memory error", unusable=True),
    143: XidMeaning("the GPU could not be initialised", unusable=True),
    144: XidMeaning("NVLink: an error in a link's hardware"),
    154: XidMeaning("the driver asks for a recovery action; see its log"),
    156: XidMeaning("a resource was retired: recorded"),
}


def xid_meaning(code: int) -> XidMeaning:
    """Return the meaning of an XID code, with a generic text for an unknown code."""
    return XID_MEANINGS.get(code, XidMeaning("not in ltui's table; see NVIDIA's XID catalogue"))


def xid_sentence(code: int) -> str:
    """Return a text such as ``XID 79: the GPU fell off the bus``."""
    return f"XID {code}: {xid_meaning(code).text}"
