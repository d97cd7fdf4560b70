"""The profiles of a run: the folder ``profiles/NUMBER`` of its directory."""

from __future__ import annotations

from contextlib import suppress
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
    return max(_numbers(run_dir), default=0)


def _numbers(run_dir: RunDir) -> list[int]:
    try:
        names = [path.name for path in (run_dir.path / FOLDER).iterdir()]
    except OSError:
        return []
    # The control block has 64 bits for one.
    return [int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 16]


def write_profile(run_dir: RunDir, profile: Profile) -> None:
    """Store a profile. Raises ``OSError``."""
    document: Any = to_json(profile)
    write_private_json(profile_folder(run_dir, profile.number) / _NAME, document)


def read_profile(run_dir: RunDir, number: int | None = None) -> Profile | None:
    """Return a profile, or else the last one that can be read; None if there is none."""
    for each in sorted(_numbers(run_dir), reverse=True) if number is None else (number,):
        with suppress(OSError, ValueError):
            data = read_regular(profile_folder(run_dir, each) / _NAME, _MOST_BYTES)
            return from_json(Profile, parse_json(data))
    return None
