"""The names of presets, found without reading any: the first screen needs no more than these.

Standard library only.
"""

from __future__ import annotations

import re
from pathlib import Path

import ltui.presets

SUFFIXES = (".yaml", ".yml")
_PRESET_KEYS = (re.compile(r"^trainer\s*:", re.M), re.compile(r"^model\s*:", re.M))


def shipped_folder() -> Path:
    """The directory of the presets that ltui ships."""
    return Path(str(ltui.presets.__file__)).parent


def shipped_names() -> tuple[str, ...]:
    """The presets that ltui ships, ``quickstart`` first."""
    names = sorted(p.stem for p in shipped_folder().iterdir() if p.suffix == ".yaml")
    return tuple(sorted(names, key=lambda n: n != "quickstart"))


def preset_names(cwd: Path | None = None) -> tuple[str, ...]:
    """Every name that can be run: the shipped presets, then the configuration files in ``cwd``.

    A file counts if it has the keys ``trainer`` and ``model``; it may still turn out damaged.
    """
    local = _local_files(cwd) if cwd is not None else []
    return (*shipped_names(), *(f"./{path.name}" for path in local))


def _local_files(cwd: Path) -> list[Path]:
    try:
        paths = sorted(p for p in cwd.iterdir() if p.suffix in SUFFIXES and p.is_file())
    except OSError:
        return []
    return [path for path in paths if _has_preset_keys(path)]


def _has_preset_keys(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return False
    return all(pattern.search(head) for pattern in _PRESET_KEYS)
