"""Checks of what a program passes to ``ltui.api``, whose types nothing else has checked."""

from __future__ import annotations

from collections.abc import Iterable

from ltui.training.problem import ProblemError


def check(where: str, value: object, *kinds: type) -> None:
    """Raise ``ProblemError`` unless ``value`` is of one of the types, of which the first counts in
    the sentence."""
    if not isinstance(value, kinds):
        words = {str: "a text", int: "a whole number", float: "a number"}[kinds[0]]
        raise ProblemError.of(where=f"{where}={value!r}", what=f"this is not {words}.")


def texts(where: str, value: object, *, may_be_empty: bool = False) -> list[str]:
    """Return one text, or several, as a list. Raise ``ProblemError`` if it is neither, or empty."""
    values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else [*value]
    for one in values:
        check(where, one, str)
    if not values and not may_be_empty:
        raise ProblemError.of(where=where, what="nothing is given.")
    return [str(one) for one in values]
