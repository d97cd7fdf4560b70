"""What the colour of a text means. Command lines need it, too, and nothing else of a widget."""

from __future__ import annotations

from enum import Enum


class Tone(str, Enum):
    """Meaning of a text's colour. A word or a sign always says the same without colour."""

    PLAIN = "plain"
    DIM = "dim"
    FAINT = "faint"
    """Decoration, such as the empty part of a bar or a separator."""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    ACCENT = "accent"
