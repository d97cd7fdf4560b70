"""Compare a JSON document with what ``ltui schema`` printed."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def mistakes(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """Return where a value does not have the schema. A key that is not described is a mistake."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return min((mistakes(value, one, root, at) for one in schema["anyOf"]), key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: {value!r}"]
    names = schema.get("type", [])
    names = names if isinstance(names, list) else [names]
    if names and not any(isinstance(value, TYPES[name]) for name in names):
        return [f"{at}: {value!r} is not {names}"]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{at}: {value!r}"]
    found: list[str] = []
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if not isinstance(items[0] if items else {}, dict):
            items = [{}] * len(value)
        for number, (item, one) in enumerate(zip(value, items, strict=False)):
            found += mistakes(item, one, root, f"{at}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        found += [
            f"{at}: {key} is missing" for key in schema.get("required", ()) if key not in value
        ]
        found += [f"{at}: {key} is not described" for key in value if key not in known]
        for key in value.keys() & known.keys():
            found += mistakes(value[key], known[key], root, f"{at}.{key}")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for key, item in value.items():
            found += mistakes(item, schema["additionalProperties"], root, f"{at}.{key}")
    return found
