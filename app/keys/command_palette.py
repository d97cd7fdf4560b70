"""The commands of the palette: the actions of a screen's keys, and the places to jump to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from textual.app import SystemCommand
from textual.screen import Screen

from ltui.app.keys.listed_keys import ListedKey, listed_keys, refusal_of


def commands(screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Yield one command for each action that is possible now, each with its own title."""
    titles: set[str] = set()
    actions: set[str] = set()
    chain = {screen, screen.app, *(screen.focused.ancestors_with_self if screen.focused else ())}
    for key in listed_keys(screen):
        action = key.binding.action
        # An action of a widget needs the focus on it, unless the screen carries it out.
        reachable = key.node in chain or action.startswith("screen.")
        name = action.removeprefix("screen.")
        listed = key.title.lower() in titles or name in actions
        if not reachable or key.moves or listed or refusal_of(screen, action) is not None:
            continue
        titles.add(key.title.lower())
        actions.add(name)
        yield SystemCommand(key.title, key.about, _command_action(screen, key))
    palette_entries = getattr(screen, "palette_entries", None)
    if palette_entries is not None:
        for title, about, jump in palette_entries():
            yield SystemCommand(title, about, jump)


def _command_action(screen: Screen[Any], key: ListedKey) -> Callable[[], object]:
    app = screen.app
    return lambda: app.call_later(app.run_action, key.binding.action, default_namespace=key.node)
