"""Keys of the user's own: their names as Textual spells them, and what is wrong with a choice.

The names of keys are checked when the dashboard starts, because an action without a valid key could
not be reached. Actions and conflicts are checked later: that needs the bindings of every screen.
"""

from __future__ import annotations

import importlib
import pkgutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.dom import DOMNode
from textual.keys import KEY_NAME_REPLACEMENTS, KEY_TO_UNICODE_NAME, REPLACED_KEYS, Keys

from ltui.training.config.structure_check import closest_match
from ltui.training.config.yaml_document import Fault

MODIFIERS = ("ctrl", "shift", "alt", "super", "hyper", "meta")
INTERRUPT = "ctrl+c"
"""The key that the user can't give to another action."""
NAMED_KEYS = frozenset(key.value for key in Keys if "+" not in key.value and "<" not in key.value)
PACKAGES = ("ltui.app.screens", "ltui.app.panels", "ltui.widgets", "ltui.widgets.charts")
"""Packages whose classes have bindings, besides the app."""
BESIDE = {
    "chart": ("run", "all_metrics", "compare", "gpu"),
    "log": ("run",),
    "machines": ("table", "run"),
    "runs": ("table", "home"),
    "interrupt_question": ("confirm",),
    "table": ("run", "home", "diagnose", "compare"),
}
"""The bindings that work at the same time as those of a widget, by the first parts of their ids."""

OwnKeys = Mapping[str, tuple[str, ...]]


def textual_key(key: str) -> str | None:
    """Return Textual's name of a key such as ``?``, ``ctrl+s`` or ``shift+a``; None if there is
    none."""
    if len(key) == 1:
        return _character_key(key)
    *modifiers, name = key.lower().split("+")
    if len(set(modifiers)) < len(modifiers) or not set(modifiers) <= set(MODIFIERS):
        return None
    if len(name) == 1:
        base = _character_key(name)
        if modifiers == ["shift"] and name.isalpha():
            return name.upper()
    else:
        base = name if name in NAMED_KEYS or _is_character_name(name) else None
    return None if base is None else "+".join([*modifiers, base])


def _character_key(character: str) -> str | None:
    if character.isalnum():
        return character
    name = unicodedata.name(character, "").lower().replace("-", "_").replace(" ", "_")
    return KEY_NAME_REPLACEMENTS.get(name, name) or None


def _is_character_name(name: str) -> bool:
    if name in KEY_TO_UNICODE_NAME or name in REPLACED_KEYS:
        return True
    try:
        return bool(unicodedata.lookup(name.replace("_", " ").upper()))
    except KeyError:
        return False


def usable_keys(keys: OwnKeys) -> tuple[dict[str, tuple[str, ...]], list[Fault]]:
    """Return the keys with Textual's names, and the errors in the names of the others."""
    usable: dict[str, tuple[str, ...]] = {}
    faults = []
    for name, written in keys.items():
        named = {key: textual_key(key) for key in written}
        wrong = [key for key, known in named.items() if known is None]
        if INTERRUPT in named.values():
            text = f"`{INTERRUPT}` can't be used: it asks whether to stop the run or to quit."
            faults.append(Fault(path=f"keys.{name}", what=text, remedy="Choose another key."))
        if wrong:
            text = f"`{wrong[0]}` is not a key."
            remedy = "Keys are written as s, S, f5, ctrl+s, shift+left, space or '?'."
            faults.append(Fault(path=f"keys.{name}", what=text, remedy=remedy))
        if valid := tuple(known for known in named.values() if known not in (None, INTERRUPT)):
            usable[name] = valid
    return usable, faults


def default_keys(app: type[App[Any]]) -> dict[str, tuple[str, ...]]:
    """Return the keys of every binding of the app that has an id. Imports every screen and
    widget."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    keys: dict[str, tuple[str, ...]] = {}
    for kind in dict.fromkeys((app, *_subclasses(DOMNode))):
        if kind is app or kind.__module__.startswith(PACKAGES):
            for binding in Binding.make_bindings(kind.__dict__.get("BINDINGS", ())):
                if binding.id:
                    keys[binding.id] = (*keys.get(binding.id, ()), binding.key)
    return keys


def _subclasses(kind: type[DOMNode]) -> Iterator[type[DOMNode]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def action_faults(names: Iterable[str], usable: OwnKeys, defaults: OwnKeys) -> list[Fault]:
    """Return the unknown actions among ``names``, and the usable keys that two actions would
    share."""
    faults = []
    for name in names:
        if name not in defaults:
            near = closest_match(name, defaults)
            remedy = f"Did you mean `{near}`?" if near else "`ltui config` lists all actions."
            text = f"unknown action `{name}`."
            faults.append(Fault(path=f"keys.{name}", what=text, remedy=remedy))
    effective = {name: usable.get(name, known) for name, known in defaults.items()}
    reported: set[frozenset[str]] = set()
    for name in usable.keys() & defaults.keys():
        for other, theirs in effective.items():
            shared = (set(usable[name]) - set(defaults[name])) & set(theirs)
            pair = frozenset({name, other})
            alike = set(defaults[name]) & set(defaults[other])
            if shared and not alike and pair not in reported and _work_together(name, other):
                reported.add(pair)
                text = f"`{min(shared)}` is the key of `{other}` too."
                remedy = f"Choose another key, or give `{other}` another one as well."
                faults.append(Fault(path=f"keys.{name}", what=text, remedy=remedy))
    return faults


def _work_together(one: str, other: str) -> bool:
    """Return whether the keys of two bindings can work at the same time."""
    if one == other:
        return False
    scopes = [name.partition(".")[0] if "." in name else "" for name in (one, other)]
    if "" in scopes or scopes[0] == scopes[1]:
        return True
    return scopes[1] in BESIDE.get(scopes[0], ()) or scopes[0] in BESIDE.get(scopes[1], ())
