"""The result of sampling the stacks of a slow and a normal rank. Pure."""

from __future__ import annotations

from msgspec import Struct


class SampleRow(Struct, frozen=True, kw_only=True):
    """Seconds that two ranks spent at one place. Of workers it is the mean of all of them."""

    where: str
    slow_s: float
    normal_s: float | None = None
    """None if no other rank was sampled."""


class SampleReport(Struct, frozen=True, kw_only=True):
    """How the time of a slow rank differs from that of a normal one."""

    taken_at: float
    """Unix time in seconds of the end of the samples."""
    seconds: float
    """Seconds for which the ranks were sampled. All other seconds are parts of these."""
    slow: int
    normal: int | None = None
    """None if there is no other rank to compare with."""
    differs: bool = False
    """True if a place was found where the slow rank spends clearly more time."""
    sentence: str
    rows: tuple[SampleRow, ...] = ()
    """The most different places of the main threads, those of the slow rank first."""
    workers: tuple[SampleRow, ...] = ()
    """Places of the DataLoader workers, without the time in which they wait for work."""
    missing: tuple[str, ...] = ()
    """Sentences that say what could not be sampled, and why."""
