"""``ltui tag``, ``group``, ``note`` and ``star`` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ltui.training.state.run_labels import RunLabels
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui
from tests.stored_runs import stored_run


@pytest.fixture
def runs(private_home: Path) -> list[RunDir]:
    return [stored_run(private_home, run_id) for run_id in ("calm-fox-1a2b", "old-pine-3c4d")]


def test_labels_are_set_printed_and_removed(ltui: Ltui, runs: list[RunDir]) -> None:
    done = ltui("tag", "calm-fox", "old-pine", "--add", "b,a", "--add", "c")
    assert done.stdout == "calm-fox-1a2b: a, b, c\nold-pine-3c4d: a, b, c\n"
    assert ltui("tag", "calm-fox", "--remove", "b").stdout == "calm-fox-1a2b: a, c\n"
    assert ltui("tag", "old-pine").stdout == "old-pine-3c4d: a, b, c\n"
    ltui("group", "calm-fox", "--name", "lr-sweep")
    ltui("note", "calm-fox", "the first one")
    ltui("star", "calm-fox")
    assert read_labels(runs[0]) == RunLabels(
        tags=("a", "c"), group="lr-sweep", note="the first one", star=True
    )
    assert ltui("group", "calm-fox", "--remove").stdout == "calm-fox-1a2b: no group\n"
    assert ltui("note", "calm-fox", "").stdout == "calm-fox-1a2b: no note\n"
    assert ltui("star", "calm-fox", "--remove").stdout == "calm-fox-1a2b: not starred\n"
    assert read_labels(runs[0]) == RunLabels(tags=("a", "c"))


def test_a_run_is_renamed_and_found_by_its_new_name(ltui: Ltui, runs: list[RunDir]) -> None:
    assert "NAME" not in ltui("runs").stdout
    assert ltui("rename", "calm-fox", "Größe [b]2[/b]").stdout == "calm-fox-1a2b: Größe [b]2[/b]\n"
    assert "Größe [b]2[/b]  quickstart" in ltui("runs").stdout
    names = {run["id"]: run["name"] for run in json.loads(ltui("runs", "--json").stdout)}
    assert names == {runs[0].id: "Größe [b]2[/b]", runs[1].id: "old-pine"}
    assert ltui("show", "größe [b]2[/b]").stdout.startswith("Größe [b]2[/b] · ")
    assert ltui("runs", "--filter", "name:größe").stdout.count("\n") == 2
    ltui("rename", "calm-fox", "")
    assert ltui("show", "calm-fox").stdout.startswith("calm-fox · ")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("Old", "The id of old-pine-3c4d begins with this name: use the id calm-fox-1a2b."),
        ("old-pine", "Another run has this name too: use the id calm-fox-1a2b."),
        ("theirs", "Another run has this name too: use the id calm-fox-1a2b."),
        ("calm", ""),
        ("mine", ""),
        ("", ""),
    ],
)
def test_a_name_that_does_not_name_the_run_alone_is_given_and_pointed_out(
    ltui: Ltui, runs: list[RunDir], name: str, note: str
) -> None:
    ltui("rename", runs[1].id, "theirs")
    done = ltui("rename", runs[0].id, name.lower())
    assert (done.returncode, done.stderr) == (0, f"Note: {note}\n" if note else "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tag", "calm-fox", "no-such-run", "--add", "x"], "there is no such run"),
        (["tag", "calm-fox", "--add", "two words"], "--add: 'two words' cannot be a tag."),
        (["tag", "calm-fox", "--add", "x", "--remove", "x"], "--remove: 'x' is to be added, too."),
        (["group", "calm-fox", "--name", "a b"], "cannot be the name of a group"),
        (["note", "calm-fox", "x" * 501], "Use at most 500."),
        (["rename", "calm-fox", "x" * 81], "Use at most 80."),
        (["exec", "--tag", "a b", "--", "true"], "--tag: 'a b' cannot be a tag."),
    ],
)
def test_a_mistake_changes_no_run(
    ltui: Ltui, runs: list[RunDir], words: list[str], said: str
) -> None:
    done = ltui(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert read_labels(runs[0]) == RunLabels()


def test_labels_are_given_at_launch(ltui: Ltui, private_home: Path) -> None:
    words = ("--name", "short", "--tag", "a,b", "--group", "g", "--note", "a test", "--plain")
    assert ltui("exec", *words, "--", "true").returncode == 0
    (path,) = (private_home / "runs").iterdir()
    expected = RunLabels(tags=("a", "b"), group="g", note="a test")
    assert read_labels(RunDir(path)) == expected


def test_show_prints_labels_settings_and_the_whole_command(ltui: Ltui, private_home: Path) -> None:
    command = ("python", "train.py", "--lr", "0.1", "--comment", "x" * 60, "--last-option", "end")
    run_dir = stored_run(
        private_home,
        "calm-fox-1a2b",
        preset=None,
        command=command,
        reported={"width": 32},
        epoch=0,
        max_epochs=6,
    )
    change_labels(
        run_dir, lambda _: RunLabels(tags=("a", "b"), group="lr", note="the first", star=True)
    )
    text = ltui("show", "last").stdout
    head, *lines = text.splitlines()
    assert "…" in head, "a command that is cut has a sign"
    facts = dict(line.strip().split("  ", 1) for line in lines if "  " in line.strip())
    assert facts["command"].endswith("--last-option end")
    assert [facts[name].strip() for name in ("tags", "group", "note", "star")] == [
        "a b", "lr", "the first", "★",
    ]  # fmt: skip
    assert "lr 0.1   " in text
    assert "width 32" in text
    assert "supervisor" not in text
    assert "epoch 1/6" in text
    document = json.loads(ltui("show", "last", "--json").stdout)
    assert (document["tags"], document["note"], document["star"]) == (["a", "b"], "the first", True)
    assert (document["settings"]["lr"], document["settings"]["width"]) == ("0.1", "32")
    (listed,) = json.loads(ltui("runs", "--json").stdout)
    (filtered,) = json.loads(ltui("runs", "--json", "--filter", "epoch=1").stdout)
    assert document["epoch"] == listed["epoch"] == filtered["epoch"] == 1
