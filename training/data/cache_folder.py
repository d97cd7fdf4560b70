"""Folder for data that presets generate or download: next to the runs, or in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(folder: str | None = None) -> Path:
    """Return ``folder``, by default ``data`` in ltui's home. It is created if it does not exist."""
    path = Path(folder).expanduser() if folder else _default_folder()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _default_folder() -> Path:
    if home := os.environ.get("LTUI_HOME"):
        return Path(home) / "data"
    if run_dir := os.environ.get("LTUI_RUN_DIR"):
        return Path(run_dir).parent.parent / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltui" / "data"
