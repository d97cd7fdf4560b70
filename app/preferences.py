"""Settings that the dashboard remembers between starts: ``preferences.json`` in ltui's home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ltui.training.store.run_directory import read_json, write_atomically


def read_preferences(home: Path) -> dict[str, Any]:
    """Return the remembered settings; empty if the file is missing or damaged."""
    return read_json(home / "preferences.json") or {}


def write_preference(home: Path, key: str, value: Any) -> None:
    """Store one setting and keep the others. None is not stored: the setting is forgotten.

    Raises ``OSError`` if the home directory is missing or not writable.
    """
    document = {**read_preferences(home), key: value}
    document = {name: one for name, one in document.items() if one is not None}
    text = json.dumps(document, indent=2, sort_keys=True)
    write_atomically(home / "preferences.json", f"{text}\n".encode())


def read_script_preference(home: Path, key: str, script: str) -> Any:
    """Return what is remembered under ``key`` for a preset or script; None if nothing is."""
    stored = read_preferences(home).get(key)
    return stored.get(script) if isinstance(stored, dict) else None


def write_script_preference(home: Path, key: str, script: str, value: Any) -> None:
    """Store one setting for a preset or script; an empty one is forgotten.

    Raises ``OSError`` as ``write_preference``.
    """
    stored = read_preferences(home).get(key)
    choices = {**(stored if isinstance(stored, dict) else {}), script: value}
    write_preference(home, key, {name: one for name, one in choices.items() if one})
