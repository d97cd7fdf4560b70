"""JSON of the records that are stored or sent: ``to_json`` and its inverse ``from_json``.

Unknown keys are ignored and missing ones take the field's default, so that documents of other
versions can be read as far as they go. Pure.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

MOST_LEVELS = 100
"""Maximum nesting of a document that is read; deeper ones would end in a ``RecursionError``."""
MOST_DIGITS = 24
"""Maximum length of a whole number. One of 400 digits does not fit into any arithmetic."""
_LONG_NUMBER = re.compile(rf"\d{{{MOST_DIGITS}}}")
WRONG_CONTENT = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of code that reads values of another type or size than it expects."""

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text that anybody may have written. Raise ``ValueError``."""
    if isinstance(text, bytes):
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError("it is no text")
    try:
        document = json.loads(text, parse_int=_whole if _LONG_NUMBER.search(text) else None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [document]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return document
    raise ValueError("it is nested too deeply")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _containers(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]


def from_json(cls: type[T], document: Any, *, tolerant: bool = False) -> T:
    """Return ``document`` as a ``cls``. Raise ``ValueError`` if that is not possible.

    A text, number or flag of the wrong type is refused. With ``tolerant``, a document that does not
    fit is read again: with the texts of ``json_number`` in fields of numbers, and then also without
    its nulls, so that a field takes its default.
    """
    try:
        try:
            return msgspec.convert(document, cls, str_keys=True)
        except msgspec.ValidationError:
            if not tolerant:
                raise
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(document, cls, str_keys=True, strict=False)
        return msgspec.convert(_without_nulls(document), cls, str_keys=True, strict=False)
    except WRONG_CONTENT as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value if v is not None] if isinstance(value, list) else value


_PLAIN_TYPES = frozenset({str, int, bool, type(None)})
"""Types whose values are JSON values already."""


def to_json(value: Any) -> Any:
    """Return a snapshot, or any value in one, as plain JSON values.

    NaN and infinities become texts (``json_number``).
    """
    kind: Any = type(value)
    # The plain values come first: a snapshot of 1,024 ranks has 60,000 of them.
    if kind in _PLAIN_TYPES:
        return value
    if kind is float:
        return json_number(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {stored: to_json(getattr(value, name)) for stored, name in names}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(v) for v in value]
    return value


def json_number(value: float | None) -> float | str | None:
    """Return a number for JSON: the text ``NaN``, ``Infinity`` or ``-Infinity`` for those."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
