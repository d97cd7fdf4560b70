"""Bindings from a table, so that a screen's keys can be read at one glance.

The footer (``keyline.py``), the help and the palette all show these.
"""

from __future__ import annotations

from textual.binding import Binding, BindingType


def bindings(scope: str, table: str, *, priority: bool = False) -> list[BindingType]:
    """One binding a line: ``keys | action | words | what it does``. Ids are ``scope.words``.

    A line ``[Charts]`` names the group of the lines below it, for the help.
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
                id=f"{scope}.{words.replace(' ', '_')}",
                tooltip=tooltip,
                priority=priority,
                group=group,
            )
        )
    return result
