"""Which panels of a run screen are seen, for a terminal's size and what was chosen. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

PANELS = ("loss", "throughput", "gpus", "ranks", "log")
UPPER = frozenset({"loss", "throughput"})
DETAILS = "details"


class Room(str, Enum):
    """How much room a terminal has."""

    TINY = "tiny"
    """A sentence that asks for more."""
    TABS = "tabs"
    """One panel at a time."""
    HALF = "half"
    """Both charts, and one panel below them."""
    FULL = "full"
    """Every panel."""
    VAST = "vast"
    """Every panel, and details beside them."""


def room_of(width: int, height: int) -> Room:
    if width < 60 or height < 12:
        return Room.TINY
    if width < 96 or height < 26:
        return Room.TABS
    if width < 130 or height < 40:
        return Room.HALF
    return Room.VAST if width >= 190 and height >= 40 else Room.FULL


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """What a person chose; ``0`` goes back to the defaults."""

    room: Room = Room.FULL
    chosen: str = "loss"
    lower: str = "ranks"
    """The last panel chosen below the charts."""
    zoomed: bool = False
    details: bool | None = None
    """None: as the room allows."""

    def choose(self, panel: str) -> Arrangement:
        lower = self.lower if panel in UPPER else panel
        return replace(self, chosen=panel, lower=lower)

    def visible(self) -> frozenset[str]:
        """Names of the panels to show."""
        if self.room is Room.TINY:
            return frozenset()
        if self.zoomed or self.room is Room.TABS:
            return frozenset({self.chosen})
        beside = {DETAILS} if self._details_shown() else set()
        if self.room is Room.HALF:
            return UPPER | {self.lower} | beside
        return frozenset(PANELS) | beside

    def tabs(self) -> tuple[str, ...]:
        """The panels that can be switched to, where not all are seen."""
        if self.room is Room.TINY:
            return ()
        if self.room is Room.TABS or self.zoomed:
            return PANELS
        return tuple(p for p in PANELS if p not in UPPER) if self.room is Room.HALF else ()

    def _details_shown(self) -> bool:
        if self.details is None:
            return self.room is Room.VAST
        return self.details and self.room in (Room.FULL, Room.VAST)
