"""The copies of the code of a run: ``code/frozen-N`` and the list of its files, ``frozen-N.json``.

``training/lifecycle/freeze_code.py`` makes them. N is the attempt for which a copy was made.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct, field

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import from_json
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.run_directory import RunDir, read_json
from ltui.training.store.secret_files import reason_to_leave_out

ARGUMENT_SUFFIXES = (
    *(".py", ".sh", ".bash", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".conf", ".gin"),
    ".jsonnet",
)
"""Suffixes of files that a command reads: it gets the copy. JSON may be what it writes."""
CODE_SUFFIXES = (*ARGUMENT_SUFFIXES, ".pyi", ".pyx", ".json", ".libsonnet")
"""Suffixes of code and configuration."""
PROGRAM_SUFFIXES = (".py", ".pyi", ".pyx", ".sh", ".bash")
"""Suffixes of files to which no run writes."""
NAMES_SHOWN = 8
"""Number of names of files that are listed."""
_DIFF_FILE_BYTES = 1 << 20
"""Bytes of a file whose difference is shown."""


class FrozenCode(Struct, frozen=True, kw_only=True):
    """What a copy of the code has, and what it lacks."""

    number: int
    frozen_at: float
    """Unix time in seconds."""
    root: str
    """The folder that was copied: the top of the repository, or the folder of the script."""
    files: tuple[str, ...] = ()
    """Names of the copied files, below ``root`` and below the copy."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the programs among them. A run may write to the other ones."""
    linked: tuple[str, ...] = ()
    """The first names of what the copy only links to: data, what git ignores, what is too large."""
    linked_count: int = 0
    left_out: tuple[str, ...] = ()
    """What the copy does not have, each with the reason: ``.env (may hold a secret)``."""
    note: str | None = None
    """Why git was not asked: ``/tmp/x is in no git repository``."""

    def lines(self) -> list[str]:
        """Return what is frozen and what is not."""
        parts = [f"The code is frozen: {files_text(len(self.files))} of {self.root}"]
        if self.linked_count:
            parts.append(f"not frozen: {listed(self.linked, self.linked_count)}")
        if self.left_out:
            parts.append(f"left out: {listed(self.left_out, len(self.left_out))}")
        return parts

    def text(self) -> str:
        """Return the lines as one sentence, without its full stop."""
        return "; ".join(self.lines())


def files_text(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"


def differs_text(attempt: int, number: int) -> str:
    """Return how many files differ from those with which an attempt was asked for."""
    if not number:
        return f"code equals that of attempt {attempt}"
    return f"code differs from attempt {attempt}: {files_text(number)}"


def listed(names: Sequence[str], count: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {count - NAMES_SHOWN} more" if count > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


def frozen_folder(run_dir: RunDir, number: int) -> Path:
    """Path of a copy."""
    return run_dir.code_dir / f"frozen-{number}"


def frozen_list_path(run_dir: RunDir, number: int) -> Path:
    """Path of the list of the files of a copy."""
    return run_dir.code_dir / f"frozen-{number}.json"


def read_frozen(run_dir: RunDir, number: int) -> FrozenCode | None:
    """Return what a copy has; None if there is no copy, or if its list cannot be read."""
    document = read_json(frozen_list_path(run_dir, number))
    if document is None or not frozen_folder(run_dir, number).is_dir():
        return None
    try:
        frozen = from_json(FrozenCode, document, tolerant=True)
    except ValueError:
        return None
    # A run directory may be from somebody else: no name leads out of the folder.
    names = {*frozen.files, *frozen.digests}
    safe = all(name and ".." not in PurePosixPath(name).parts for name in names)
    return frozen if safe and not any(map(os.path.isabs, names)) else None


def code_to_run(run_dir: RunDir, spec: RunSpec) -> FrozenCode | None:
    """Return the copy with which a run trains; None if its code is not frozen.

    Raise ``ProblemError`` if the copy is gone or lacks code, or if a program in it has changed. Of
    data, the run may delete what it finds beside its script.
    """
    if not spec.freeze:
        return None
    frozen = read_frozen(run_dir, spec.code_copy)
    folder = frozen_folder(run_dir, spec.code_copy)
    if frozen is None:
        raise _unusable(run_dir, f"is missing: {folder}")
    code = [name for name in frozen.files if name.endswith(CODE_SUFFIXES)]
    missing = [n for n in code if (folder / n).is_symlink() or not (folder / n).is_file()]
    if missing:
        raise _unusable(run_dir, f"is incomplete: {folder} lacks {listed(missing, len(missing))}")
    for name, digest in frozen.digests.items():
        if digest_of(read_regular(folder / name)) != digest:
            raise _unusable(run_dir, f"has changed: {folder / name}")
    return frozen


def _unusable(run_dir: RunDir, what: str) -> ProblemError:
    return ProblemError.of(
        where=run_dir.id,
        what=f"its frozen code {what}.",
        remedy="Start it again as a new run, or resume it from its checkpoint with the code of "
        f"now: ltui resume {run_dir.id} --code now",
    )


def digest_of(data: bytes) -> str:
    """Return the digest of a file of a copy."""
    return hashlib.sha256(data).hexdigest()


def frozen_code_of(run_dir: RunDir) -> FrozenCode | None:
    """Return the copy with which the last attempt of a run trains; None if there is none."""
    try:
        spec = run_dir.read_spec()
    except ProblemError:
        return None
    return read_frozen(run_dir, spec.code_copy) if spec.freeze else None


def copied_path(run_dir: RunDir, frozen: FrozenCode, path: str) -> str:
    """Return the copy of a file or folder; ``path`` itself if there is none."""
    name = os.path.relpath(os.path.realpath(path), frozen.root)
    copy = frozen_folder(run_dir, frozen.number) / name
    return path if name.startswith("..") or not copy.exists() else os.path.abspath(copy)


def frozen_command(
    run_dir: RunDir, frozen: FrozenCode, command: Sequence[str], cwd: str
) -> tuple[str, ...]:
    """Return a command with the copies of the scripts and configuration files that it names, also
    as ``--option=FILE``."""
    words = []
    for word in command:
        option, equals, value = word.rpartition("=")
        path = os.path.join(cwd, value)
        name = os.path.relpath(os.path.realpath(path), frozen.root)
        if value.endswith(ARGUMENT_SUFFIXES) and name in frozen.files:
            value = copied_path(run_dir, frozen, path)
        words.append(f"{option}{equals}{value}")
    return tuple(words)


def changed_files(
    run_dir: RunDir, frozen: FrozenCode, other: FrozenCode | None = None
) -> list[str]:
    """Return the files that differ from those of a copy: now, or in the copy ``other``.

    A file that is new since then counts in another copy only.
    """
    old = frozen_folder(run_dir, frozen.number)
    if other is None:
        return [name for name in frozen.files if not _equal(old / name, Path(frozen.root, name))]
    new = frozen_folder(run_dir, other.number)
    names = sorted({*frozen.files, *other.files})
    return [name for name in names if not _equal(old / name, new / name)]


def _equal(old: Path, new: Path) -> bool:
    try:
        before, after = os.stat(old), os.stat(new)
        # A copy has the time of its original.
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            return True
        return before.st_size == after.st_size and read_regular(old) == read_regular(new)
    except OSError:
        return False


def difference(run_dir: RunDir, frozen: FrozenCode, name: str) -> list[str]:
    """Return the lines of the difference between a file of a copy and the same file now."""

    def lines(path: Path) -> list[str]:
        try:
            return read_regular(path, _DIFF_FILE_BYTES).decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            return [f"({error.strerror})"]

    why = reason_to_leave_out(frozen.root, name)
    old = lines(frozen_folder(run_dir, frozen.number) / name)
    new = [f"({why})"] if why is not None else lines(Path(frozen.root, name))
    titles = f"attempt {frozen.number}: {name}", f"now: {name}"
    return [*difflib.unified_diff(old, new, *titles, lineterm="")]
