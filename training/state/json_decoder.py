"""Decoder of plain JSON values into frozen dataclasses: the inverse of ``run_snapshot.to_json``.

Unknown keys are ignored and missing ones take the field's default, so that documents of other
versions can be read as far as they go. Pure.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
Decoder = Callable[[Any], Any]


def from_json(cls: type[T], document: Any, *, tolerant: bool = False) -> T:
    """Return ``document`` as a ``cls``. Raise ``ValueError`` if that is not possible.

    With ``tolerant``, null is accepted where the type does not allow it: a container or a nested
    dataclass takes the field's default, and a number that was not finite (which JSON cannot hold)
    becomes NaN in a field without a default and is left out of a sequence. Such a field also takes
    the texts of ``run_snapshot.json_number``.
    """
    try:
        return typing.cast("T", _decode_dataclass(cls, document, tolerant))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


def _decode_dataclass(cls: Any, document: Any, tolerant: bool) -> Any:
    if not isinstance(document, Mapping):
        raise TypeError(f"{type(document).__name__} instead of a mapping")
    values = {}
    for name, decoder, null in _field_decoders(cls, tolerant):
        if name not in document:
            continue
        value = document[name]
        if value is None and null is not None:
            if null is not MISSING:
                values[name] = null
        else:
            values[name] = value if decoder is None else decoder(value)
    return cls(**values)


@lru_cache(maxsize=128)
def _field_decoders(cls: type, tolerant: bool) -> tuple[tuple[str, Decoder | None, Any], ...]:
    """Return the name, decoder and replacement for null of each field.

    The replacement is None if null is decoded like other values, and ``MISSING`` if null means
    the field's default.
    """
    hints = typing.get_type_hints(cls)
    table = []
    for field in fields(cls):
        if not field.init:
            continue
        kind = hints[field.name]
        null: Any = None
        if tolerant and (_is_dataclass(kind) or typing.get_origin(kind) in (tuple, dict, Mapping)):
            null = MISSING
        decoder = _decoder(kind, tolerant)
        if tolerant and kind is float and field.default is MISSING:
            null, decoder = math.nan, float
        table.append((field.name, decoder, null))
    return tuple(table)


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@lru_cache(maxsize=256)
def _decoder(kind: Any, tolerant: bool) -> Decoder | None:
    """Return the function that decodes values of this type; None if values are used unchanged."""
    if _is_dataclass(kind):
        return lambda value: _decode_dataclass(kind, value, tolerant)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (p for p in parameters if p is not type(None))
        decode_inner = _decoder(inner, tolerant)
        if decode_inner is None:
            return None
        return lambda value: None if value is None else decode_inner(value)
    if origin is tuple:
        return _tuple_decoder(parameters, tolerant)
    if origin in (dict, Mapping):
        key, inner = parameters
        decode_value = _decoder(inner, tolerant) or _unchanged
        return lambda value: {key(k): decode_value(v) for k, v in value.items()}
    return None


def _tuple_decoder(parameters: tuple[Any, ...], tolerant: bool) -> Decoder:
    if len(parameters) == 2 and parameters[1] is Ellipsis:
        if tolerant and parameters[0] is float:
            return lambda value: tuple(item for item in value if item is not None)
        decode_item = _decoder(parameters[0], tolerant)
        if decode_item is None:
            return tuple
        return lambda value: tuple(map(decode_item, value))
    decoders = [_decoder(p, tolerant) or _unchanged for p in parameters]
    return lambda value: tuple(decode(item) for decode, item in zip(decoders, value, strict=True))


def _unchanged(value: Any) -> Any:
    return value
