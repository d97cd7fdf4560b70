"""Folders that only their owner can read, whatever the umask and whoever was there before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.app.slurm.job_process import local_home
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import ltui_home, private_folder, private_runtime_dir


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(*folders: Path) -> list[str]:
    return [oct(folder.stat().st_mode & 0o777) for folder in folders]


@pytest.mark.usefixtures("umask")
def test_the_folders_of_a_job_are_private_in_an_empty_tmpdir(private_tmpdir: Path) -> None:
    for _ in range(2):
        home = local_home()
        assert home == private_tmpdir / f"ltui-{os.getuid()}"
        assert private_runtime_dir() == home
        assert modes(home, home / "runs") == ["0o700", "0o700"]


@pytest.mark.usefixtures("umask")
def test_every_folder_that_is_made_for_the_home_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTUI_HOME", str(tmp_path / "new" / "home"))
    home = ltui_home()
    assert modes(home.parent, home, home / "runs") == ["0o700"] * 3


def test_a_home_that_its_user_made_keeps_its_mode(private_home: Path) -> None:
    private_home.mkdir()
    private_home.chmod(0o755)
    ltui_home()
    assert modes(private_home, private_home / "runs") == ["0o755", "0o700"]


def test_a_folder_that_an_older_version_left_open_is_closed(private_tmpdir: Path) -> None:
    left = private_tmpdir / f"ltui-{os.getuid()}"
    (left / "runs").mkdir(parents=True)
    left.chmod(0o2775)
    assert local_home() == left
    assert modes(left) == ["0o700"]


def test_what_another_user_has_a_hand_in_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ProblemError, match="it is a link"):
        private_folder(link)
    (tmp_path / "file").touch()
    with pytest.raises(ProblemError, match="File exists"):
        private_folder(tmp_path / "file")
    if os.getuid() != 0:
        return
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(tempfile.mkdtemp(dir=folder), 1, 1)
    with pytest.raises(ProblemError, match=r"^[^\n]*another user has put files into it"):
        private_folder(folder)
    os.chown(folder, 1, 1)
    with pytest.raises(ProblemError, match=r"^[^\n]*it belongs to another user") as refused:
        private_folder(folder)
    assert len(refused.value.problems) == 1
    assert modes(folder) == ["0o777"]
