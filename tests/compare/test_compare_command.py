"""``ltui compare``: its table, its JSON and what it says to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.training.store.recorded_environment import record_environment
from tests.compare.stored_runs import write_seeds
from tests.ltui_command import answer, run_ltui


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with five runs, which no test changes."""
    home = tmp_path_factory.mktemp("home")
    write_seeds(home)
    return home


@pytest.fixture
def seeds(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTUI_HOME", str(written))


def test_table_and_json_give_the_same_values(seeds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = run_ltui("compare", "*-owl-*", "--metric", "val/acc", code=0).stdout
    assert "val/acc (higher is better)" in table
    assert "lr=0.1: runs 1-3" in table
    assert max(map(len, table.splitlines())) <= 80
    document = answer(run_ltui("compare", "*-owl-*", "--metric", "val/acc", "--json").stdout)
    assert [run["name"] for run in document["runs"]][:2] == ["brave-owl", "calm-owl"]
    best = document["runs"][0]["metrics"]["val/acc"]["best"]
    assert f"{best['value']:.4f}" in table
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
        # The place of a mistake in a filter is marked.
        (["--filter", "(name:brave"], "\n  (name:brave\n  ^"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    seeds: None, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    try:
        code = main(["compare", *words])
    except SystemExit as end:  # of the grammar
        code = int(end.code or 0)
    assert code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert sentence in written.err
    assert written.err.count("\n") == 1 + sentence.count("\n")


def test_variables_that_differ_are_named_without_their_values(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_seeds(private_home, steps=600)[:2]
    values = {"DATA": "/a", "HF_TOKEN": "hidden1", "STEPS": "300"}, {
        "DATA": "/b", "HF_TOKEN": "hidden2", "API_KEY": "hidden3"
    }  # fmt: skip
    for run_dir, environment in zip(runs, values, strict=True):
        run_dir.recorded_environment_path(1).parent.mkdir()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            record_environment(run_dir, 1)
    words = "compare", "brave-owl", "calm-owl"
    table = run_ltui(*words, code=0).stdout
    # Of secrets, only digests with different keys are stored.
    assert "environment variables that differ: API_KEY, DATA, STEPS\n" in table
    assert "hidden" not in table
    names = ["API_KEY", "DATA", "STEPS"]
    assert answer(run_ltui(*words, "--json").stdout)["differing_variables"] == names
    # A run on several machines keeps no values, so nothing is known of it.
    record_environment(runs[1], 1, values=False)
    assert "variables" not in run_ltui(*words, code=0).stdout


def test_a_damaged_run_is_named_and_the_others_are_compared(
    private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seeds(private_home, steps=600)[1].db_path.write_bytes(b"no database" * 1000)
    assert main(["compare", "brave-owl", "calm-owl", "deep-owl"]) == 1
    written = capsys.readouterr()
    assert "calm-owl-0001/run.db" in written.err
    assert "deep-owl" in written.out


def test_the_runs_of_a_group_are_compared(
    private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seeds(private_home, steps=600)
    for name in ("fast-owl", "calm-owl"):
        assert main(["group", name, "--name", "sweep"]) == 0
    capsys.readouterr()
    assert main(["compare", "deep-owl", "--filter", "group:sweep", "--json"]) == 0
    names = [run["name"] for run in answer(capsys.readouterr().out)["runs"]]
    assert names == ["deep-owl", "calm-owl", "fast-owl"]
