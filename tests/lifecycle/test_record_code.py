"""What is recorded about the code of a run, in real repositories."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltui.app.presentation.run_configuration import code_lines, short_code_lines
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle import record_code as recorder
from ltui.training.lifecycle.record_code import code_folder, record_code
from ltui.training.process.proc_files import entry_of
from ltui.training.store.code_record import (
    CodeRecord,
    diff_path,
    read_diff,
    read_record,
    read_records,
    record_path,
)
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.waiting import wait_for


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    done = subprocess.run(
        ["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("print(1)\n")
    (folder / ".gitignore").write_text("secrets.env\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def make_run(home: Path, run_id: str, cwd: Path, *command: str) -> tuple[RunDir, RunSpec]:
    argv = command or (sys.executable, "src/train.py")
    spec = RunSpec(
        id=run_id, name=run_id[:-5], created_at=time.time(), cwd=str(cwd), python=sys.executable,
        command=argv,
    )  # fmt: skip
    run = RunDir(home / "runs" / run_id)
    run.path.mkdir(parents=True)
    run.write_spec(spec)
    return run, spec


def recorded(run: RunDir, spec: RunSpec, attempt: int = 1) -> CodeRecord:
    record_code(run, spec, attempt)
    return required(read_record(run, attempt))


def test_commit_changes_packages_command_host_and_user(
    repository: Path, private_home: Path
) -> None:
    (repository / "src" / "train.py").write_text("print(2)\n")
    (repository / "secrets.env").write_text("TOKEN=hunter2\n")
    (repository / "notes.txt").write_text("hunter2\n")
    run, spec = make_run(private_home, "owl-0001", repository)
    record = recorded(run, spec)
    assert record.commit == git(repository, "rev-parse", "HEAD")
    assert (record.branch, record.repository) == ("trunk", str(repository))
    assert record.changed_files == ("src/train.py",)
    assert record.command == (sys.executable, "src/train.py")
    assert record.host
    assert record.user
    assert record.packages["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record.packages["torch"]
    diff = read_diff(run, 1)
    assert "-print(1)\n+print(2)\n" in diff
    assert "hunter2" not in diff + record_path(run, 1).read_text(), "only tracked files"
    for path in (record_path(run, 1), diff_path(run, 1)):
        assert path.stat().st_mode & 0o777 == 0o600
    text = "\n".join(code_lines([record], diff))
    assert "1 file changed, not committed:\n  src/train.py" in text
    assert "+print(2)" in text


def test_secrets_are_left_out_of_the_changes(repository: Path, private_home: Path) -> None:
    """Also if they are in lines that have not changed, or were removed."""
    token, key = "ghp_" + "a1B2" * 9, "-----BEGIN PRIVATE " + "KEY-----\n"
    (repository / ".gitattributes").write_text("* diff\n")  # no file is taken for a binary one
    files = {
        ".env": "A=hunter2\n",
        "conf/ä.env": "hunter2\n",
        "moved.env": "hunter2\n" * 9,
        "token.py": f"x = '{token}'\n",
        "key.py": f"{key}{'line' * 9}\n" * 9,
        "wide.py": "hunter2",
    }
    for name, text in files.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "all")
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "mv", "moved.env", "moved.py")
    (repository / ".env").write_text("A=hunter3\n")
    (repository / "conf/ä.env").unlink()
    (repository / "token.py").write_text("x = 1\n")
    (repository / "key.py").write_text(files["key.py"] + "hunter2\n")
    (repository / "wide.py").write_text(f"hunter2 {token}", "utf-16")
    (repository / "src" / "train.py").write_text("print(2)\n")
    run, spec = make_run(private_home, "owl-0001", repository)
    record, diff = recorded(run, spec), read_diff(run, 1)
    names = (".env", r"conf/\303\244.env", "key.py", "moved.env", "token.py", "wide.py")
    assert record.note == f"the changes of {', '.join(names)} may hold a secret, and are left out"
    assert diff.count("\n(may hold a secret, and is left out)\n") == len(names)
    assert (record.diff_complete, record.changed_count) == (False, 8)
    assert "+print(2)" in diff
    assert "hunter3" not in diff
    assert token not in diff
    assert diff.count("hunter2") == 9, "only under the new name"


def test_a_repetition_is_named_and_a_change_ends_it(repository: Path, private_home: Path) -> None:
    ids = ("first-0001", "again-0002", "other-0003", "thrice-0004")
    runs = [make_run(private_home, run_id, repository) for run_id in ids]
    assert recorded(*runs[0]).repeats is None
    again = recorded(*runs[1])
    assert again.repeats == "first-0001"
    assert short_code_lines([again])[-1] == "The same configuration and code as first-0001."
    train = repository / "src" / "train.py"
    train.write_text("print(3)\n")
    assert recorded(*runs[2]).repeats is None
    train.write_text("print(1)\n")
    assert recorded(*runs[3]).repeats == "first-0001", "the oldest one"
    run, spec = make_run(private_home, "arg-0005", repository, sys.executable, "src/train.py", "2")
    assert recorded(run, spec).repeats is None, "another configuration"


def test_an_attempt_with_other_code_is_told(repository: Path, private_home: Path) -> None:
    run, spec = make_run(private_home, "owl-0001", repository)
    recorded(run, spec)
    (repository / "src" / "train.py").write_text("print(2)\n")
    git(repository, "commit", "-qam", "second")
    record_code(run, spec, 2)
    lines = short_code_lines(read_records(run))
    assert "has changed since the first attempt" in lines[-1]


def test_the_folder_of_the_script_counts(repository: Path, tmp_path: Path) -> None:
    script = repository / "src" / "train.py"
    _, spec = make_run(tmp_path, "owl-0001", tmp_path, "torchrun", "--standalone", str(script))
    assert code_folder(spec) == repository / "src"
    _, spec = make_run(tmp_path, "owl-0002", repository, "python", "-m", "src.train")
    assert code_folder(spec) == repository


def test_changes_are_bounded(
    repository: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "DIFF_BYTES", 5000)
    (repository / "src" / "train.py").write_text("x = 1\n" * 100_000)
    record = recorded(*(pair := make_run(private_home, "owl-0001", repository)))
    assert 4990 < len(read_diff(pair[0], 1)) == record.diff_bytes <= 5000
    assert "longer than" in (record.note or "")
    assert (record.diff_complete, record.identity) == (False, None)
    assert record.commit


def _program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_git_that_hangs_is_given_up(
    repository: Path, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path / "bin", "git", "sleep 1000 & echo $! > $0.child; wait")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(recorder, "GIT_S", 0.5)
    record = recorded(*make_run(private_home, "owl-0001", repository))
    assert record.note == "git did not answer in time"
    assert record.commit is None
    assert record.packages, "the rest is recorded"
    child = int((tmp_path / "bin" / "git.child").read_text())
    # Its zombie waits for the first process of the machine.
    wait_for(lambda: (entry := entry_of(child)) is None or not entry.living, seconds=20)


def test_without_a_commit_without_a_repository_and_without_git(
    repository: Path, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, outside = tmp_path / "empty", tmp_path / "outside"
    empty.mkdir()
    git(empty, "init", "-q")
    record = recorded(*make_run(private_home, "owl-0000", empty))
    assert record.note == "the repository has no commit yet"
    assert record.repository == str(empty)
    outside.mkdir()
    record = recorded(*make_run(private_home, "owl-0001", outside))
    assert record.note == f"{outside} is in no git repository"
    assert short_code_lines([record]) == [record.note]
    monkeypatch.setenv("PATH", str(outside))
    record = recorded(*make_run(private_home, "owl-0002", repository))
    assert record.note == "git is not installed"


def test_the_repository_cannot_start_programs(
    repository: Path, private_home: Path, tmp_path: Path
) -> None:
    _program(tmp_path / "bin", "spy", f"touch {tmp_path}/ran; exit 1")
    for key in ("core.fsmonitor", "diff.external", "diff.spy.textconv"):
        git(repository, "config", key, str(tmp_path / "bin" / "spy"))
    (repository / ".gitattributes").write_text("*.py diff=spy\n")
    (repository / "src" / "train.py").write_text("print(2)\n")
    assert recorded(*make_run(private_home, "owl-0001", repository)).diff_complete
    assert not (tmp_path / "ran").exists()


def test_a_run_directory_that_is_gone_is_no_error(repository: Path, private_home: Path) -> None:
    run, spec = make_run(private_home, "owl-0001", repository)
    run.spec_path.unlink()
    run.path.rmdir()
    record_code(run, spec, 1)
    assert not run.path.exists()
