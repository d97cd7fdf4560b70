"""A run's configuration as names and values. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import iterate_values

MAX_SETTINGS = 300
"""Maximum number of settings that are shown."""
MAX_VALUE = 200
"""Maximum number of characters of a value."""

Settings = list[tuple[str, str]]


def settings(spec: RunSpec) -> Settings:
    """Return names and values of the configuration as launched, without settings that have no
    value.

    ``model.init_args.width`` is named ``model.width``, and a class has its own name as its value.
    """
    if spec.config is None:
        return [("command", shlex.join(spec.command))] if spec.command else []
    pairs: Settings = []
    for path, value in iterate_values(spec.config):
        if value is None or (isinstance(value, (Mapping, list)) and value):
            continue
        name = path.replace(".init_args", "")
        if name.endswith(".class_path"):
            name, value = name.removesuffix(".class_path"), str(value).rpartition(".")[2]
        pairs.append((name, value_text(value)))
    return pairs[:MAX_SETTINGS]


def hyperparameters(values: Mapping[str, Any]) -> Settings:
    """Return the module's hyperparameters as rank 0 sent them (``save_hyperparameters``)."""
    return [(str(name), value_text(value)) for name, value in values.items()][:MAX_SETTINGS]


def value_text(value: Any) -> str:
    """Return a value as in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = "''" if value == "" else str(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
