"""``ltui compare`` as a process: its table, its JSON and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ltui, ltui  # noqa: F401 - the fixture
from tests.compare.stored_runs import write_seeds


@pytest.fixture
def home(private_home: Path) -> Path:
    write_seeds(private_home)
    return private_home


def test_table_and_json_give_the_same_values(home: Path, ltui: Ltui) -> None:  # noqa: F811
    table = ltui("compare", "*-owl-*", "--metric", "val/acc", env={"COLUMNS": "80"})
    assert table.returncode == 0, table.stderr
    assert "val/acc (higher is better)" in table.stdout
    assert "lr=0.1: runs 1-3" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80
    done = ltui("compare", "*-owl-*", "--metric", "val/acc", "--json")
    document = json.loads(done.stdout)
    assert [run["name"] for run in document["runs"]][:2] == ["brave-owl", "calm-owl"]
    best = document["runs"][0]["metrics"]["val/acc"]["best"]
    assert f"{best['value']:.4f}" in table.stdout
    assert document["settings"]["model.lr"]["eager-owl-0003"] == "0.3"
    assert document["groups"][0]["metrics"]["val/acc"]["final"]["runs"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["brave-owl"], "RUN: only one run is given: brave-owl-0000."),
        (["brave-owl", "brave-owl"], "only one run is given"),
        (["brave-owl", "clam-owl"], "clam-owl: there is no such run. Did you mean calm-owl"),
        (["brave-owl", "calm-owl", "--metric", "val/ac"], "Did you mean `val/acc`?"),
        (["brave-owl", "calm-owl", "--group-by", "rl"], "--group-by rl: no run has such a setting"),
        (["brave-owl", "calm-owl", "--by", "epcoh"], "Did you mean `epoch`?"),
        (["brave-owl", "calm-owl", "--band", "sdt"], "Did you mean `std`?"),
        (["brave-owl", "calm-owl", "--group-by", "lr", "--ignore", "lr"], "cannot be used with"),
        ([], "RUN: no run is given."),
        (["--filter", "name:brave*"], "--filter: only one run is given: brave-owl-0000."),
        (["--filter", "not val/ac>2"], "--filter: no run has a field or a metric `val/ac`."),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    home: Path,
    ltui: Ltui,  # noqa: F811
    words: list[str],
    sentence: str,
) -> None:
    done = ltui("compare", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_run_is_named_and_the_others_are_compared(home: Path, ltui: Ltui) -> None:  # noqa: F811
    (home / "runs" / "calm-owl-0001" / "run.db").write_bytes(b"no database" * 1000)
    done = ltui("compare", "brave-owl", "calm-owl", "deep-owl")
    assert done.returncode == 1
    assert "calm-owl-0001/run.db" in done.stderr
    assert "deep-owl" in done.stdout


def test_the_runs_of_a_group_are_compared(home: Path, ltui: Ltui) -> None:  # noqa: F811
    for name in ("fast-owl", "calm-owl"):
        assert ltui("group", name, "--name", "sweep").returncode == 0
    done = ltui("compare", "deep-owl", "--filter", "group:sweep", "--json")
    assert done.returncode == 0, done.stderr
    names = [run["name"] for run in json.loads(done.stdout)["runs"]]
    assert names == ["deep-owl", "calm-owl", "fast-owl"]


def test_the_place_of_a_mistake_in_a_filter_is_marked(home: Path, ltui: Ltui) -> None:  # noqa: F811
    done = ltui("compare", "--filter", "(name:brave")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ["  (name:brave", "  ^"]
