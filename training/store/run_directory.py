"""Location of runs: ltui's home directory, the paths and size of one run, the ids of new runs.

Folders for runs, sockets, keys and histories can be read by their owner only.
``Path.mkdir(mode=0o700, parents=True)`` gives the mode to the last folder only.

This module does not know about processes or databases.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from msgspec import Struct

from ltui.training.json_codec import parse_json
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import read_regular

if TYPE_CHECKING:
    from ltui.training.config.run_spec import RunSpec

_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket: ``sun_path`` has 108 bytes including a terminating zero."""

MOST_JSON_BYTES = 8 << 20
"""Maximum size of a JSON file of a run. The largest one, a published snapshot, has 2 MB."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,39}")

_ADJECTIVES = """
amber bold brave bright calm clear clever cosmic crisp daring deep eager early fair fast fine fond
fresh gentle glad golden grand green happy hidden humble keen kind late light lively loud lucky
mellow merry mild neat noble old patient plain polite proud quick quiet rapid rare ready rich royal
sharp shy silent silver simple slow smooth soft solid spare steady still strong sunny swift tall
tame tidy tiny vast vivid warm wide wild wise young
""".split()  # noqa: SIM905 - easier to read than a list of strings
_NOUNS = """
ant badger bat bear beaver bee birch bison brook cat cedar comet crane crow deer dove duck eagle elk
elm falcon fern finch fir fox frog goat goose hare hawk heron hill horse ibis iris jay kite lake
lark leaf lemur lion lynx maple marten mole moon moose moss moth newt oak orca otter owl panda pear
perch pine plum puma quail raven reed robin rook rose salmon seal shrew sparrow spruce stag star
stoat stone stork swan swift tern thrush tiger toad trout tulip vole wasp whale willow wolf wren yak
""".split()  # noqa: SIM905


def ltui_home(*, to_write: bool = True) -> Path:
    """Return ``$LTUI_HOME`` or the platform's user data directory; create it (0700) if absent.

    Raise ``ProblemError`` if it cannot be created, or is not writable and ``to_write`` is set.
    """
    from_environment = os.environ.get("LTUI_HOME")
    if from_environment:
        home = Path(from_environment).expanduser().absolute()
    else:
        # Imported here because commands that set LTUI_HOME do not need platformdirs.
        import platformdirs

        home = Path(platformdirs.user_data_dir("ltui", appauthor=False))
    where = "LTUI_HOME" if from_environment else str(home)
    if not to_write and os.access(home / "runs", os.R_OK | os.X_OK):
        return home
    try:
        make_private_folders(home / "runs")
    except OSError as error:
        raise _home_problem(where, home, error.strerror or str(error)) from error
    if not os.access(home / "runs", os.W_OK | os.X_OK):
        raise _home_problem(where, home, "Permission denied")
    return home


def _home_problem(where: str, home: Path, reason: str) -> ProblemError:
    return ProblemError.of(
        where=where,
        what=f"{home} cannot be written ({reason}).",
        remedy="Set LTUI_HOME to a directory that you can write.",
    )


class _Below:
    """A path below the directory of a run, as an attribute of ``RunDir``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, _: object) -> Path:
        return run_dir.path / self._name


class RunDir(Struct, frozen=True):
    """Paths of one run. Creating a ``RunDir`` touches no file."""

    LABELS_NAME: ClassVar[str] = "labels.json"

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def home(self) -> Path:
        return self.path.parent.parent

    spec_path = _Below("spec.yaml")
    db_path = _Below("run.db")
    labels_path = _Below(LABELS_NAME)
    """Tags, group, note and star (``training/store/labels_file.py``)."""
    history_place_path = _Below("history.json")
    """Exists if ``db_path`` is a copy (``history_place.py``)."""
    lock_path = _Below("supervisor.lock")
    socket_path = _Below("control.sock")
    """Path that clients connect to; a symbolic link if the path is too long for a socket."""
    shim_path = _Below("keeper.json")
    """Identity of the shim process."""
    end_path = _Below("end.json")
    """The last stored snapshot of an ended run, for the case that its history is damaged."""
    restarts_path = _Below("restarts.json")
    """Automatic restarts since a user last started the run (``lifecycle/restart_policy.py``)."""
    requests_path = _Below("orders.json")
    """Requests that are still to be carried out (``training/supervise/stops.py``)."""
    environment_path = _Below("engine/environment.json")
    """Environment for the start of a run that waits for GPUs or in the run queue; removed when it
    has started."""
    queued_path = _Below("queued.json")
    """Entry of the run queue; it exists until the run is started (``store/queue_files.py``)."""
    queued_spec_path = _Below("queued-spec.yaml")
    """The changed specification of a queued resume."""
    mirror_lock_path = _Below("mirror.lock")
    """Locked by the process that writes the event files of the run."""
    checkpoints_dir = _Below("checkpoints")
    code_dir = _Below("code")
    """What code each attempt was started with, and the copies of frozen code."""
    slurm_dir = _Below("slurm")
    """The folder of the record of SLURM jobs; it exists only if SLURM starts the run."""
    supervisor_log_path = _Below("logs/supervisor.log")
    shim_log_path = _Below("logs/keeper.log")

    def queue_dir(self, attempt: int) -> Path:
        return self.path / "queue" / str(attempt)

    def logs_dir(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def rank_log_path(self, attempt: int, rank: int) -> Path:
        return self.logs_dir(attempt) / f"rank-{rank:05d}.log"

    def engine_log_path(self, attempt: int) -> Path:
        return self.logs_dir(attempt) / "engine.log"

    def engine_start_path(self, attempt: int) -> Path:
        """Command, environment and directory that the shim starts the engine with."""
        return self.path / "engine" / f"{attempt}.start.json"

    def secret_digests_path(self, attempt: int) -> Path:
        """By it the secrets of the environment of an attempt are found in texts: ``redaction``."""
        return self.path / "engine" / f"{attempt}.secrets.json"

    def recorded_environment_path(self, attempt: int) -> Path:
        """The environment that an attempt was started in: ``recorded_environment``."""
        return self.path / "engine" / f"{attempt}.environment.json"

    def engine_exit_path(self, attempt: int) -> Path:
        return self.path / "engine" / f"{attempt}.json"

    def engine_final_path(self, attempt: int) -> Path:
        """Exists once the attempt's final state is stored; the shim may then exit."""
        return self.path / "engine" / f"{attempt}.final"

    def config_path(self, attempt: int) -> Path:
        """Configuration for the ranks of a preset."""
        return self.path / "engine" / f"{attempt}.config.json"

    def bound_socket_path(self) -> Path:
        """Return the path that the supervisor binds: ``socket_path``, or a short path if needed."""
        if len(os.fsencode(self.socket_path)) <= _SOCKET_PATH_BYTES:
            return self.socket_path
        return private_runtime_dir() / self._linked_name

    def remove_stale_socket(self) -> None:
        """Remove the socket of a killed supervisor to which ``socket_path`` links.

        The link in a copied directory leads to the socket of another run, which stays.
        """
        # An error means that there is no link or socket, or that the folder is another user's.
        with contextlib.suppress(OSError):
            target = self.path / os.readlink(self.socket_path)
            if target.name == self._linked_name and stat.S_ISSOCK(target.lstat().st_mode):
                target.unlink()

    @property
    def _linked_name(self) -> str:
        # A copy of the directory may have the same id, in another home.
        return f"{self.id[-40:]}-{self.path.stat().st_ino:x}.sock"

    def read_spec(self) -> RunSpec:
        """Read ``spec.yaml``. Raise ``ProblemError`` if that is not possible."""
        # Imported here because the first screen of the dashboard needs no YAML.
        from ltui.training.store.spec_file import read_spec_file

        return read_spec_file(self.spec_path)

    def write_spec(self, spec: RunSpec) -> None:
        """Write ``spec.yaml`` atomically with mode 0600."""
        from ltui.training.store.spec_file import spec_text

        write_atomically(self.spec_path, spec_text(spec).encode("utf-8"))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary file (mode 0600) and rename it to ``path``."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object atomically with mode 0600."""
    write_atomically(path, json.dumps(dict(document)).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or holds none."""
    try:
        document = parse_json(read_regular(path, MOST_JSON_BYTES))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def open_private_log(path: Path) -> BinaryIO:
    """Open a log for appending, with mode 0600 independent of the umask.

    A log that is also that of another directory, by a hard link, is copied first.
    """
    separate(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def paths_in(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if it cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


_LEFTOVER_S = 3600.0
"""Age of a folder that was never finished, after which it is removed."""


def remove_leftovers(folder: Path) -> None:
    """Remove what commands that were killed have left in a folder of runs or sweeps."""
    for leftover in folder.glob(".new-*"):
        # Another command may remove it at the same time.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(leftover, ignore_errors=True)


def is_own(path: str) -> bool:
    """Return True if the file belongs to this user."""
    return os.stat(path).st_uid == os.getuid()


def is_hard_linked(path: Path) -> bool:
    """Return True if another directory has the file, too, as after ``cp -al``."""
    try:
        return path.stat().st_nlink > 1
    except OSError:
        return False


def separate(path: Path) -> None:
    """Replace a file that is hard-linked in another directory by a copy of it."""
    if is_hard_linked(path):
        part = path.with_name(f".{path.name}.part")
        shutil.copy2(path, part)
        os.replace(part, path)


def remove_links(folder: Path) -> None:
    """Remove the symbolic links in a folder. In a run directory that somebody else gave, a log may
    be a link to any file of this user."""
    for path in paths_in(folder):
        if path.is_symlink():
            path.unlink()


def private_runtime_dir() -> Path:
    """Return a folder on the local disk that only this user can read; create it if absent.

    Raise ``ProblemError`` if somebody else has it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` the variable may still name the folder of another user.
    if runtime and os.access(runtime, os.W_OK | os.X_OK) and is_own(runtime):
        directory = Path(runtime) / "ltui"
    else:
        directory = Path(tempfile.gettempdir()) / f"ltui-{os.getuid()}"
    return private_folder(directory, "Remove it, or set LTUI_HOME to a shorter path.")


def list_runs(home: Path) -> list[RunDir]:
    """Return all runs in ``home``, the one that was launched or resumed last first."""
    runs: list[tuple[float, RunDir]] = []
    try:
        entries = list(os.scandir(home / "runs"))
    except OSError:
        return []
    for entry in entries:
        # A name that would steer the terminal is listed as damaged, and no command takes it.
        if entry.name.startswith(".") or not entry.name.isprintable():
            continue
        try:
            changed = os.stat(os.path.join(entry.path, "spec.yaml")).st_mtime
        except OSError:
            continue
        runs.append((changed, RunDir(Path(entry.path))))
    return [run for _, run in sorted(runs, key=lambda pair: (-pair[0], pair[1].id))]


def has_runs(home: Path) -> bool:
    """Return whether there is any run, also one that cannot be read."""
    try:
        with os.scandir(home / "runs") as entries:
            return any(
                not entry.name.startswith(".") and os.path.exists(f"{entry.path}/spec.yaml")
                for entry in entries
            )
    except OSError:
        return False


def new_run_id(home: Path, name: str | None, where: str = "--name") -> tuple[str, str]:
    """Return an unused id and the name in it; without a name, two random words are the name.

    Characters that an id cannot have are replaced in it: `first try` is `first-try`; if none are
    left, there are random words. The caller stores the name itself as a label (``given_name``).
    Raise ``ProblemError``, which names ``where``, for an empty name and for `last`.
    """
    # Imported here because it loads hashing libraries that the dashboard does not need.
    import secrets

    in_id = None if name is None else _name_in_id(name)
    if name is not None and (not name.strip() or name == "last"):
        raise ProblemError.of(
            where=where,
            what=f"{name!r} cannot name a run.",
            remedy="Use any other name; `last` is the run that was launched last.",
        )
    while True:
        chosen = in_id or f"{secrets.choice(_ADJECTIVES)}-{secrets.choice(_NOUNS)}"
        run_id = f"{chosen}-{secrets.token_hex(2)}"
        binned = any((home / "bin").glob(f"*-{run_id}"))
        if not (home / "runs" / run_id).exists() and not binned:
            return run_id, chosen


def _name_in_id(name: str) -> str:
    """Return a name with only letters, digits, dots, dashes and underscores; perhaps empty."""
    # Imported here because only a new run needs it.
    import unicodedata

    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain)[:40].strip("-.")


def given_name(name: str | None) -> str:
    """Return a name that is to be stored as a label, because the id has another one; else an empty
    text."""
    return "" if name is None or _NAME.fullmatch(name) else name


_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, on every file system."""


def disk_use(folder: Path) -> int:
    """Return the bytes that a folder occupies on its disk.

    A file with several names in the folder counts once, and links are not followed. What cannot be
    read, or disappears meanwhile, counts as nothing.
    """
    total, seen, folders = 0, set(), [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * _BLOCK_BYTES
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
        except OSError:
            continue
    return total


def make_private_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700. Raises ``OSError``.

    A folder that exists stays as it is.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folders(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def private_folder(folder: Path, remedy: str = "Remove it, or set TMPDIR.") -> Path:
    """Return a folder of ltui's own that only this user can read; create it if absent.

    A folder of this user that is open to others is closed: older versions left such folders.
    Raise ``ProblemError`` with ``remedy`` if somebody else has it, or if it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise _unusable(folder, "it is a link", remedy)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid():
                raise _unusable(folder, "it belongs to another user", remedy)
            if status.st_mode & 0o022 and _has_files_of_others(descriptor):
                raise _unusable(folder, "another user has put files into it", remedy)
            if status.st_mode & 0o077:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~0o077)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error), remedy) from error
    return folder


def _has_files_of_others(descriptor: int) -> bool:
    with os.scandir(descriptor) as entries:
        return any(entry.stat(follow_symlinks=False).st_uid != os.getuid() for entry in entries)


def _unusable(folder: Path, reason: str, remedy: str) -> ProblemError:
    return ProblemError.of(
        where=str(folder), what=f"this folder cannot be used: {reason}.", remedy=remedy
    )
