"""``ltui runs --filter``, ``prune``, ``delete`` and ``restore`` as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.state.run_snapshot import RunState
from ltui.training.store.find_run import deleted_runs
from ltui.training.store.labels_file import change_labels
from tests.cli.conftest import Ltui, RunsLeft
from tests.ltui_command import answer
from tests.stored_runs import stored_run


@pytest.fixture
def home(private_home: Path) -> Path:
    config = {"model": {"lr": 0.01}}
    stored_run(private_home, "calm-fox-1a2b", metrics={"val/loss": 0.5}, config=config)
    stored_run(private_home, "old-pine-3c4d", metrics={"val/loss": 0.1}, state=RunState.FAILED)
    starred = stored_run(private_home, "kept-owl-5e6f", state=RunState.FAILED)
    change_labels(starred, lambda labels: replace(labels, star=True))
    damaged = stored_run(private_home, "bad-bear-ffff")
    damaged.db_path.unlink()
    damaged.spec_path.write_text("version: 99\n")
    return private_home


def test_runs_are_filtered_sorted_and_printed_by_column(
    command: Ltui, ltui: Ltui, home: Path
) -> None:
    done = ltui("runs", "--filter", "has:val/loss", "--sort", "val/loss", "--columns", "val/loss")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["ID", "val/loss"],
        ["old-pine-3c4d", "0.1000"],
        ["calm-fox-1a2b", "0.5000"],
    ]
    # The main metrics of runs differ, so each value has its name, as in the dashboard.
    done = command("runs", "--filter", "calm", "--columns", "metric")
    assert done.stdout.splitlines()[1].split() == ["calm-fox-1a2b", "val/loss", "0.5000"]
    done = command("runs", "--filter", "config.lr<0.1", "--columns", "config.lr", "--json")
    assert answer(done.stdout) == [{"id": "calm-fox-1a2b", "config.lr": 0.01}]
    done = command("runs", "--filter", "state=failed", "--columns", "config.lr")
    assert "Note" not in done.stderr
    done = command("runs", "--columns", "config.lrr")
    sentence = "Note: no run has a setting `config.lrr`. Did you mean `config.lr`?"
    assert sentence in done.stderr.splitlines()
    done = command("runs", "--filter", "state=failed star=yes", "--json")
    (run,) = answer(done.stdout)
    assert (run["id"], run["star"], run["state_word"]) == ("kept-owl-5e6f", True, "failed")
    assert "bad-bear-ffff" in command("runs", "--filter", "state=damaged").stdout


def test_an_error_marks_its_column(command: Ltui, home: Path) -> None:
    done = command("runs", "--filter", "fox val/loss<low")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "filter, column 14: `low` cannot be compared with `val/loss`. "
        "Use a number such as 0.25 or 1e-3.",
        "  fox val/loss<low",
        f"{' ' * 15}^",
    ]


def test_prune_deletes_what_matches_and_keeps_starred_and_unreadable_runs(
    command: Ltui, home: Path, runs_left: RunsLeft
) -> None:
    before = runs_left()
    dry = command("prune", "--filter", "not calm", "--dry-run")
    assert dry.stdout.splitlines()[-1].startswith("Would delete 1 run, ")
    assert "old-pine-3c4d" in dry.stdout
    assert runs_left() == before
    assert command("prune", "--filter", "not calm").stdout.count("old-pine-3c4d") == 1
    assert runs_left() == ["bad-bear-ffff", "calm-fox-1a2b", "kept-owl-5e6f"]
    assert command("prune", "--filter", "not calm").stdout.startswith("No run to delete")


@pytest.mark.usefixtures("ends_its_runs")
def test_prune_never_names_a_live_run(ltui: Ltui, command: Ltui, runs_left: RunsLeft) -> None:
    assert ltui("exec", "--detach", "--", "sleep", "600").returncode == 0
    (run_id,) = runs_left()
    assert run_id in command("runs", "--filter", run_id).stdout
    for words in (["--dry-run"], []):
        done = command("prune", "--filter", run_id, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("No run to delete")
    assert runs_left() == [run_id]


def test_several_runs_are_deleted_and_restored_by_one_command(
    command: Ltui, home: Path, runs_left: RunsLeft
) -> None:
    before = runs_left()
    assert command("delete", "calm", "nobody").returncode == 2
    assert runs_left() == before
    assert command("delete", "calm", "old-pine", "calm-fox").returncode == 0
    assert runs_left() == ["bad-bear-ffff", "kept-owl-5e6f"]
    done = command("restore", "calm-fox-1a2b", "nobody")
    assert (done.returncode, runs_left()) == (2, ["bad-bear-ffff", "kept-owl-5e6f"])
    done = command("restore", "calm-fox-1a2b", "old-pine-3c4d")
    assert done.stdout.count("is in the list of runs again") == 2
    assert runs_left() == before


@pytest.mark.parametrize(
    "words",
    [["--filter", ""], ["--filter", "not val/los<1"], ["--filter", "(calm"], [],
     ["--bin", "--filter", "x"]],
)  # fmt: skip
def test_prune_refuses_a_doubtful_filter(
    command: Ltui, home: Path, runs_left: RunsLeft, words: list[str]
) -> None:
    before = runs_left()
    assert command("prune", *words).returncode == 2
    assert runs_left() == before


def test_delete_restore_and_prune_on_the_command_line(
    command: Ltui, ltui: Ltui, home: Path, runs_left: RunsLeft
) -> None:
    fox, others = "calm-fox-1a2b", ["bad-bear-ffff", "kept-owl-5e6f", "old-pine-3c4d"]
    assert "would be moved to the bin" in command("delete", fox, "--dry-run").stdout
    assert runs_left() == sorted([fox, *others])
    done = ltui("delete", fox)
    assert f"ltui restore {fox}" in done.stdout
    assert runs_left() == others
    assert f"{fox}  until " in ltui("restore").stdout
    assert "1 deleted run" in ltui("doctor").stdout
    assert command("restore", "calm").returncode == 0
    assert runs_left() == sorted([fox, *others])
    assert command("restore", "calm").returncode == 2
    assert "for a week" in ltui("prune", "--filter", "fox").stdout
    dry = command("prune", "--bin", "--dry-run").stdout
    assert dry.splitlines()[-1].startswith("Would remove 1 run, ")
    assert deleted_runs(home)
    assert command("prune", "--bin").stdout.splitlines()[-1].startswith("Removed 1 run, ")
    assert deleted_runs(home) == []
    assert command("prune", "--filter", "pine", "--now").returncode == 0
    assert (deleted_runs(home), runs_left()) == ([], others[:2])
