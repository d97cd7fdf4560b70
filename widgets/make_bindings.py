"""Make key bindings from a table, so that all keys of a screen can be read together.

The footer (``footer.py``), the help and the palette show these bindings.
"""

from __future__ import annotations

from textual.binding import Binding, BindingType


def bindings(scope: str, table: str, *, priority: bool = False) -> list[BindingType]:
    """Return one binding per line ``keys | action | words | description``, with ids
    ``scope.words``; without a scope the ids are the words.

    A line ``[Charts]`` names the help's group for the lines below it.
    """
    result: list[BindingType] = []
    group: Binding.Group | None = None
    for row in table.strip().splitlines():
        if row.strip().startswith("[") and "|" not in row:
            group = Binding.Group(row.strip(" []"))
            continue
        keys, action, words, tooltip = (part.strip() for part in row.split("|"))
        result.append(
            Binding(
                keys,
                action,
                words,
                id=f"{scope}.{words.replace(' ', '_').lower()}".lstrip("."),
                tooltip=tooltip,
                priority=priority,
                group=group,
            )
        )
    return result
