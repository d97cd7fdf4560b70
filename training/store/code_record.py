"""What code an attempt of a run was started with: ``code/<attempt>.json`` and ``.diff``.

The files are written by
``training/lifecycle/record_code.py``, with mode 0600.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from ltui.training.json_codec import from_json, to_json
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.run_directory import (
    RunDir,
    list_runs,
    paths_in,
    read_json,
    write_atomically,
    write_json,
)

SUBMITTED = 0
"""Number in place of an attempt for the code when the run was submitted to SLURM."""


class CodeRecord(Struct, frozen=True, kw_only=True):
    """Commit, changes, packages and command of an attempt; a value that is unknown is None."""

    attempt: int
    recorded_at: float
    """Unix time in seconds."""
    command: tuple[str, ...]
    host: str
    user: str
    ltui: str | None = None
    """Version of ltui."""
    python: str | None = None
    """Interpreter of the ranks."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that matter for training, and of ``python``."""
    repository: str | None = None
    """Top folder of the git repository."""
    commit: str | None = None
    branch: str | None = None
    changed_files: tuple[str, ...] = ()
    """The first files with changes that were not committed."""
    changed_count: int = 0
    diff_bytes: int = 0
    diff_complete: bool = False
    """True if the diff in ``.diff`` holds all uncommitted changes of tracked files."""
    note: str | None = None
    """Reason why a part is unknown: ``git is not installed``."""
    identity: str | None = None
    """Digest of configuration, commit and changes; None if a part of them is unknown."""
    repeats: str | None = None
    """Id of the first run with the same ``identity``."""


def record_path(run_dir: RunDir, attempt: int) -> Path:
    return run_dir.code_dir / f"{attempt}.json"


def diff_path(run_dir: RunDir, attempt: int) -> Path:
    """Path of the changes to tracked files that were not committed."""
    return run_dir.code_dir / f"{attempt}.diff"


def write_record(run_dir: RunDir, record: CodeRecord, diff: bytes) -> None:
    """Write the files of an attempt. Raise ``OSError``."""
    run_dir.code_dir.mkdir(mode=0o700, exist_ok=True)
    if diff:
        write_atomically(diff_path(run_dir, record.attempt), diff)
    write_json(record_path(run_dir, record.attempt), to_json(record))


def read_record(run_dir: RunDir, attempt: int) -> CodeRecord | None:
    """Return the record of an attempt; None if there is none, or if it cannot be read."""
    document = read_json(record_path(run_dir, attempt))
    try:
        return None if document is None else from_json(CodeRecord, document, tolerant=True)
    except ValueError:
        return None


def read_records(run_dir: RunDir) -> list[CodeRecord]:
    """Return the records of all attempts that have one, first to last."""
    names = [path.stem for path in paths_in(run_dir.code_dir) if path.suffix == ".json"]
    attempts = sorted(int(name) for name in names if name.isdecimal())
    records = (read_record(run_dir, attempt) for attempt in attempts)
    return [record for record in records if record is not None]


def read_diff(run_dir: RunDir, attempt: int) -> str:
    """Return the uncommitted changes of an attempt; empty if there are none."""
    try:
        return read_regular(diff_path(run_dir, attempt)).decode("utf-8", "replace")
    except OSError:
        return ""


def first_with_identity(run_dir: RunDir, identity: str) -> str | None:
    """Return the id of the oldest other run with the same configuration and code."""
    same = [
        (record.recorded_at, other.id)
        for other in list_runs(run_dir.home)
        if other.id != run_dir.id
        and (record := read_record(other, 1)) is not None
        and record.identity == identity
    ]
    return min(same)[1] if same else None
