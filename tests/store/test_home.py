"""Folders that only their owner can read, directories of runs, and the texts that name a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.slurm.job_process import local_home
from ltui.training.config.run_spec import CheckpointPolicy, RunSpec
from ltui.training.problem import ProblemError
from ltui.training.store.find_run import find_run
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import (
    RunDir,
    given_name,
    list_runs,
    ltui_home,
    new_run_id,
    private_folder,
    private_runtime_dir,
)


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
    home = tmp_path / "new" / "home"
    monkeypatch.setenv("LTUI_HOME", str(home))
    assert ltui_home() == home
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


def _run(home: Path, run_id: str, changed: float = 0.0) -> RunDir:
    run = RunDir(home / "runs" / run_id)
    run.path.mkdir(parents=True)
    run.spec_path.write_text("version: 1\n")
    os.utime(run.spec_path, (changed, changed))
    return run


def test_a_home_that_cannot_be_made_names_the_variable(private_home: Path) -> None:
    private_home.write_text("a file")
    with pytest.raises(ProblemError, match=r"^LTUI_HOME: .* cannot be written") as caught:
        ltui_home()
    assert caught.value.problems[0].remedy


def test_runs_are_listed_latest_first_and_half_made_ones_are_none(tmp_path: Path) -> None:
    _run(tmp_path, "old-pine-0001", 100.0)
    _run(tmp_path, "brave-owl-0002", 300.0)
    _run(tmp_path, ".new-calm-fox-0003", 400.0)
    (tmp_path / "runs" / "empty-0004").mkdir()
    assert [run.id for run in list_runs(tmp_path)] == ["brave-owl-0002", "old-pine-0001"]
    assert find_run(tmp_path, "last").id == "brave-owl-0002"


def test_a_run_is_found_by_id_name_and_prefix(tmp_path: Path) -> None:
    _run(tmp_path, "brave-owl-0002")
    _run(tmp_path, "brave-owlet-0003")
    for text in ("brave-owl-0002", "brave-owl", "brave-owl-0"):
        assert find_run(tmp_path, text).id == "brave-owl-0002"
    with pytest.raises(ProblemError, match="several runs match: brave-owl"):
        find_run(tmp_path, "brave")
    with pytest.raises(ProblemError, match="Did you mean brave-owl-0002"):
        find_run(tmp_path, "brave-owl-0009")
    with pytest.raises(ProblemError, match="no such run"):
        find_run(tmp_path, "")


@pytest.mark.parametrize("name", ["last", "", " "])
def test_what_names_another_run_or_nothing_cannot_name_a_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProblemError, match="cannot name a run"):
        new_run_id(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "in_id", "given"),
    [
        ("brave-owl", "brave-owl", ""),
        ("plain ddp", "plain-ddp", "plain ddp"),
        ("Ünterlauf #2", "Unterlauf-2", "Ünterlauf #2"),
        ("../../etc", "etc", "../../etc"),
        ("a\x1b[31m", "a-31m", "a\x1b[31m"),
        ("x" * 41, "x" * 40, "x" * 41),
    ],
)
def test_any_name_is_in_the_id_as_far_as_a_directory_allows(
    tmp_path: Path, name: str, in_id: str, given: str
) -> None:
    run_id, chosen = new_run_id(tmp_path, name)
    assert (chosen, run_id[:-5]) == (in_id, in_id)
    assert given_name(name) == given


def test_a_run_without_a_name_with_letters_for_an_id_gets_random_words(tmp_path: Path) -> None:
    for name in ("日本", None):
        run_id, chosen = new_run_id(tmp_path, name)
        assert run_id.startswith(f"{chosen}-")
        assert "-" in chosen
    assert given_name("日本") == "日本"


def test_an_ambiguous_name_lists_the_runs_or_counts_the_others(tmp_path: Path) -> None:
    for number in range(14):
        _run(tmp_path, f"lr0-{number:04}", number)
    with pytest.raises(ProblemError, match=r"lr0-0002.* and 2 more") as caught:
        find_run(tmp_path, "lr0")
    assert str(caught.value).count("lr0-00") == 12


def test_a_run_is_found_by_the_name_that_it_was_given(tmp_path: Path) -> None:
    _, run = (_run(tmp_path, f"calm-fox-{number:04}") for number in range(2))
    change_labels(run, lambda labels: replace(labels, name="Größe 2 (best)"))
    assert find_run(tmp_path, "größe 2 (best)") == run


def test_ids_hold_the_name_and_differ(tmp_path: Path) -> None:
    ids = {new_run_id(tmp_path, "mine")[0] for _ in range(20)}
    assert len(ids) > 15
    assert all(run_id[:-5] == "mine" for run_id in ids)


def test_a_specification_survives_the_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "brave-owl-0002")
    run.path.mkdir(parents=True)
    spec = RunSpec(
        id=run.id, name="brave-owl", created_at=1.5, cwd="/", python="/usr/bin/python3",
        config={"trainer": {"max_epochs": 3, "callbacks": ["a: b", "ünï"]}}, tags=("x",),
        checkpoint=CheckpointPolicy(every_s=0.0, keep=9), env={"A": "1"},
    )  # fmt: skip
    run.write_spec(spec)
    assert run.read_spec() == spec
    assert run.spec_path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in run.path.iterdir()] == ["spec.yaml"]


@pytest.mark.parametrize("text", ["", "[1", "version: x", "version: 1\nid: 3", "\x00", "- a"])
def test_a_damaged_specification_is_a_problem(tmp_path: Path, text: str) -> None:
    run = _run(tmp_path, "brave-owl-0002")
    run.spec_path.write_text(text)
    with pytest.raises(ProblemError, match=r"spec\.yaml"):
        run.read_spec()
    run.spec_path.write_text("version: 99\n")
    with pytest.raises(ProblemError, match="newer ltui"):
        run.read_spec()
