"""The profiles of a run: the folder ``profiles/NUMBER`` of its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ltui.training.diagnosis.profile_summary import Profile
from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.shared.profile_request import FOLDER
from ltui.training.shared.regular_files import read_regular, write_private_json
from ltui.training.store.run_directory import RunDir

_NAME = "profile.json"
_MOST_BYTES = 4 << 20


def profile_folder(run_dir: RunDir, number: int) -> Path:
    """Return the folder of a profile."""
    return run_dir.path / FOLDER / str(number)


def last_number(run_dir: RunDir) -> int:
    """Return the number of the last profile; 0 if there is none."""
    try:
        names = [path.name for path in (run_dir.path / FOLDER).iterdir()]
    except OSError:
        return 0
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)


def write_profile(run_dir: RunDir, profile: Profile) -> None:
    """Store a profile. Raises ``OSError``."""
    document: Any = to_json(profile)
    write_private_json(profile_folder(run_dir, profile.number) / _NAME, document)


def read_profile(run_dir: RunDir, number: int | None = None) -> Profile | None:
    """Return a profile, or else the last one; None if there is none that can be read."""
    number = last_number(run_dir) if number is None else number
    try:
        data = read_regular(profile_folder(run_dir, number) / _NAME, _MOST_BYTES)
        return from_json(Profile, parse_json(data))
    except (OSError, ValueError):
        return None
