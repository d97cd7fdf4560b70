"""Where data that presets make or download is kept: beside the runs, else in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(given: str | None = None) -> Path:
    """``given``, else ``data`` in ltui's home; created where it does not exist."""
    folder = Path(given).expanduser() if given else _default()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _default() -> Path:
    if home := os.environ.get("LTUI_HOME"):
        return Path(home) / "data"
    if run_dir := os.environ.get("LTUI_RUN_DIR"):
        return Path(run_dir).parent.parent / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltui" / "data"
