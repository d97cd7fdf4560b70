"""Directories of runs, and the texts that name a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.config.run_spec import CheckpointPolicy, RunSpec
from ltui.training.problem import ProblemError
from ltui.training.store.find_run import find_run
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir, given_name, list_runs, ltui_home, new_run_id


def _run(home: Path, run_id: str, changed: float = 0.0) -> RunDir:
    run = RunDir(home / "runs" / run_id)
    run.path.mkdir(parents=True)
    run.spec_path.write_text("version: 1\n")
    os.utime(run.spec_path, (changed, changed))
    return run


def test_the_home_is_made_for_its_user_alone(private_home: Path) -> None:
    assert ltui_home() == private_home
    assert private_home.stat().st_mode & 0o777 == 0o700


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


def test_a_name_without_letters_for_an_id_gets_random_words(tmp_path: Path) -> None:
    run_id, chosen = new_run_id(tmp_path, "日本")
    assert run_id.startswith(f"{chosen}-")
    assert "-" in chosen
    assert given_name("日本") == "日本"


def test_an_ambiguous_name_lists_the_runs_or_counts_the_others(tmp_path: Path) -> None:
    for number in range(14):
        folder = tmp_path / "runs" / f"lr0-{number:04}"
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text("")
        os.utime(folder / "spec.yaml", (number, number))
    with pytest.raises(ProblemError, match=r"lr0-0002.* and 2 more") as caught:
        find_run(tmp_path, "lr0")
    assert str(caught.value).count("lr0-00") == 12


def test_a_run_is_found_by_the_name_that_it_was_given(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / "runs" / f"calm-fox-{number:04}"
        folder.mkdir(parents=True)
        (folder / "spec.yaml").write_text("")
    run = RunDir(tmp_path / "runs" / "calm-fox-0001")
    change_labels(run, lambda labels: replace(labels, name="Größe 2 (best)"))
    assert find_run(tmp_path, "größe 2 (best)") == run


def test_ids_hold_the_name_and_differ(tmp_path: Path) -> None:
    ids = {new_run_id(tmp_path, "mine")[0] for _ in range(20)}
    assert len(ids) > 15
    assert all(run_id[:-5] == "mine" for run_id in ids)
    run_id, name = new_run_id(tmp_path, None)
    assert run_id.startswith(f"{name}-")


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
