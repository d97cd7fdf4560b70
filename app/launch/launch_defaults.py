"""Defaults of the configuration file for new runs: stalls, checkpoints, restarts, a mirror.

The ``ltui:`` section of a preset wins over them, and the options of the command line over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ltui.app.config_file import LAUNCH_KEYS
from ltui.app.settings import read_user_config
from ltui.training.config.ltui_section import LtuiSection, read_section
from ltui.training.config.presets import Preset
from ltui.training.problem import ProblemError


def launch_defaults() -> LtuiSection:
    """Return the defaults for a run without a preset.

    Raises ``ProblemError`` if they cannot be read: a run must not start without a stall policy that
    the user has written.
    """
    return read_section(_read_defaults())[0]


def with_launch_defaults(preset: Preset) -> Preset:
    """Return ``preset`` with the defaults for what it does not set. Raises ``ProblemError``."""
    own = preset.section
    merged: dict[str, Any] = dict(own)
    for key, default in _read_defaults().items():
        if isinstance(default, Mapping):
            merged[key] = {**default, **(own.get(key) or {})}
        else:
            merged.setdefault(key, default)
    section = read_section(merged)[0]
    return replace(preset, **{key: getattr(section, key) for key in LAUNCH_KEYS})


def _read_defaults() -> Mapping[str, Any]:
    config = read_user_config()
    if config.launch_problems:
        raise ProblemError(*config.launch_problems)
    return config.launch
