"""Send the hyperparameters of a script, once, when training begins.

They are what ``save_hyperparameters`` stored, and what the functions that called the training hold
in their variables: what argparse has parsed, and dataclasses that are configurations by their name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ltui.training.rank.channel import Channel

MAX_HYPERPARAMETERS = 100
MAX_VALUE = 200
"""Characters of one value."""
MAX_BYTES = 8000
"""Bytes of all values together: a record must be small compared with the ring."""
MAX_FRAMES = 200
"""Maximum number of calling functions whose variables are read."""
_PRIVATE_PREFIX = "_"
"""Prefix of LightningCLI's own entries."""
_SECRET = re.compile(r"(^|[._-])(password|passwd|secret|token|key|credentials?)$", re.IGNORECASE)
"""Names of values that are never stored, because they may let a reader in somewhere."""
_CONFIGURATION = re.compile(r"config|cfg|conf$|arg|opt|param|setting|flag", re.IGNORECASE)
"""Names of variables and classes of dataclasses that hold settings and not data."""
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<frozen")
"""Files of functions whose variables are not the user's."""


def send_hyperparameters(channel: Channel, *owners: Any) -> None:
    """Send the settings of the calling functions, and what ``save_hyperparameters`` stored.

    ``owners`` are the data module and the module of a Trainer; a later one counts.
    """
    values = settings_of_callers()
    for owner in owners:
        for name, value in dict(getattr(owner, "hparams", None) or {}).items():
            if not str(name).startswith(_PRIVATE_PREFIX):
                values |= dict(_flat(str(name), value))
    sent: dict[str, Any] = {}
    size = 0
    for name, value in list(values.items())[:MAX_HYPERPARAMETERS]:
        size += len(json.dumps({name: value}))
        if size > MAX_BYTES:
            break
        sent[name] = value
    if sent:
        channel.event("hyperparameters", "", values=sent)


def settings_of_callers() -> dict[str, Any]:
    """Return what argparse has parsed, and the fields of configurations, in calling functions.

    The value of the outermost function counts.
    """
    values: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        ours = str(frame.f_globals.get("__name__")).startswith("ltui.")
        if not ours and not _LIBRARY.search(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                if isinstance(value, argparse.Namespace):
                    for key, option in vars(value).items():
                        values |= dict(_flat(key, option))
                elif _is_configuration(name, value):
                    values |= dict(_flat(name, value))
        frame = frame.f_back
    return values


def _is_configuration(name: str, value: Any) -> bool:
    kind = type(value)
    return (
        dataclasses.is_dataclass(kind)
        and not name.startswith(_PRIVATE_PREFIX)
        and bool(_CONFIGURATION.search(name) or _CONFIGURATION.search(kind.__name__))
        # A library's arguments are hundreds, and nearly all of them are its defaults.
        and not _LIBRARY.search(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values. The fields of a dataclass or Namespace get its name before."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _flat(f"{name}.{field.name}", getattr(value, field.name, None))
    elif isinstance(value, argparse.Namespace):
        for key, inner in vars(value).items():
            yield from _flat(f"{name}.{key}", inner)
    elif not _SECRET.search(name):
        yield name[:MAX_VALUE], _plain_value(value)


def _plain_value(value: Any) -> Any:
    """Return a number, a boolean, None or a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike, list, tuple, dict)):
        return str(value)[:MAX_VALUE]
    return type(value).__name__
