"""Which code is kept with a run, and that it is kept completely or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.lifecycle import freeze_code as freezer
from ltui.training.lifecycle.freeze_code import freeze_code
from ltui.training.lifecycle.launch_run import create_run_directory, launch
from ltui.training.problem import ProblemError
from ltui.training.store.code_record import read_record
from ltui.training.store.frozen_code import FrozenCode, frozen_folder, read_frozen
from ltui.training.store.run_directory import RunDir
from tests.lifecycle.test_record_code import git
from tests.required import required
from tests.small_disk import mount_small_disk, unmount

SECRET = "ghp_" + "a1B2" * 9


def write(folder: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def home(private_home: Path) -> Path:
    (private_home / "runs").mkdir(parents=True, exist_ok=True)
    return private_home


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    write(folder, "train.py", text="print(1)\n")
    write(folder, "pkg/__init__.py", "pkg/conf.yaml", "data.csv")
    (folder / ".gitignore").write_text("*.bin\n.env\nbuild/\n_version.py\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def spec_of(cwd: Path, *command: str) -> RunSpec:
    return RunSpec(
        id="owl-0001", name="owl", created_at=time.time(), cwd=str(cwd), python=sys.executable,
        command=command or (sys.executable, "train.py"), nproc=0, freeze=True,
    )  # fmt: skip


def frozen(home: Path, spec: RunSpec) -> tuple[Path, FrozenCode]:
    run = RunDir(home / "runs" / spec.id)
    create_run_directory(run, spec)
    return frozen_folder(run, 1), required(read_frozen(run, 1))


def test_a_copy_has_what_git_tracks_and_new_code(project: Path, home: Path) -> None:
    write(project, "train.py", text="print(2)\n")
    write(project, "new/model.py", "_version.py", "notes.txt", "build/lib.so", "weights.bin")
    (project / "data.csv").unlink()
    (project / "inner.py").symlink_to("pkg/__init__.py")
    folder, copy = frozen(home, spec_of(project))
    assert " ".join(copy.files) == (
        ".gitignore inner.py new/model.py pkg/__init__.py pkg/conf.yaml train.py"
    )
    assert (folder / "train.py").read_text() == "print(2)\n", "also what is not committed"
    assert not (folder / "inner.py").is_symlink()
    assert sorted(copy.linked) == ["_version.py", "build", "notes.txt", "weights.bin"]
    assert (folder / "build" / "lib.so").resolve() == project / "build" / "lib.so"
    assert (copy.root, copy.note, copy.left_out) == (str(project), None, ())
    for path in (folder, folder / "pkg"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (folder / "train.py").stat().st_mode & 0o777 == 0o600
    run = RunDir(home / "runs" / "owl-0001")
    assert required(read_record(run, 1)).commit == git(project, "rev-parse", "HEAD")


def test_no_secret_and_no_link_that_leads_out(project: Path, home: Path, tmp_path: Path) -> None:
    (project / ".env").write_text(f"TOKEN={SECRET}\n")
    write(project, "id.pem", "conf/credentials.json")
    write(project, "keys.py", text=f"KEY = '{SECRET}'\n")
    write(tmp_path, "outside.py", text=f"# {SECRET}\n")
    (project / "out.py").symlink_to(tmp_path / "outside.py")
    (project / "datasets").symlink_to(tmp_path)
    (project / "link.py").symlink_to(".env")
    (project / "wide.yaml").write_text(f"x: {SECRET}\n", "utf-16")
    git(project, "add", "-Af", "id.pem", "out.py", "link.py")
    folder, copy = frozen(home, spec_of(project))
    secret = {".env", "id.pem", "keys.py", "conf/credentials.json", "link.py", "wide.yaml"}
    assert {name.rpartition(" (may")[0] for name in copy.left_out} >= secret
    assert "out.py (a link that leads out of the folder)" in copy.left_out
    assert "datasets (a link that leads out of the folder)" in copy.left_out
    found = [path for path in folder.rglob("*") if path.is_file()]
    kept = [path.read_bytes().replace(b"\0", b"") for path in found]
    assert not any(SECRET.encode() in content for content in kept)
    assert not any((folder / name).is_symlink() for name in (*secret, "out.py", "datasets"))


def test_names_that_cannot_be_shown_are_left_out(project: Path, home: Path) -> None:
    names = (b"a\n.py", b"b\x1b.py", b"c\xff.py")
    for name in names:
        (project / os.fsdecode(name)).write_text("")
    git(project, "add", "-A")
    folder, copy = frozen(home, spec_of(project))
    escaped = (r"a\n.py", r"b\x1b.py", r"c\udcff.py")
    assert copy.left_out == tuple(f"{n} (has a name that cannot be shown)" for n in escaped)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitignore",
        "data.csv",
        "pkg",
        "train.py",
    ]


def test_outside_of_a_repository_the_files_beside_the_script(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write(folder, "train.py", "utils/a.py", "utils/deep/b.py", "c.yaml", "data/x.csv", "d.npy")
    write(folder, "venv2/lib.py", "venv2/pyvenv.cfg")
    _, copy = frozen(home, spec_of(tmp_path, sys.executable, "plain/train.py"))
    assert copy.files == ("c.yaml", "train.py", "utils/a.py", "utils/deep/b.py")
    assert copy.linked == ("d.npy", "data")
    assert copy.note == f"{folder} is in no git repository"


def test_a_script_that_git_ignores_is_kept_with_its_folder(project: Path, home: Path) -> None:
    write(project, "build/try.py", "build/help.py")
    _, copy = frozen(home, spec_of(project, sys.executable, "build/try.py"))
    assert (copy.root, copy.files) == (str(project / "build"), ("help.py", "try.py"))


def test_bounds(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data over the bound is only linked to; too much code is an error."""
    monkeypatch.setattr(freezer, "MOST_FILE_BYTES", 100)
    write(project, "large.csv", text="1" * 101)
    write(project, "small.csv", text="1" * 99)
    git(project, "add", "-A")
    folder, copy = frozen(home, spec_of(project))
    assert ("small.csv" in copy.files, copy.linked) == (True, ("large.csv",))
    assert (folder / "large.csv").resolve() == project / "large.csv"
    monkeypatch.setattr(freezer, "MOST_FILES", 2)
    nowhere = home / "other"
    (nowhere / "runs").mkdir(parents=True)
    with pytest.raises(ProblemError, match="3 files of code, and at most 2 files"):
        launch(spec_of(project), nowhere)
    assert list((nowhere / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"), [(f"key = '{SECRET}'\n", "may hold a secret"), ("#" * 200, "more than")]
)
def test_a_script_that_cannot_be_kept_is_refused(
    text: str, said: str, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freezer, "MOST_FILE_BYTES", 100)
    write(project, "train.py", text=text)
    with pytest.raises(ProblemError, match=said):
        launch(spec_of(project), home)
    assert list((home / "runs").iterdir()) == []


def test_runs_in_the_repository_are_not_part_of_a_copy(project: Path) -> None:
    home = project / "home"
    (home / "runs" / "other-0002").mkdir(parents=True)
    write(home / "runs" / "other-0002", "spec.yaml")
    folder, copy = frozen(home, spec_of(project))
    assert not any("home" in name for name in (*copy.files, *copy.linked))
    assert not (folder / "home").exists()


def test_several_machines_are_refused(project: Path, home: Path) -> None:
    nodes = Nodes(count=2, rank=0, address="127.0.0.1", port=29500)
    with pytest.raises(ProblemError, match="several machines cannot be frozen"):
        launch(spec_of(project).with_changes(nodes=nodes), home)
    assert list((home / "runs").iterdir()) == []


_FREEZE = """
import sys, time
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle import freeze_code
from ltui.training.lifecycle.launch_run import create_run_directory
from ltui.training.store.run_directory import RunDir
from pathlib import Path
cwd, run, write = sys.argv[1], RunDir(Path(sys.argv[2])), freeze_code._write
def slow(*arguments):
    write(*arguments)
    print("one", flush=True)
    time.sleep(100)
freeze_code._write = slow
create_run_directory(run, RunSpec(
    id=run.id, name="x", created_at=0.0, cwd=cwd, python="", command=("python", "train.py"),
    freeze=True))
"""


def test_a_killed_freeze_leaves_no_run(
    project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one removes what it left, also of a resume."""
    run = RunDir(home / "runs" / "owl-0009")
    with subprocess.Popen(
        [sys.executable, "-c", _FREEZE, str(project), str(run.path)], stdout=subprocess.PIPE
    ) as process:
        assert required(process.stdout).readline() == b"one\n"
        process.send_signal(signal.SIGKILL)
    (left,) = (home / "runs").iterdir()
    assert left.name == ".new-owl-0009"
    os.utime(left, (0, 0))
    frozen(home, spec_of(project))
    assert [path.name for path in (home / "runs").iterdir()] == ["owl-0001"]
    done = RunDir(home / "runs" / "owl-0001")
    (done.path / "code" / ".new-2").mkdir()
    freeze_code(done, spec_of(project), 3)
    assert not (done.path / "code" / ".new-2").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_leaves_no_run(
    project: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    disk = tmp_path / "disk"
    mount_small_disk(disk, 2)
    request.addfinalizer(lambda: unmount(disk))
    (disk / "runs").mkdir()
    write(project, "large.py", text="#" * (3 << 20))
    with pytest.raises(ProblemError, match="No space left"):
        launch(spec_of(project), disk)
    assert list((disk / "runs").iterdir()) == []
    assert not read_frozen(RunDir(disk / "runs" / "owl-0001"), 1)
