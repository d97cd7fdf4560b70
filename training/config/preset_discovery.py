"""Names of presets, found without parsing any, because the first screen needs only names.

Standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

import ltui.presets

SUFFIXES = (".yaml", ".yml")
_PRESET_KEYS = (re.compile(r"^trainer\s*:", re.M), re.compile(r"^model\s*:", re.M))
_ANY_KEY = re.compile(r"^\s*(trainer|model|ltui)\s*:", re.M)


def shipped_folder() -> Path:
    """Return the directory of the presets that ltui ships."""
    return Path(str(ltui.presets.__file__)).parent


def shipped_names() -> tuple[str, ...]:
    """Return the names of the presets that ltui ships, ``quickstart`` first."""
    names = sorted(p.stem for p in shipped_folder().iterdir() if p.suffix == ".yaml")
    return tuple(sorted(names, key=lambda n: n != "quickstart"))


def preset_names(cwd: Path | None = None) -> tuple[str, ...]:
    """Return the names of the shipped presets, then of the configuration files in ``cwd``.

    A file counts if it has the keys ``trainer`` and ``model``; it may still be invalid.
    """
    paths = _yaml_files(cwd) if cwd is not None else []
    local = [path for path in paths if _has_preset_keys(_head(path))]
    return (*shipped_names(), *(f"./{path.name}" for path in local))


def suspected_names(cwd: Path) -> tuple[str, ...]:
    """Return files in ``cwd`` that contain a preset's keys, but not at the top level.

    They are other files, or presets that are not valid YAML.
    """
    heads = ((path, _head(path)) for path in _yaml_files(cwd))
    return tuple(
        f"./{path.name}"
        for path, head in heads
        if _ANY_KEY.search(head) and not _has_preset_keys(head)
    )


def _yaml_files(cwd: Path) -> list[Path]:
    try:
        return sorted(p for p in cwd.iterdir() if p.suffix in SUFFIXES and p.is_file())
    except OSError:
        return []


def _has_preset_keys(head: str) -> bool:
    return all(pattern.search(head) for pattern in _PRESET_KEYS)


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
