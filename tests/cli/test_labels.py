"""``ltui tag``, ``group``, ``note``, ``star`` and ``rename`` as a person types them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ltui.training.state.run_labels import RunLabels
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui
from tests.ltui_command import answer
from tests.stored_runs import stored_run


@pytest.fixture
def runs(private_home: Path) -> list[RunDir]:
    return [stored_run(private_home, run_id) for run_id in ("calm-fox-1a2b", "old-pine-3c4d")]


def test_labels_are_set_printed_and_removed(command: Ltui, ltui: Ltui, runs: list[RunDir]) -> None:
    done = ltui("tag", "calm-fox", "old-pine", "--add", "b,a", "--add", "c")
    assert done.stdout == "calm-fox-1a2b: a, b, c\nold-pine-3c4d: a, b, c\n"
    assert command("tag", "calm-fox", "--remove", "b").stdout == "calm-fox-1a2b: a, c\n"
    assert command("tag", "old-pine").stdout == "old-pine-3c4d: a, b, c\n"
    command("group", "calm-fox", "--name", "lr-sweep")
    command("note", "calm-fox", "the first one")
    command("star", "calm-fox")
    assert read_labels(runs[0]) == RunLabels(
        tags=("a", "c"), group="lr-sweep", note="the first one", star=True
    )
    assert command("group", "calm-fox", "--remove").stdout == "calm-fox-1a2b: no group\n"
    assert command("note", "calm-fox", "").stdout == "calm-fox-1a2b: no note\n"
    assert command("star", "calm-fox", "--remove").stdout == "calm-fox-1a2b: not starred\n"
    assert read_labels(runs[0]) == RunLabels(tags=("a", "c"))


def test_a_run_is_renamed_and_found_by_its_new_name(command: Ltui, runs: list[RunDir]) -> None:
    assert "NAME" not in command("runs").stdout
    name = "Größe [b]2[/b]"
    assert command("rename", "calm-fox", name).stdout == f"calm-fox-1a2b: {name}\n"
    assert f"{name}  quickstart" in command("runs").stdout
    names = {run["id"]: run["name"] for run in answer(command("runs", "--json").stdout)}
    assert names == {runs[0].id: name, runs[1].id: "old-pine"}
    assert command("show", name.lower()).stdout.startswith(f"{name} · ")
    assert command("runs", "--filter", "name:größe").stdout.count("\n") == 2
    command("rename", "calm-fox", "")
    assert command("show", "calm-fox").stdout.startswith("calm-fox · ")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("old", "The id of old-pine-3c4d begins with this name: use the id calm-fox-1a2b."),
        ("old-pine", "Another run has this name too: use the id calm-fox-1a2b."),
        ("theirs", "Another run has this name too: use the id calm-fox-1a2b."),
        ("calm", ""),
        ("mine", ""),
        ("", ""),
    ],
)
def test_a_name_that_does_not_name_the_run_alone_is_given_and_pointed_out(
    command: Ltui, runs: list[RunDir], name: str, note: str
) -> None:
    command("rename", runs[1].id, "theirs")
    done = command("rename", runs[0].id, name)
    assert (done.returncode, done.stderr) == (0, f"Note: {note}\n" if note else "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tag calm-fox no-such-run --add x", "there is no such run"),
        ("tag calm-fox --add 'two words'", "--add: 'two words' cannot be a tag."),
        ("tag calm-fox --add x --remove x", "--remove: 'x' is to be added, too."),
        ("group calm-fox --name 'a b'", "cannot be the name of a group"),
        (f"note calm-fox {'x' * 501}", "Use at most 500."),
        (f"rename calm-fox {'x' * 81}", "Use at most 80."),
    ],
)
def test_a_mistake_changes_no_run(command: Ltui, runs: list[RunDir], line: str, said: str) -> None:
    done = command(*shlex.split(line))
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


def test_show_prints_labels_settings_and_the_whole_command(
    command: Ltui, private_home: Path
) -> None:
    words = ("python", "train.py", "--lr", "0.1", "--comment", "x" * 60, "--last-option", "end")
    run_dir = stored_run(
        private_home,
        "calm-fox-1a2b",
        preset=None,
        command=words,
        reported={"width": 32},
        epoch=0,
        max_epochs=6,
    )
    labels = RunLabels(tags=("a", "b"), group="lr", note="the first", star=True)
    change_labels(run_dir, lambda _: labels)
    text = command("show", "last").stdout
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
    document = answer(command("show", "last", "--json").stdout)
    assert (document["tags"], document["note"], document["star"]) == (["a", "b"], "the first", True)
    assert (document["settings"]["lr"], document["settings"]["width"]) == ("0.1", "32")
    (listed,) = answer(command("runs", "--json").stdout)
    (filtered,) = answer(command("runs", "--json", "--filter", "epoch=1").stdout)
    assert document["epoch"] == listed["epoch"] == filtered["epoch"] == 1
