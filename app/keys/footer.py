"""The keys that work on a screen: all of them for the help and the palette, some in the footer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import format_key
from textual.screen import Screen
from textual.widget import Widget

GROUPS = {
    "chart": "Charts",
    "log": "Log",
    "machines": "Ranks",
    "runs": "Runs",
}
"""Headings of the help for bindings of widgets, by the first part of their ids."""
SCREEN = "Screen"
"""The heading of all other bindings; it comes last."""
MOTION = frozenset(
    "up down left right shift+left shift+right home end pageup pagedown tab shift+tab".split()  # noqa: SIM905
)
"""Keys that move a cursor or the focus. They make no sense as commands of the palette."""
SHARED = frozenset({"escape", "enter"})
"""Keys that do something else depending on the focus. They are listed with both meanings."""
EVERYWHERE = (
    ("tab", "Go to the next panel or field; shift+tab goes back"),
    ("↑ ↓", "Move in a list or a table, or scroll; also PgUp, PgDn, Home, End"),
    ("ctrl+c", "Ask: stop the run, close ltui, or stay; quit where no live run is shown"),
    ("mouse", "Click to select, twice to open; wheel to scroll, or to zoom a chart"),
    ("shift+drag", "Select text to copy it, in most terminals"),
)
"""Keys that Textual binds on every screen."""


class ListedKey(Struct, frozen=True):
    """All bindings with one id: some keys, and what they do."""

    node: DOMNode
    """The node on which the action is run."""
    bindings: tuple[Binding, ...]

    @property
    def binding(self) -> Binding:
        return self.bindings[0]

    @property
    def keys(self) -> str:
        """Return the keys as printed on a keyboard, such as ``+ =``."""
        return " ".join(b.key_display or _key_text(b.key) for b in self.bindings)

    @property
    def title(self) -> str:
        words = self.binding.description
        return words[:1].upper() + words[1:]

    @property
    def about(self) -> str:
        return self.binding.tooltip or self.title

    @property
    def group(self) -> str:
        if self.binding.group is not None:
            return self.binding.group.description
        return GROUPS.get((self.binding.id or "").partition(".")[0], SCREEN)

    @property
    def moves(self) -> bool:
        """Return whether all keys move a cursor or the focus."""
        return all(binding.key in MOTION for binding in self.bindings)


def _key_text(key: str) -> str:
    """Return ``shift+←`` for ``shift+left``."""
    return key if key == "enter" else "+".join(map(format_key, key.split("+")))


def listed_keys(screen: Screen[Any]) -> list[ListedKey]:
    """Return the keys of the screen, of each kind of widget on it, and of the app.

    Textual's own widgets are left out, because their bindings have no ids (see ``EVERYWHERE``).
    Keys of a widget are left out too if the screen binds them wherever the focus is.
    """
    listed: dict[str, ListedKey] = {}
    screen_keys = {binding.key for binding in _bindings_of(screen)}
    for node in (screen, *screen.query(Widget), screen.app):
        for binding in _bindings_of(node):
            widget = node not in (screen, screen.app)
            if widget and (binding.key in screen_keys - SHARED or _is_common_motion(binding)):
                continue
            if (
                node is screen.app
                and screen.is_modal
                and not (binding.priority or binding.action == "help")
            ):
                continue
            earlier = listed.get(binding.id or "")
            if earlier is None:
                listed[binding.id or ""] = ListedKey(node, (binding,))
            elif earlier.node is node:
                listed[binding.id or ""] = ListedKey(node, (*earlier.bindings, binding))
    return list(listed.values())


def _is_common_motion(binding: Binding) -> bool:
    """Return whether ``EVERYWHERE`` lists the binding with the keys of lists and tables."""
    return (binding.id or "").startswith("table.") and binding.key in MOTION


def _bindings_of(node: DOMNode) -> Iterator[Binding]:
    """Yield the bindings of the classes of ``node``, with the keys that the user has chosen."""
    own_keys = getattr(node.app, "own_keys", {})
    replaced: set[str] = set()
    for kind in type(node).__mro__:
        for binding in Binding.make_bindings(kind.__dict__.get("BINDINGS", ())):
            if not binding.id or not binding.description:
                continue
            if binding.id not in own_keys:
                yield binding
            elif binding.id not in replaced:
                replaced.add(binding.id)
                yield from (binding.with_key(key, None) for key in own_keys[binding.id])


def own_key(screen: Screen[Any], action: str) -> str | None:
    """Return the keys that the user has chosen for an action such as ``screen.stop``, as printed
    on a keyboard; None if there are none."""
    app = screen.app
    own_keys = getattr(app, "own_keys", {})
    if not own_keys:
        return None
    target, _, call = action.rpartition(".")
    node = {"app": app, "screen": screen, "focused": screen.focused}.get(target)
    found = [] if node is None else [b for b in _bindings_of(node) if b.action == call]
    chosen = dict.fromkeys(_key_text(b.key) for b in found if b.id in own_keys)
    return " ".join(chosen) or None


def groups_of(keys: list[ListedKey]) -> list[tuple[str, list[ListedKey]]]:
    """Return the keys under their headings, in the order in which they were listed."""
    groups: dict[str, list[ListedKey]] = {}
    for key in keys:
        groups.setdefault(key.group, []).append(key)
    last = groups.pop(SCREEN, [])
    return [*groups.items(), (SCREEN, last)]


def refusal_of(screen: Screen[Any], action: str) -> str | None:
    """Return why ``action`` cannot be done now, if the screen gives a reason."""
    refusal = getattr(screen, "refusal_of", None)
    if refusal is None:
        return None
    reason: str | None = refusal(action.removeprefix("screen."))
    return reason


READONLY_BADGE = " READ-ONLY "
"""Shown on every screen with ``--readonly``."""


class KeyHint(Struct, frozen=True):
    """One key of the footer. A click on it runs ``action``."""

    key: str
    words: str
    action: str
    keep: bool = False
    """Shown however narrow the terminal is."""

    @property
    def width(self) -> int:
        return len(self.key) + 1 + len(self.words)


FIELD_HELP_HINT = KeyHint("f1", "help", "app.help")
"""The help while a text field has the focus, which takes a question mark as input."""


def fitting(hints: Sequence[KeyHint], width: int) -> list[KeyHint]:
    """Return the hints that fit into ``width`` cells, in order. Hints to keep are placed first."""
    free_width = width - 2
    chosen: set[int] = set()
    for must_keep in (True, False):
        for i, hint in enumerate(hints):
            if hint.keep is not must_keep:
                continue
            # Two blanks are between two hints.
            need = hint.width + (2 if chosen else 0)
            if need > free_width:
                break
            chosen.add(i)
            free_width -= need
    return [hints[i] for i in sorted(chosen)]


class KeyFooter(Widget):
    """One line of keys at the bottom of a screen."""

    DEFAULT_CSS = """
    KeyFooter {
        dock: bottom; height: 1; background: $footer-background; color: $footer-foreground;
        link-style: none; link-color: $footer-foreground; link-background: $footer-background;
        link-style-hover: reverse; link-color-hover: $footer-foreground;
        link-background-hover: $footer-background;
    }
    """
    can_focus = False

    def __init__(self, hints: Sequence[KeyHint] = (), *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._hints = tuple(hints)

    def show(self, hints: Sequence[KeyHint]) -> None:
        if tuple(hints) != self._hints:
            self._hints = tuple(hints)
            self.refresh()

    def render(self) -> RenderResult:
        line = Text(" ", no_wrap=True, end="")
        if getattr(self.app, "readonly", False):
            # Reverse video is visible without colours as well.
            line.append(READONLY_BADGE, Style(reverse=True, bold=True))
            line.append("  ")
        screen = self.screen
        usable = [
            replace(hint, key=own_key(screen, hint.action) or hint.key)
            for hint in self._hints
            if refusal_of(screen, hint.action) is None
        ]
        for i, hint in enumerate(fitting(usable, self.size.width - len(line) + 1)):
            line.append("  " if i else "")
            start = len(line)
            line.append(hint.key, Style(bold=True))
            line.append(f" {hint.words}")
            line.apply_meta({"@click": hint.action}, start, len(line))
        return line
