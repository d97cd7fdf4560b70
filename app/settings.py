"""The settings of the dashboard: of the user's configuration file, remembered, or default.

A value in the file wins over one that the dashboard has remembered: ``preferences.json`` in ltui's
home holds what was chosen on the screens, also for each preset or script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from ltui.app.user_config import FILE_NAME, SETTINGS, TYPES, UserConfig
from ltui.training.store.run_directory import read_json, write_atomically


def read_preferences(home: Path) -> dict[str, Any]:
    """Return the remembered settings; empty if the file is missing or damaged."""
    return read_json(home / "preferences.json") or {}


def write_preference(home: Path, key: str, value: Any) -> None:
    """Store one setting and keep the others. None is not stored: the setting is forgotten.

    Raises ``OSError`` if the home directory is missing or not writable.
    """
    _write(home, {**read_preferences(home), key: value})


def read_script_preferences(home: Path, script: str) -> dict[str, Any]:
    """Return what is remembered for a preset or script, by key."""
    return {
        key: choices[script]
        for key, choices in read_preferences(home).items()
        if isinstance(choices, dict) and script in choices
    }


def write_script_preferences(home: Path, script: str, values: Mapping[str, Any]) -> None:
    """Store settings for a preset or script, by key; an empty one is forgotten.

    Raises ``OSError`` as ``write_preference``.
    """
    before = read_preferences(home)
    document = dict(before)
    for key, value in values.items():
        stored = before.get(key)
        choices = {**(stored if isinstance(stored, dict) else {}), script: value}
        document[key] = {name: one for name, one in choices.items() if one}
    if document != before:
        _write(home, document)


def _write(home: Path, document: Mapping[str, Any]) -> None:
    kept = {name: one for name, one in document.items() if one is not None}
    text = json.dumps(kept, indent=2, sort_keys=True)
    write_atomically(home / "preferences.json", f"{text}\n".encode())


def config_path() -> Path:
    """Return the path of the configuration file, which may not exist."""
    # Imported here, as in ``ltui_home``.
    import platformdirs

    return Path(platformdirs.user_config_dir("ltui", appauthor=False)) / FILE_NAME


def read_user_config(path: Path | None = None) -> UserConfig:
    """Return what the file at ``path`` (by default the user's) says. Never raises."""
    path = path or config_path()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return UserConfig(path=path)
    except OSError:
        pass  # The reader says why.
    # Imported here: most users have no file, and reading YAML costs a part of the start.
    from ltui.app.config_file import read_config_file

    return read_config_file(path)


class HasSettings(Protocol):
    """What screens and panels need of their app."""

    settings: Settings


def settings_of(app: object) -> Settings:
    """Return the settings of the dashboard."""
    return cast(HasSettings, app).settings


class Settings:
    """The settings of a dashboard: of the file, else remembered, else the defaults."""

    def __init__(self, home: Path, config: UserConfig) -> None:
        self.home, self.config = home, config
        self._remembered = read_preferences(home)

    def value(self, path: str) -> Any:
        """Return the value that counts."""
        return self._resolve(path)[0]

    def origin(self, path: str) -> str:
        """Return where that value is from: ``config.yaml:3``, ``remembered`` or ``default``."""
        return self._resolve(path)[1]

    def _resolve(self, path: str) -> tuple[Any, str]:
        setting = SETTINGS[path]
        origin = self.config.origin(path)
        if origin is not None:
            return self.config.values[path], origin
        value = self._remembered.get(path)
        if type(value) in TYPES[setting.kind]:
            return value, "remembered"
        return setting.default, "default"

    def remember(self, path: str, value: Any) -> str | None:
        """Store a choice for later starts; None forgets it. Return a sentence if it cannot be."""
        origin = self.config.origin(path)
        if origin is not None:
            return f"{origin} sets {path}: the choice holds until you quit."
        try:
            if self._remembered.get(path) != value:
                write_preference(self.home, path, value)
        except OSError as error:
            return f"The choice can't be remembered: {error.strerror or error}"
        self._remembered = {**self._remembered, path: value}
        return None
