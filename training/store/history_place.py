"""Where the history of a run is: in its run directory, or on a local disk with a copy there.

If the run directory is on a network file system, the supervisor writes ``run.db`` in a folder on a
disk of its machine, and ``run.db`` in the run directory is a copy (``open_history.py``).
``history.json`` in the run directory names that folder. Its name has random digits, so whoever
finds it on his machine reads the history itself, and everybody else reads the copy.

Which folders are on a network file system, by the kernel's list of mounts. SQLite needs locks and
shared memory between its processes. Network file systems provide them unreliably or not at all, and
what one machine writes may be visible to another one much later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.find_run import is_in_bin
from ltui.training.store.run_directory import (
    RunDir,
    paths_in,
    private_folder,
    read_json,
    write_json,
)

_NETWORK = frozenset(
    """
    9p afs auristorfs beegfs beegfs_nodev ceph cifs coda fhgfs gfs2 glusterfs gpfs lustre mmfs ncpfs
    nfs nfs4 ocfs2 orangefs panfs prl_fs pvfs2 smb3 smbfs vboxsf virtiofs wekafs
    """.split()  # noqa: SIM905 - easier to read than a list of strings
)
_LOCAL_FUSE = frozenset({"fuse-overlayfs", "overlayfs", "lxcfs", "mergerfs", "ntfs-3g", "ntfs"})
"""Subtypes of FUSE that are backed by a disk of this machine. All others may be on a network."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_file_system(folder: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that ``folder`` is on; None if it is on none.

    ``mounts`` is the text of ``/proc/self/mountinfo``.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    kind = _type_at(folder.resolve(), mounts)
    if kind in _NETWORK:
        return kind
    if kind == "fuse" or kind.startswith("fuse."):
        return None if kind.removeprefix("fuse.") in _LOCAL_FUSE else kind
    return None


def _type_at(folder: Path, mounts: str) -> str:
    """Return the type of the file system that is mounted at ``folder`` or nearest above it."""
    found, depth = "", -1
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not source:
            continue
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several mounts at one point, the last one hides the others.
        if len(point.parts) >= depth and folder.is_relative_to(point):
            found, depth = source.split()[0], len(point.parts)
    return found


FOLDER_VARIABLE = "LTUI_HISTORY_DIR"
"""Environment variable with the folder for histories; ``none`` for the run directory itself."""
ELSEWHERE_S = 120.0
"""Seconds without a sign of life after which a run on another machine counts as abandoned."""
_CHOOSE = f"Set {FOLDER_VARIABLE} to a folder on a local disk that you can write."
KEEP_UNFINISHED_S = 14 * 86400.0
"""Seconds for which a history is kept whose last part was not copied."""


INCIDENT_FILE = "an incident file"
"""Begin of what is said about the history in one, which lacks nothing that it should have."""


class HistoryPlace(Struct, frozen=True, kw_only=True):
    """The content of ``history.json``."""

    host: str
    folder: Path | None
    """Folder of the history on ``host``; None if the copy in the run directory is complete."""
    alive_at: float
    """Unix time of the last sign of life of the supervisor."""
    note: str | None = None
    """What to say about the history; None if it is a copy that may lack its end."""

    @property
    def is_here(self) -> bool:
        """True if the folder is on this machine."""
        return self.folder is not None and _is_history_folder(self.folder)

    @property
    def is_live_elsewhere(self) -> bool:
        """True if a supervisor on another machine is at work."""
        if self.folder is None or self.is_here or self.host == socket.gethostname():
            return False
        return time.time() - self.alive_at < ELSEWHERE_S


def read_place(run_dir: RunDir) -> HistoryPlace | None:
    """Return where the history is; None if it is in the run directory."""
    document = read_json(run_dir.history_place_path)
    if document is None:
        return None
    folder = document.get("folder")
    if folder and not (isinstance(folder, str) and folder.isprintable()):
        return None
    if folder and _is_of_another_run(Path(folder), run_dir):
        folder = None  # A copy of that run has what was copied until then.
    with contextlib.suppress(OSError):
        return HistoryPlace(
            host=str(document.get("host")),
            folder=Path(folder) if folder else None,
            alive_at=run_dir.history_place_path.stat().st_mtime,
            note=str(document["note"]) if document.get("note") else None,
        )
    return None


def _is_of_another_run(folder: Path, run_dir: RunDir) -> bool:
    """Return True if a history is that of the run that ``run_dir`` was copied from."""
    with contextlib.suppress(OSError, ValueError):
        owner = RunDir(Path(read_regular(folder / "run_dir").decode()))
        at = owner if owner.path.is_dir() else is_in_bin(owner)
        if at is None or os.path.samefile(at.path, run_dir.path):
            return False
        return (read_json(at.history_place_path) or {}).get("folder") == str(folder)
    return False


def write_place(run_dir: RunDir, folder: Path | None) -> None:
    """Record that this machine has the history in ``folder``, or that the copy is complete."""
    document = {"host": socket.gethostname(), "folder": None if folder is None else str(folder)}
    write_json(run_dir.history_place_path, document)


class HistoryFile(Struct, frozen=True):
    """A file that holds the history."""

    path: Path
    is_copy: bool = False
    """True if the file is replaced as a whole, and never written."""


def history_file(run_dir: RunDir) -> HistoryFile:
    """Return the file from which to read the history on this machine. It may not exist."""
    place = read_place(run_dir)
    if place is None:
        return HistoryFile(run_dir.db_path)
    if place.folder is not None and place.is_here:
        return HistoryFile(place.folder / "run.db")
    return HistoryFile(run_dir.db_path, is_copy=True)


def what_is_missing(run_dir: RunDir) -> str | None:
    """Return a sentence about what the copy lacks that is read here; None if it is complete."""
    place = read_place(run_dir)
    if place is None or place.folder is None or place.is_here:
        return None
    copied = f"copied until {copied_at(run_dir)}"
    return place.note or f"{copied}; the rest is in {place.folder} on {place.host}"


def copied_at(run_dir: RunDir) -> str:
    """Return the time of the last copy: ``14:02:10``, with the date unless it is today."""
    try:
        copied = time.localtime(run_dir.db_path.stat().st_mtime)
    except OSError:
        return "its start"
    today = copied[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", copied)


def remove_history(run_dir: RunDir) -> None:
    """Remove the history of a run that no supervisor has open, here and in the run directory."""
    place = read_place(run_dir)
    if place is not None and place.folder is not None:
        remove_folder(place.folder)
    for path in (run_dir.history_place_path, *run_dir.path.glob("run.db*")):
        path.unlink(missing_ok=True)


# -- the folders of this machine -------------------------------------------------------------------


def folder_for_histories(run_dir: RunDir) -> Path | None:
    """Return the folder of this machine for histories; None if the run directory is good for them.

    Raise ``ProblemError`` if ``LTUI_HISTORY_DIR`` names a folder that cannot be used.
    """
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    if chosen == "none":
        return None
    if chosen:
        return _folder_below(Path(chosen).expanduser().absolute())
    if network_file_system(run_dir.path) is None:
        return None
    for folder in local_temporary_folders():
        with contextlib.suppress(ProblemError):
            return _folder_below(folder)
    return None


def local_temporary_folders() -> list[Path]:
    """Return the folders for temporary files that are on a disk of this machine, best first."""
    names = (os.environ.get(FOLDER_VARIABLE), os.environ.get("SLURM_TMPDIR"), tempfile.gettempdir())
    folders = [Path(name) for name in names if name and name != "none"]
    return [f for f in folders if f.is_dir() and network_file_system(f) is None]


def own_folder(parent: Path) -> Path:
    """Return the folder of this user below a folder for temporary files. Creates nothing."""
    return parent / f"ltui-{os.getuid()}"


def _folder_below(parent: Path) -> Path:
    """Return the user's folder for histories below ``parent``; create it if absent."""
    return private_folder(private_folder(own_folder(parent), _CHOOSE) / "history", _CHOOSE)


def new_folder(run_dir: RunDir, parent: Path) -> Path:
    """Create the folder for the history of one run."""
    folder = parent / f"{run_dir.id}-{os.urandom(6).hex()}"
    folder.mkdir(mode=0o700)
    (folder / "run_dir").write_text(str(run_dir.path), encoding="utf-8")
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder that ``new_folder`` has created. Errors of the disk are ignored."""
    if not _is_history_folder(folder):
        return
    with contextlib.suppress(OSError):
        # Renamed first, so that no reader opens a history of which a part is gone.
        hidden = folder.with_name(f".removed-{folder.name}")
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _is_history_folder(folder: Path) -> bool:
    """Return True if ``folder`` is a private folder of this user that ``new_folder`` has created.

    Whoever gives a run to somebody chooses what its ``history.json`` names: perhaps another run.
    """
    try:
        status = folder.lstat()
        files = [(folder / name).lstat() for name in ("run.db", "run_dir")]
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    own = all(f.st_uid == status.st_uid for f in files) and os.getuid() in (0, status.st_uid)
    created = folder.parts[-3:-1] == (f"ltui-{status.st_uid}", "history")
    return private and own and created and folder.is_absolute() and ".." not in folder.parts


class LeftHistory(Struct, frozen=True):
    """A folder with a history on this machine."""

    folder: Path
    run_dir: RunDir
    changed_at: float

    @property
    def is_live(self) -> bool:
        """True if a supervisor of this machine writes it."""
        return lock_holder(self.run_dir.lock_path) is not None

    def is_needed(self, now_s: float) -> bool:
        """Return True if a run may still use it, or if it may hold what no copy holds."""
        if not self.run_dir.path.parent.is_dir():
            # The shared folder is not mounted at the moment.
            return now_s - self.changed_at < KEEP_UNFINISHED_S
        run_dir = self.run_dir if self.run_dir.path.is_dir() else is_in_bin(self.run_dir)
        if run_dir is None:
            return False
        place = read_place(run_dir)
        is_current = place is not None and place.folder == self.folder
        return is_current or now_s - self.changed_at < KEEP_UNFINISHED_S


def left_histories() -> Iterator[LeftHistory]:
    """Yield the histories in this machine's temporary folders, those of live runs included."""
    for parent in dict.fromkeys(local_temporary_folders()):
        for folder in paths_in(own_folder(parent) / "history"):
            with contextlib.suppress(OSError, ValueError):
                run_dir = RunDir(Path(read_regular(folder / "run_dir").decode()))
                yield LeftHistory(folder, run_dir, (folder / "run.db").stat().st_mtime)


def remove_unneeded_histories() -> None:
    """Remove the histories of this machine that no run needs any more."""
    now_s = time.time()
    for left in left_histories():
        if not left.is_needed(now_s):
            remove_folder(left.folder)
