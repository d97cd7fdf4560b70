"""Plain JSON values back into frozen dataclasses: the inverse of ``snapshot.to_json``. Pure.

Unknown keys are ignored and missing ones take the field's default, so that documents of other
versions can be read as far as they go.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


def from_json(cls: type[T], document: Any) -> T:
    """``document`` as a ``cls``. Raises ``ValueError`` where it can't be one."""
    try:
        return typing.cast("T", _decode(cls, document))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _decode(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{k: _decode(h, value[k]) for k, h in _hints(kind).items() if k in value})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (p for p in parameters if p is not type(None))
        return _decode(inner, value)
    if origin is tuple:
        if len(parameters) == 2 and parameters[1] is Ellipsis:
            return tuple(_decode(parameters[0], item) for item in value)
        return tuple(_decode(p, item) for p, item in zip(parameters, value, strict=True))
    if origin in (dict, Mapping):
        key, inner = parameters
        return {key(k): _decode(inner, v) for k, v in value.items()}
    return value
