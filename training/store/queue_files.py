"""The files of the run queue: ``queued.json`` in the directory of each queued run, and the folder
``run-queue`` of the home with the lock, the dispatcher's lock and log, and what it published last.

Every change of an entry is made under the queue's lock, which is held for the change only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.shared.file_lock import file_lock
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.run_queue import STOPPED, QueueEntry, QueuePlace
from ltui.training.store.run_directory import RunDir, make_private_folders, read_json, write_json

_MOST_BYTES = 1 << 16
"""Maximum size of an entry."""
COPIED = "its directory is a copy, or that of another user"
"""Why an entry does not wait that was not made for its directory."""


class QueuedRuns(Struct, frozen=True, kw_only=True):
    """All entries of a home."""

    entries: dict[str, QueueEntry]
    damaged: dict[str, str]
    """Why an entry cannot be read, by the id of its run."""


def queue_folder(home: Path) -> Path:
    """Return the folder of the run queue in ``home``. Creates nothing."""
    return home / "run-queue"


def dispatcher_lock(home: Path) -> Path:
    """Return the file that names the process which starts the queued runs of this machine."""
    return queue_folder(home) / f"dispatcher-{os.uname().nodename}.lock"


@contextlib.contextmanager
def queue_lock(home: Path) -> Iterator[None]:
    """Hold the queue's lock. Raise ``ProblemError`` if the home cannot be written."""
    folder = queue_folder(home)
    try:
        make_private_folders(folder)
        with file_lock(folder / "lock"):
            yield
    except OSError as error:
        raise ProblemError.of(
            where=str(folder),
            what=f"the run queue cannot be changed ({error.strerror or error}).",
            remedy="Check the owner of the folder and the space on its disk.",
        ) from error


def read_entry(run_dir: RunDir) -> QueueEntry | None:
    """Return the entry of a run; None if it is not queued. Raise ``ProblemError`` if it is
    damaged.

    That of a directory which was copied, or which another user gave, does not wait: nothing of what
    somebody else's run contains starts by itself.
    """
    try:
        entry = from_json(QueueEntry, parse_json(read_regular(run_dir.queued_path, _MOST_BYTES)))
        own = run_dir.queued_path.stat().st_uid == os.getuid()
        if entry.ended is None and not (own and entry.inode == run_dir.path.stat().st_ino):
            return replace(entry, ended=STOPPED, starting=None, reason=COPIED)
        return entry
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ProblemError.of(
            where=str(run_dir.queued_path),
            what=f"the entry of the run queue is damaged ({error}).",
            remedy=f"ltui queue remove {run_dir.id}",
        ) from error


def write_entry(run_dir: RunDir, entry: QueueEntry) -> None:
    """Write the entry of a run. The caller holds the queue's lock."""
    own = replace(entry, inode=run_dir.path.stat().st_ino)
    write_json(run_dir.queued_path, to_json(own))


def read_queue(home: Path) -> QueuedRuns:
    """Return all entries. It looks for a file in every run directory."""
    queue = QueuedRuns(entries={}, damaged={})
    try:
        names = os.listdir(home / "runs")
    except OSError:
        return queue
    for name in names:
        run_dir = RunDir(home / "runs" / name)
        if name.startswith(".") or not name.isprintable():
            continue
        if not os.path.lexists(f"{home}/runs/{name}/queued.json"):
            continue
        try:
            entry = read_entry(run_dir)
        except ProblemError as error:
            queue.damaged[name] = error.problems[0].what
        else:
            if entry is not None:
                queue.entries[name] = entry
    return queue


def change_entry(run_dir: RunDir, change: Callable[[QueueEntry], QueueEntry]) -> None:
    """Replace the entry of a run by ``change(entry)``.

    A start that was decided and not begun is decided anew. Raise ``ProblemError`` if the run is not
    queued, or if it is being started.
    """
    with queue_lock(run_dir.home):
        entry = read_entry(run_dir)
        check_changeable(run_dir, entry)
        assert entry is not None
        changed = change(replace(entry, starting=None))
        if changed != entry:
            write_entry(run_dir, changed)


def check_changeable(run_dir: RunDir, entry: QueueEntry | None) -> None:
    """Raise ``ProblemError`` if there is no entry, or if its run is being started."""
    if entry is None:
        raise ProblemError.of(
            where=run_dir.id,
            what="the run is not in the run queue.",
            remedy="`ltui queue` lists what is.",
        )
    begun = was_started(run_dir, entry) or lock_holder(run_dir.lock_path) is not None
    if entry.starting is not None and entry.ended is None and begun:
        raise ProblemError.of(
            where=run_dir.id,
            what="the run is just being started.",
            remedy=f"`ltui stop {run_dir.id}` stops it.",
        )


def remove_entry(run_dir: RunDir) -> None:
    """Take a run out of the run queue without a trace in its directory."""
    run_dir.queued_spec_path.unlink(missing_ok=True)
    run_dir.queued_path.unlink(missing_ok=True)


def may_start_here(entry: QueueEntry) -> bool:
    """Return True if the dispatcher of this machine has to watch an entry."""
    return entry.ended is None and not entry.held and entry.host == os.uname().nodename


def was_started(run_dir: RunDir, entry: QueueEntry) -> bool:
    """Return True if the engine of the attempt that the entry asks for was started.

    The shim writes its file as soon as it has started the engine; until then, both die with the
    supervisor.
    """
    attempt = entry.starting
    if attempt is None:
        return False
    last = (read_json(run_dir.shim_path) or {}).get("attempt")
    begun = isinstance(last, int) and last >= attempt
    return begun or run_dir.engine_exit_path(attempt).exists()


def check_asked(run_dir: RunDir, attempt: int) -> None:
    """Raise ``ProblemError`` if the run queue has started this attempt already, or not yet.

    The caller has the lock of the run.
    """
    entry = read_entry(run_dir)
    asked = entry is not None and entry.ended is None and entry.starting == attempt
    if entry is None or not asked or was_started(run_dir, entry):
        raise ProblemError.of(where=run_dir.id, what="the run queue does not start it any more.")


def _published_path(home: Path) -> Path:
    return queue_folder(home) / f"order-{os.uname().nodename}.json"


def publish(home: Path, places: list[QueuePlace]) -> None:
    """Store what each entry waits for, for everybody who shows it."""
    write_json(_published_path(home), {place.run: to_json(place) for place in places})


def published(home: Path) -> dict[str, QueuePlace]:
    """Return what the dispatcher published last, by the id of the run; it may be old."""
    try:
        return from_json(dict[str, QueuePlace], read_json(_published_path(home)) or {})
    except ValueError:
        return {}


def dispatcher_runs(home: Path) -> bool:
    """Return True if a process starts the queued runs of this machine."""
    return lock_holder(dispatcher_lock(home)) is not None
