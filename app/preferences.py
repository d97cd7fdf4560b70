"""Settings that the dashboard remembers between starts: ``preferences.json`` in ltui's home."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
