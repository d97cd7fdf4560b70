"""The folder of a run's mirror, and what would keep it from being written."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import Problem
from ltui.training.store.optional_library import missing_library
from ltui.training.store.run_directory import RunDir


def mirror_folder(run_dir: RunDir, spec: RunSpec) -> Path | None:
    """Return the folder for the event files of a run; None if it has no mirror."""
    if spec.mirror is None:
        return None
    folder = _chosen_folder(spec)
    return run_dir.path / "tensorboard" if folder is None else folder / spec.id


def mirror_problems(spec: RunSpec) -> list[Problem]:
    """Return what would keep the mirror of a run from being written."""
    if spec.mirror is None:
        return []
    if importlib.util.find_spec("tensorboard") is None:
        return [missing_library("tensorboard", "tensorboard", f"mirror {spec.mirror}")]
    folder = _chosen_folder(spec)
    while folder is not None and not folder.exists():
        folder = folder.parent
    if folder is None or (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return []
    return [
        Problem(
            where=f"mirror {spec.mirror}",
            what=f"{folder} is not a folder that can be written.",
            remedy="Name another folder: tensorboard:FOLDER.",
        )
    ]


def _chosen_folder(spec: RunSpec) -> Path | None:
    """Return the folder that the user chose; None for one in the run directory."""
    name = (spec.mirror or "").partition(":")[2]
    return Path(spec.cwd, Path(name).expanduser()) if name else None
