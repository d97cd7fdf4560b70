"""An event of a run, as it is written to the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Event(Struct, frozen=True):
    """Something that happened in a run, for example a verdict or a saved checkpoint."""

    t: float
    """Unix time."""
    kind: str
    text: str
    """A sentence for people."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further fields, which must be serialisable as JSON."""
    rank: int | None = None
    """The rank that reported the event. None for an event of the supervisor."""
    seq: int | None = None
    """Sequence number of the record in the queue of that rank."""
