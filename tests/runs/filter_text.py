"""Print the tree of a filter as a text that is read as the same tree."""

from __future__ import annotations

import json
import re

from ltui.app.runs.filter_syntax import (
    _NAME,
    _VALUE,
    KEYWORDS,
    AllOf,
    AnyOf,
    Compare,
    Filter,
    Has,
    Match,
    Not,
    Word,
)


def filter_text(tree: Filter) -> str:
    """Return a text that ``parse_filter`` reads as this tree."""
    if isinstance(tree, Word):
        return _quoted(tree.text, _NAME, KEYWORDS)
    if isinstance(tree, Has):
        return f"has:{_quoted(tree.field, _NAME)}"
    if isinstance(tree, Match):
        name = _quoted(tree.field, _NAME, frozenset({"has"}))
        if tree.is_regex:
            return f"{name}:/{tree.pattern}/"
        is_plain = not tree.pattern.startswith("/")
        return f"{name}:{_quoted(tree.pattern, _VALUE) if is_plain else json.dumps(tree.pattern)}"
    if isinstance(tree, Compare):
        # `x!=3` would be read as x, not x!, without quotes.
        ends_alike = tree.field.endswith("!")
        name = json.dumps(tree.field) if ends_alike else _quoted(tree.field, _NAME, KEYWORDS)
        return f"{name}{tree.operator}{_value_text(tree.value)}"
    if isinstance(tree, Not):
        return f"not {_bracketed(tree.part, (AllOf, AnyOf))}"
    if isinstance(tree, AllOf):
        return " ".join(_bracketed(part, (AllOf, AnyOf)) for part in tree.parts)
    return " or ".join(_bracketed(part, (AnyOf,)) for part in tree.parts)


def _bracketed(tree: Filter, kinds: tuple[type, ...]) -> str:
    return f"({filter_text(tree)})" if isinstance(tree, kinds) else filter_text(tree)


def _quoted(text: str, plain: re.Pattern[str], reserved: frozenset[str] = frozenset()) -> str:
    """Return the text in quotes if it could be read as something else without them."""
    is_plain = plain.fullmatch(text) and text.lower() not in reserved
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _value_text(value: str) -> str:
    amount, blank, word = value.rpartition(" ")
    if blank and word == "ago" and _VALUE.fullmatch(amount) and amount[0] not in "=":
        return value
    # `x<"=3"` would be read as `x<=3` without quotes.
    return json.dumps(value) if value[:1] == "=" else _quoted(value, _VALUE)
