"""Freeze the code of a run: keep a copy of it in the run directory, with which the run trains.

The copy has what git tracks in the repository of the code, and untracked Python and configuration
files that git does not ignore. Outside of a repository it has the Python and configuration files
beside the script, and those in the folders of Python files beside it. Anything else of the folder
is a link to the original, so that a program finds it beside its script: it is not frozen. What may
hold a secret, and links that lead out of the folder, are not there at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.record_code import (
    UnknownError,
    ask_git,
    code_folder,
    code_now,
    named_script,
    top_folder,
)
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.code_record import diff_path, record_path, write_record
from ltui.training.store.frozen_code import (
    CODE_SUFFIXES,
    PROGRAM_SUFFIXES,
    FrozenCode,
    digest_of,
    frozen_folder,
    frozen_list_path,
)
from ltui.training.store.run_directory import RunDir, make_private_folders, paths_in, write_json
from ltui.training.store.secret_files import LEFT_OUT, holds_secret, is_secret, reason_to_leave_out

MOST_FILES = 5000
"""Number of files that a copy may have."""
MOST_BYTES = 64 << 20
"""Bytes that a copy may have."""
MOST_FILE_BYTES = 4 << 20
"""Bytes of a file above which it is data."""
NAMES_KEPT = 100
"""Number of names of what is not frozen that are kept."""
MOST_LINKS = 1000
"""Number of links to what is not frozen."""
_GIT_S = 20.0
"""Seconds that git may take to list the files of the repository."""
_LIST_BYTES = 4 << 20
"""Bytes of such a list."""
_SKIPPED = frozenset({"__pycache__", ".git", "node_modules", "site-packages", "venv", ".venv"})
_NO_FREEZE = "Start it without freezing the code: --no-freeze"


class _Listing(NamedTuple):
    """The names of a folder: files to copy if they are small, and everything else."""

    root: str
    files: list[str]
    others: list[str]
    note: str | None = None


class _Chosen(NamedTuple):
    """Names below the folder, by what becomes of them."""

    files: list[str]
    linked: list[str]
    left_out: dict[str, str]
    """Name -> reason."""


def freeze_code(run_dir: RunDir, spec: RunSpec, number: int = 1) -> FrozenCode:
    """Keep the code of a run as it is now, completely or not at all, as the copy ``number``.

    Raises ``ProblemError`` if there is too much code or its script may hold a secret, and
    ``OSError`` if the copy cannot be written.
    """
    listing = _list(spec)
    chosen = choose(listing.root, listing.files, listing.others, run_dir.home)
    folder = frozen_folder(run_dir, number)
    make_private_folders(folder.parent)
    for leftover in paths_in(folder.parent):
        if leftover.name.startswith(".new-"):  # of a command that was killed
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f".new-{number}")
    try:
        digests = _copy(Path(listing.root), temporary, chosen)
        _check_script(spec, listing.root, chosen)
        shutil.rmtree(folder, ignore_errors=True)
        frozen = FrozenCode(
            number=number,
            frozen_at=time.time(),
            root=listing.root,
            files=tuple(chosen.files),
            digests=digests,
            linked=tuple(chosen.linked[:NAMES_KEPT]),
            linked_count=len(chosen.linked),
            left_out=tuple(f"{n} ({why})" for n, why in chosen.left_out.items())[:NAMES_KEPT],
            note=listing.note,
        )
        # ``record_code`` adds the packages of an attempt.
        write_record(run_dir, *code_now(spec, number))
        write_json(frozen_list_path(run_dir, number), to_json(frozen))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_frozen(run_dir, number)
        raise
    return frozen


def remove_frozen(run_dir: RunDir, number: int) -> None:
    """Remove a copy with which no attempt was started, and what was recorded of it."""
    shutil.rmtree(frozen_folder(run_dir, number), ignore_errors=True)
    for path in (
        frozen_list_path(run_dir, number),
        record_path(run_dir, number),
        diff_path(run_dir, number),
    ):
        with contextlib.suppress(OSError):
            path.unlink()


def _list(spec: RunSpec) -> _Listing:
    """Return the files of the repository of the code, or those beside the script."""
    script = named_script(spec)
    folder = code_folder(spec).resolve() if script is None else script.resolve().parent
    try:
        listing = _list_repository(folder)
    except UnknownError as error:
        return _list_beside(folder, str(error))
    name = None if script is None else os.path.relpath(script.resolve(), listing.root)
    if name is not None and name not in listing.files:
        return _list_beside(folder, f"git does not know {name}")
    return listing


def _list_repository(folder: Path) -> _Listing:
    deadline = time.monotonic() + _GIT_S
    top = top_folder(folder, deadline)

    def names(*options: str) -> list[str]:
        text, complete = ask_git(
            Path(top), deadline, "ls-files", "-z", *options, most_bytes=_LIST_BYTES
        )
        if not complete:
            raise _too_much(top, f"more than {_LIST_BYTES >> 20} MiB of names")
        return [os.fsdecode(name) for name in text.split(b"\0") if name]

    tracked = dict.fromkeys(names("--cached", "--recurse-submodules"))
    new = [name for name in names("--others", "--exclude-standard") if not _is_skipped(name)]
    ignored = names("--others", "--ignored", "--exclude-standard", "--directory")
    code = [name for name in new if is_code(name)]
    others = [name for name in new if not is_code(name)]
    return _Listing(top, [*tracked, *code], [*others, *(n for n in ignored if not _is_skipped(n))])


def _list_beside(folder: Path, note: str) -> _Listing:
    """Return the code in a folder, and in the folders of Python files below it."""
    files: list[str] = []
    others: list[str] = []
    pending = [""]
    while pending and len(files) <= MOST_FILES:
        inner = pending.pop(0)
        for path in sorted(paths_in(folder / inner)):
            name = str(Path(inner, path.name))
            is_folder = path.is_dir() and not path.is_symlink()
            if _is_skipped(name) or (path / "pyvenv.cfg").exists():
                continue
            if is_folder and any(p.suffix == ".py" for p in paths_in(path)):
                pending.append(name)
            else:
                (files if is_code(name) and not is_folder else others).append(name)
    return _Listing(str(folder), files, others, note)


def is_code(name: str) -> bool:
    """Return whether a file is code or configuration, by its name."""
    return name.endswith(CODE_SUFFIXES)


def _is_skipped(name: str) -> bool:
    """Return whether a file that git does not track is none of the program's."""
    parts = name.rstrip("/").split("/")
    hidden = any(part.startswith(".") for part in parts) and not is_secret(name)
    return hidden or not _SKIPPED.isdisjoint(parts) or name.endswith((".pyc", ".egg-info/"))


def choose(root: str, files: Iterable[str], others: Iterable[str], home: Path) -> _Chosen:
    """Return what becomes of each name below ``root``. Raise ``ProblemError`` for too much code.

    Code comes first, then the smallest files. The runs in ``home`` are no part of the code.
    """
    chosen = _Chosen([], [], {})
    sizes: dict[str, int] = {}
    own, rest = f"{os.path.relpath(os.path.realpath(home), root)}/", set(others)
    for name in (*files, *sorted(rest)):
        path = os.path.realpath(os.path.join(root, name))
        if f"{name}/".startswith(own) or not os.path.exists(path):
            continue
        if not name.isprintable():
            chosen.left_out[_shown(name)] = "has a name that cannot be shown"
        elif (why := reason_to_leave_out(root, name)) is not None:
            chosen.left_out[name] = why
        elif name in rest or not os.path.isfile(path):
            chosen.linked.append(name.rstrip("/"))
        else:
            sizes[name] = os.path.getsize(path)
    code = [name for name in sizes if is_code(name) and sizes[name] <= MOST_FILE_BYTES]
    total = sum(sizes[name] for name in code)
    if len(code) > MOST_FILES or total > MOST_BYTES:
        raise _too_much(root, f"{len(code):,} files of code")
    for name in sorted(sizes.keys() - set(code), key=lambda name: (sizes[name], name)):
        total += sizes[name]
        fits = sizes[name] <= MOST_FILE_BYTES and total <= MOST_BYTES and len(code) < MOST_FILES
        (code if fits else chosen.linked).append(name)
    chosen.files.extend(sorted(code))
    return chosen


def _shown(name: str) -> str:
    """Return a name in which what is no text is escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _copy(root: Path, folder: Path, chosen: _Chosen) -> dict[str, str]:
    """Write the copy, and return the digests of its programs.

    What proves to be secret, or cannot be read, is moved to ``left_out``.
    """
    digests = {}
    folder.mkdir(mode=0o700)
    for name in chosen.files[:]:
        try:
            data = read_regular(root / name, MOST_FILE_BYTES)
            status = os.stat(root / name)
            why = LEFT_OUT if holds_secret(data) else None
        except OSError as error:
            why = error.strerror or "it cannot be read"
        if why is None:
            _write(folder / name, data, status)
            if name.endswith(PROGRAM_SUFFIXES):
                digests[name] = digest_of(data)
        else:
            chosen.files.remove(name)
            chosen.left_out[name] = why
    for name in chosen.linked[:MOST_LINKS]:
        make_private_folders((folder / name).parent)
        (folder / name).symlink_to(root / name)
    return digests


def _write(path: Path, data: bytes, status: os.stat_result) -> None:
    make_private_folders(path.parent)
    mode = 0o700 if status.st_mode & 0o100 else 0o600
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    # As the original, so that neither Python nor a comparison takes it for a changed file.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _check_script(spec: RunSpec, root: str, chosen: _Chosen) -> None:
    """Raise ``ProblemError`` if the copy lacks the script that the command names."""
    script = named_script(spec)
    name = None if script is None else os.path.relpath(script.resolve(), root)
    if name is not None and name not in chosen.files:
        why = chosen.left_out.get(_shown(name), f"has more than {MOST_FILE_BYTES >> 20} MiB")
        raise ProblemError.of(
            where=f"--freeze: {script}",
            what=f"this script cannot be kept with the run: it {why}.",
            remedy=_NO_FREEZE,
        )


def _too_much(root: str, what: str) -> ProblemError:
    return ProblemError.of(
        where=f"--freeze: {root}",
        what=f"it has {what}, and at most {MOST_FILES:,} files and {MOST_BYTES >> 20} MiB are "
        "kept with a run.",
        remedy=_NO_FREEZE,
    )
