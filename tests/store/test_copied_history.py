"""A history on a local disk with a copy in the run directory, which other machines read."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ltui.training.problem import ProblemError
from ltui.training.store import history_place
from ltui.training.store.history_place import (
    history_file,
    left_histories,
    network_file_system,
    read_place,
    remove_unneeded_histories,
    what_is_missing,
)
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.open_history import CopiedHistory, copy_database, open_history
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.small_disk import fill, mount_small_disk, unmount
from tests.store.histories import begin, run_dir, snapshot, steps
from tests.waiting import wait_for


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine for histories."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(folder))
    monkeypatch.setenv("LTUI_HISTORY_COPY_S", "0.05")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    mount_small_disk(disk, 4)
    yield disk
    unmount(disk)


def _opened(run: RunDir, last_step: int = 0) -> CopiedHistory:
    """Open the history of a run. With ``last_step``: begin it, with the steps from 1 on."""
    store, _ = open_history(run)
    assert isinstance(store, CopiedHistory)
    if last_step:
        begin(store)
        store.commit(1, steps(1, last_step), snapshot())
    return store


def _folder(run: RunDir) -> Path:
    """Return the folder on the local disk in which the history is."""
    return required(required(read_place(run)).folder)


def _losses(run: RunDir) -> int:
    with RunStore(run) as store:
        return len(list(store.export(["train/loss"])))


def _copied(run: RunDir) -> int:
    """Return the number of steps in the copy, which must be a whole database by itself."""
    uri = f"{run.db_path.as_uri()}?immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as db:
        assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        return int(db.execute("SELECT count(*) FROM steps").fetchone()[0])


def _until_copied(run: RunDir, last_step: int) -> None:
    wait_for(lambda: run.db_path.exists() and _copied(run) == last_step)


def test_on_a_local_disk_nothing_is_copied(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store, missing = open_history(run)
    assert type(store) is StoreWriter
    assert missing is None
    assert history_file(run).path == run.db_path
    store.close()
    assert [path.name for path in run.path.iterdir()] == ["run.db"]


def test_readers_here_read_the_history_and_the_copy_follows(tmp_path: Path, local: Path) -> None:
    run = run_dir(tmp_path)
    store = _opened(run, 300)
    assert _losses(run) == 300, "a reader on this machine does not wait for a copy"
    _until_copied(run, 300)
    store.commit(1, steps(301, 500))
    folder = _folder(run)
    assert history_file(run).path == folder / "run.db"
    assert folder.is_relative_to(local)
    store.close()
    assert _copied(run) == 500
    assert not folder.exists()
    assert history_file(run) == history_place.HistoryFile(run.db_path, is_copy=True)
    assert _losses(run) == 500
    names = {path.name for path in run.path.iterdir()}
    assert names == {"run.db", "history.json"}, "a reader of the copy leaves no files"
    assert run.db_path.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(run.db_path)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_another_attempt_continues_from_the_copy(tmp_path: Path, local: Path) -> None:
    run = run_dir(tmp_path)
    for attempt in (1, 2, 3):
        store, missing = open_history(run)
        assert missing is None
        begin(store, attempt, 100 * (attempt - 1))
        store.commit(attempt, steps(100 * attempt - 99, 100 * attempt), snapshot())
        store.close()
    assert _losses(run) == 300
    assert list(left_histories()) == []


def test_a_killed_writer_is_continued_with_all_it_wrote(tmp_path: Path, local: Path) -> None:
    run = run_dir(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.store.histories import *; from ltui.training.store.open_history import *\n"
        "store, _ = open_history(RunDir(Path(sys.argv[1]))); begin(store)\n"
        "store.commit(1, steps(1, 400), snapshot()); os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, str(run.path), root], check=False)
    assert _losses(run) == 400
    store, missing = open_history(run)
    assert missing is None
    store.close()
    assert _copied(run) == 400


def test_another_machine_continues_from_the_copy_and_says_what_is_missing(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(tmp_path)
    dead = _opened(run, 200)
    _until_copied(run, 200)
    monkeypatch.setattr(dead, "_copy", lambda: False)  # the machine is as good as dead from here on
    dead.commit(1, steps(201, 300))
    old = _folder(run)
    hidden = local.rename(tmp_path / "gone")
    others = tmp_path / "others"
    others.mkdir()
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(others))
    assert _losses(run) == 200, "the copy is what is left"
    assert str(old) in required(what_is_missing(run))
    store, missing = open_history(run)
    assert "the part after" in required(missing)
    begin(store, 2)
    store.commit(2, steps(201, 250))
    hidden.rename(local)
    monkeypatch.undo()
    dead.close()
    assert required(read_place(run)).folder not in (old, None), "the first machine changes nothing"
    store.close()
    assert _copied(run) == 250
    assert (old / "run.db").exists(), "what was not copied is kept"


def test_a_full_run_directory_keeps_the_last_copy_and_says_so(
    local: Path, small_disk: Path
) -> None:
    run = run_dir(small_disk)
    store = _opened(run, 100)
    _until_copied(run, 100)
    ballast = fill(small_disk)
    store.commit(1, steps(101, 5000))
    note = required(wait_for(lambda: store.copy_note))
    assert note.startswith("not copied to the run directory since ")
    assert note.endswith("(disk full)")
    assert _copied(run) == 100
    assert _losses(run) == 5000
    store.close()
    assert _losses(run) == 5000, "it stays on this machine until it can be copied"
    assert not list(run.path.glob(".run.db*"))
    ballast.unlink()
    again = _opened(run)
    _until_copied(run, 5000)
    assert again.copy_note is None
    again.close()
    assert list(left_histories()) == []


def test_a_full_local_disk_fails_the_commit_and_nothing_else(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(small_disk))
    run = run_dir(tmp_path)
    store = _opened(run, 100)
    ballast = fill(small_disk)
    with pytest.raises(sqlite3.Error, match="full"):
        store.commit(1, steps(101, 20000))
    ballast.unlink()
    store.commit(1, steps(101, 200))
    store.close()
    assert _copied(run) == 200


def test_a_copy_that_is_killed_leaves_the_previous_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source.db", tmp_path / "target.db"
    writer = StoreWriter(source)
    begin(writer)
    writer.commit(1, steps(1, 30_000), snapshot())
    copy_database(source, target)
    code = (
        "import sys; from pathlib import Path\n"
        "from ltui.training.store.open_history import copy_database\n"
        "while True: copy_database(Path(sys.argv[1]), Path(sys.argv[2])); print('x', flush=True)\n"
    )
    parts = 0
    for attempt in range(12):
        argv = [sys.executable, "-c", code, str(source), str(target)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert required(process.stdout).readline() == b"x\n"
            time.sleep(0.003 * attempt)
            process.send_signal(signal.SIGKILL)
        parts += (tmp_path / ".target.db.part").exists()
        with closing(sqlite3.connect(f"{target.as_uri()}?immutable=1", uri=True)) as db:
            assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            assert db.execute("SELECT count(*) FROM steps").fetchone() == (30_000,)
        if parts == 3:
            break
    assert parts, "no kill came in the middle of a copy"
    copy_database(source, target)
    assert not (tmp_path / ".target.db.part").exists()
    writer.close()


def test_a_copy_is_of_one_moment(tmp_path: Path) -> None:
    """The rows and the cursor of one commit are both in a copy, or neither is."""
    source, target = tmp_path / "source.db", tmp_path / "target.db"
    writer = StoreWriter(source)
    begin(writer)
    writer.commit(1, steps(1, 30_000), snapshot())
    last = 30_000
    parts = 0

    def write_more() -> None:
        nonlocal last, parts
        parts += 1
        writer.commit(1, steps(last + 1, last + 50))
        last += 50

    copy_database(source, target, between_parts=write_more)
    assert parts > 1, "the copy has one part only"
    with closing(sqlite3.connect(target)) as db:
        rows = db.execute("SELECT count(*) FROM steps").fetchone()[0]
        assert rows == db.execute("SELECT next_seq - 1 FROM cursors").fetchone()[0] == 30_000
    writer.close()


def test_a_damaged_history_is_kept_and_the_copy_continued(tmp_path: Path, local: Path) -> None:
    run = run_dir(tmp_path)
    store = _opened(run, 300)
    _until_copied(run, 300)
    place = required(read_place(run))
    store.close()
    folder = required(place.folder)
    folder.mkdir(mode=0o700)
    (folder / "run_dir").write_text(str(run.path))
    (folder / "run.db").write_bytes(b"this is no database at all" * 100)
    history_place.write_place(run, folder)
    again, missing = open_history(run)
    assert "damaged and is kept as run.db.damaged-1" in required(missing)
    again.close()
    assert (run.path / "run.db.damaged-1").exists()
    assert _losses(run) == 300


def test_a_copied_run_directory_leaves_the_history_of_the_original(
    tmp_path: Path, local: Path
) -> None:
    run = run_dir(tmp_path)
    store = _opened(run, 200)
    _until_copied(run, 200)
    folder = _folder(run)
    copy = RunDir(run.path.with_name("copy-0001"))
    shutil.copytree(run.path, copy.path)
    assert _losses(copy) == 200
    resumed = _opened(copy)
    begin(resumed, 2)
    resumed.commit(2, steps(201, 250), snapshot())
    resumed.close()
    assert _copied(copy) == 250
    shutil.copy(run.history_place_path, copy.history_place_path)
    history_place.remove_history(copy)
    assert (folder / "run.db").exists()
    store.commit(1, steps(201, 300), snapshot())
    store.close()
    assert _copied(run) == 300


@pytest.mark.parametrize("through_link", [False, True])
def test_a_run_that_names_another_run_as_its_history_harms_it_not(
    tmp_path: Path, local: Path, through_link: bool
) -> None:
    victim, given = run_dir(tmp_path), RunDir(tmp_path / "given-0001")
    StoreWriter(victim.db_path).close()
    victim.path.chmod(0o700)
    given.path.mkdir()
    named = victim.path
    if through_link:
        named = tmp_path / f"ltui-{os.getuid()}" / "history" / victim.id
        named.parent.parent.mkdir()
        named.parent.symlink_to(victim.path.parent)
    history_place.write_place(given, named)
    assert history_file(given).path == given.db_path
    history_place.remove_history(given)
    assert victim.db_path.exists()


def test_the_history_returns_to_a_run_directory_on_a_local_disk(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(tmp_path)
    store = _opened(run, 100)
    monkeypatch.setattr(store, "_copy", lambda: False)
    store.close()
    assert required(read_place(run)).is_here
    monkeypatch.setenv("LTUI_HISTORY_DIR", "none")
    moved, missing = open_history(run)
    assert missing is None
    assert type(moved) is StoreWriter
    assert _losses(run) == 100
    moved.close()
    assert read_place(run) is None
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(local))
    assert list(left_histories()) == []


@pytest.mark.parametrize("state", ["current", "superseded", "deleted"])
def test_only_what_no_run_needs_is_removed(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    run = run_dir(tmp_path)
    store = _opened(run)
    monkeypatch.setattr(store, "_copy", lambda: False)
    store.close()
    folder = _folder(run)
    if state == "superseded":
        history_place.write_place(run, folder.with_name("another"))
    elif state == "deleted":
        shutil.rmtree(run.path)
    remove_unneeded_histories()
    assert folder.exists() == (state != "deleted")
    old = time.time() - 15 * 86400
    if folder.exists():
        os.utime(folder / "run.db", (old, old))
    remove_unneeded_histories()
    assert folder.exists() == (state == "current")


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTUI_HISTORY_DIR", str(tmp_path / "absent"))
    with pytest.raises(
        ProblemError, match=r"absent/.* cannot be used: No such .* Set LTUI_HISTORY_DIR"
    ):
        open_history(run_dir(tmp_path))


# Which folders are on a network file system, by the text of the kernel's list of mounts.

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/me/local rw - xfs /dev/sdb1 rw
32 21 0:50 / /scratch rw shared:9 master:1 - lustre 10.0.0.1@tcp:/fs rw,flock
33 21 0:51 / /with\\040space rw - cifs //server/share rw
34 21 0:52 / /object rw - fuse.juicefs JuiceFS:x rw
35 21 0:53 / /container rw - fuse.fuse-overlayfs fuse-overlayfs rw
36 21 0:54 / /hidden rw - nfs server:/a rw
37 36 0:55 / /hidden rw - tmpfs tmpfs rw
38 21 0:56 / /cloud rw - fuse some rw
broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/.local/share/ltui", "nfs4"),
        ("/home/me/local/ltui", None),
        ("/homework", None),
        ("/scratch/me", "lustre"),
        ("/with space/ltui", "cifs"),
        ("/object/a", "fuse.juicefs"),
        ("/container/a", None),
        ("/hidden/a", None),
        ("/cloud", "fuse"),
        ("/tmp", None),
    ],
)
def test_the_mount_nearest_above_counts(folder: str, kind: str | None) -> None:
    assert network_file_system(Path(folder), MOUNTS) == kind


def test_a_link_leads_to_the_file_system_of_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/scratch/me")
    assert network_file_system(link, MOUNTS) == "lustre"


def test_the_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    assert network_file_system(Path("/proc")) is None
    assert network_file_system(tmp_path, "") is None
