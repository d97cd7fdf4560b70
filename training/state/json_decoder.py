"""Decoder of plain JSON values into frozen dataclasses: the inverse of ``run_snapshot.to_json``.

Unknown keys are ignored and missing ones take the field's default, so that documents of other
versions can be read as far as they go. Pure.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

MOST_LEVELS = 100
"""Maximum nesting of a document that is read; deeper ones would end in a ``RecursionError``."""
MOST_DIGITS = 24
"""Maximum length of a whole number. One of 400 digits does not fit into any arithmetic."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Texts in place of numbers that JSON cannot hold."""
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
Decoder = Callable[[Any], Any]


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

    A text, number or flag of the wrong type is refused. With ``tolerant``, null is accepted where
    the type does not allow it: a field takes its default, and a number that was not finite (which
    JSON cannot hold) becomes NaN in a field without a default and is left out of a sequence. The
    texts of ``run_snapshot.json_number`` are numbers.
    """
    try:
        return typing.cast("T", _decode_dataclass(cls, document, tolerant))
    except WRONG_CONTENT as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


def _decode_dataclass(cls: Any, document: Any, tolerant: bool) -> Any:
    if not isinstance(document, Mapping):
        raise TypeError(f"{type(document).__name__} instead of a mapping")
    values = {}
    for name, plain, decoder, null in _field_decoders(cls, tolerant):
        if name not in document:
            continue
        value = document[name]
        if type(value) in plain:
            values[name] = value
        elif value is None and null is not None:
            if null is not MISSING:
                values[name] = null
        else:
            values[name] = decoder(value)
    return cls(**values)


@lru_cache(maxsize=128)
def _field_decoders(
    cls: type, tolerant: bool
) -> tuple[tuple[str, frozenset[type], Decoder, Any], ...]:
    """Return the name, the types of values that are used unchanged, the decoder of all others, and
    the replacement for null of each field.

    The replacement is None if null is decoded like other values, and ``MISSING`` if null means
    the field's default.
    """
    hints = typing.get_type_hints(cls)
    table = []
    for field in fields(cls):
        if not field.init:
            continue
        kind = hints[field.name]
        plain, null = _plain_types(kind), None
        if not tolerant and plain:
            plain |= {type(None)}
        elif tolerant and not _is_optional(kind):
            with_default = field.default is not MISSING or field.default_factory is not MISSING
            null = MISSING if with_default else math.nan if kind is float else None
        table.append((field.name, plain, _decoder(kind, tolerant), null))
    return tuple(table)


_PLAIN = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
}
"""Types of JSON values for each type of a field whose values are used unchanged."""


def _plain_types(kind: Any) -> frozenset[type]:
    """Return the types of the values of a field that are used unchanged."""
    if _is_optional(kind):
        (inner,) = (p for p in typing.get_args(kind) if p is not type(None))
        return _plain_types(inner) | {type(None)}
    return _PLAIN.get(kind, frozenset())


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_optional(kind: Any) -> bool:
    """Return True for a type that may also be None."""
    return _is_union(kind) and len(set(typing.get_args(kind)) - {type(None)}) == 1


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@lru_cache(maxsize=256)
def _decoder(kind: Any, tolerant: bool) -> Decoder:
    """Return the function that decodes values of this type."""
    if _is_dataclass(kind):
        return lambda value: _decode_dataclass(kind, value, tolerant)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind in _PLAIN:
        return lambda value: _plain_value(kind, value)
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(kind) and not _is_optional(kind):
        return _unchanged
    if _is_optional(kind):
        (inner,) = (p for p in parameters if p is not type(None))
        decode_inner = _decoder(inner, tolerant)
        return lambda value: None if value is None else decode_inner(value)
    if origin is tuple:
        return _tuple_decoder(parameters, tolerant)
    if origin in (dict, Mapping):
        key, inner = parameters
        decode_value = _decoder(inner, tolerant)
        return lambda value: {key(k): decode_value(v) for k, v in value.items()}
    return _unchanged


def _tuple_decoder(parameters: tuple[Any, ...], tolerant: bool) -> Decoder:
    if len(parameters) == 2 and parameters[1] is Ellipsis:
        plain, decode_item = _plain_types(parameters[0]), _decoder(parameters[0], tolerant)

        def decode(value: Any) -> tuple[Any, ...]:
            items = _list(value)
            if plain.issuperset(map(type, items)):
                return tuple(items)
            if tolerant and parameters[0] is float:
                items = [item for item in items if item is not None]
            return tuple(map(decode_item, items))

        return decode
    decoders = [_decoder(p, tolerant) for p in parameters]
    return lambda value: tuple(
        decode(item) for decode, item in zip(decoders, _list(value), strict=True)
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return list(value)


def _plain_value(kind: type, value: Any) -> Any:
    if type(value) in _PLAIN[kind]:
        return value
    if kind is int and type(value) is float:
        return int(value)
    if kind is float and value in NOT_FINITE:
        return float(value)
    raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")


def _unchanged(value: Any) -> Any:
    return value
