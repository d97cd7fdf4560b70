"""Integers as users paste them from a screen: ``3157``, ``3 157``, ``3,157``. Pure."""

from __future__ import annotations

import re

_GROUPED = re.compile("\\d{1,3}([ ,_\N{THIN SPACE}\N{NO-BREAK SPACE}]\\d{3})+")


def strip_digit_grouping(text: str) -> str:
    """Return ``text`` without the separators between groups of three digits, if it is a number."""
    text = text.strip()
    return re.sub(r"\D", "", text) if _GROUPED.fullmatch(text) else text
