"""Labels of a run: what is accepted, what a damaged file gives, and two writers at once."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import (
    MOST_COLOURS,
    MOST_NOTE_CHARACTERS,
    MOST_TAGS,
    NO_LABELS,
    RunLabels,
    checked_group,
    checked_note,
    checked_tags,
    labels_from_document,
    with_tags,
)
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir
from tests.required import required

NAMES = st.from_regex(r"\w[\w.:/=+@-]{0,39}", fullmatch=True)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@example(set(), "", "0\r\x1b", False, 0)
@given(
    st.sets(NAMES, max_size=4),
    st.one_of(st.just(""), NAMES),
    st.text(max_size=MOST_NOTE_CHARACTERS),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, MOST_COLOURS - 1)),
)
def test_what_was_accepted_is_read_back(
    tags: set[str], group: str, note: str, star: bool, colour: int | None
) -> None:
    labels = RunLabels(
        tags=checked_tags(tags, "--tag"),
        group=checked_group(group, "--group"),
        note=checked_note(note, "--note"),
        star=star,
        colour=colour,
    )
    assert labels_from_document(json.loads(json.dumps(labels.to_document()))) == labels
    assert labels.note.isprintable()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9
    )
)
def test_a_file_of_another_hand_gives_valid_labels_or_none(value: object) -> None:
    document = {"tags": value, "group": value, "note": value, "star": value, "colour": value}
    labels = labels_from_document(document)
    assert labels_from_document(labels.to_document()) == labels
    assert len(labels.tags) <= MOST_TAGS
    assert labels.note.isprintable()


@pytest.mark.parametrize(
    "tag", ["two words", "\x1b[31mred", "'quoted'", "x" * 41, "-x", "a\u202eb"]
)
def test_what_cannot_be_a_tag_is_refused_with_the_place(tag: str) -> None:
    with pytest.raises(ProblemError, match=r"^--add: .* cannot be a tag\. Use at most 40 letters"):
        checked_tags(["fine", tag], "--add")


def test_tags_and_notes_are_bounded() -> None:
    many = RunLabels(tags=tuple(f"t{i}" for i in range(MOST_TAGS)))
    assert len(with_tags(many, ["new"], ["t0"], "--add")) == MOST_TAGS
    with pytest.raises(ProblemError, match="at most 32"):
        with_tags(many, ["new"], [], "--add")
    with pytest.raises(ProblemError, match="at most 500"):
        checked_note("x" * 501, "TEXT")
    assert checked_note("two\nlines\x1b[2J and a bell\a", "TEXT") == "two lines[2J and a bell"


def test_the_file_is_private_and_a_damaged_one_is_no_labels(run_dir: RunDir) -> None:
    assert read_labels(run_dir) == NO_LABELS
    labels = change_labels(run_dir, lambda before: RunLabels(tags=("a",), star=True))
    assert read_labels(run_dir) == labels
    assert stat.S_IMODE(run_dir.labels_path.stat().st_mode) == 0o600
    run_dir.labels_path.write_bytes(b'{"tags": ["a"')
    assert read_labels(run_dir) == NO_LABELS


def test_a_run_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="labels cannot be written"):
        change_labels(RunDir(tmp_path / "gone"), lambda labels: labels)


ADD_TAGS = """
import sys
from msgspec.structs import replace
from pathlib import Path
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
print("ready", flush=True)
sys.stdin.readline()
for number in range(8):
    tag = f"{sys.argv[2]}{number}"
    change_labels(RunDir(Path(sys.argv[1])), lambda l: replace(l, tags=(*l.tags, tag)))
"""


def test_writers_at_the_same_time_lose_nothing(run_dir: RunDir) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", ADD_TAGS, str(run_dir.path), letter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for letter in "abc"
    ]
    for writer in writers:
        assert required(writer.stdout).readline() == "ready\n"
    for writer in writers:
        required(writer.stdin).write("go\n")
        required(writer.stdin).flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    expected = {f"{letter}{number}" for letter in "abc" for number in range(8)}
    assert set(read_labels(run_dir).tags) == expected
