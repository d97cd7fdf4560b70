"""Following logs: appended bytes only, bounded, made safe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltui.app.live.log_tail import LINE_BYTES, FileTail, LogTail, rank_of_log
from ltui.widgets.tone import Tone


def texts(lines: object) -> list[str]:
    return [line.text for line in lines]  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.log"


@pytest.fixture
def tail(path: Path) -> FileTail:
    return FileTail(path, 0)


def test_names() -> None:
    names = ("rank-00003.log", "engine.log", "rank-x.log")
    assert [rank_of_log(name) for name in names] == [3, None, None]


def test_only_what_was_appended_is_given(path: Path, tail: FileTail) -> None:
    assert tail.poll() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert texts(tail.poll()) == ["one", "two"]
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b"ee\nfour")
    assert texts(tail.poll()) == ["three"]
    assert texts(tail.finish()) == ["four"]
    assert tail.finish() == []
    # A file that was replaced or cut is read anew.
    path.write_bytes(b"new\n")
    assert texts(tail.poll()) == ["new"]


def test_a_long_file_is_begun_near_its_end_at_a_whole_line(path: Path) -> None:
    path.write_bytes(b"".join(b"line %06d\n" % i for i in range(10_000)))
    tail = FileTail(path, None, start_bytes=1000)
    found = texts(tail.poll())
    assert 0 < len(found) < 100
    assert found[-1] == "line 009999"
    assert all(len(text) == 11 for text in found)


def test_a_line_without_end_is_bounded(path: Path, tail: FileTail) -> None:
    path.write_bytes(b"x" * (LINE_BYTES + 10))
    (line,) = tail.poll()
    assert len(line.text) < LINE_BYTES
    assert tail.finish() == []


def test_escapes_never_pass_and_errors_stand_out(path: Path, tail: FileTail) -> None:
    path.write_bytes(
        b"\x1b]0;title\x07\x1b[31mred\x1b[0m [b]not bold[/b]\n"
        b"Traceback (most recent call last):\nRuntimeError: broken\nUserWarning: slow\n\xff\xfe\n"
    )
    lines = tail.poll()
    assert lines[0].text == "red [b]not bold[/b]"
    assert [line.tone for line in lines] == [
        Tone.PLAIN, Tone.BAD, Tone.BAD, Tone.WARN, Tone.PLAIN,
    ]  # fmt: skip
    assert all("\x1b" not in line.text and "\x07" not in line.text for line in lines)


def test_files_of_ranks_are_merged_as_they_appear(tmp_path: Path) -> None:
    log = LogTail(tmp_path / "1", max_lines=5)
    assert not log.poll()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "rank-00000.log").write_bytes(b"a\nb\n")
    assert log.poll()
    (tmp_path / "1" / "rank-00001.log").write_bytes(b"c\n")
    (tmp_path / "1" / "notes.txt").write_bytes(b"not a log\n")
    assert log.poll()
    assert [(line.rank, line.text) for line in log.lines()] == [(0, "a"), (0, "b"), (1, "c")]
    (tmp_path / "1" / "rank-00000.log").open("ab").write(b"1\n2\n3\n4\n")
    log.poll()
    assert len(log.lines()) == 5
    assert log.count == 7


def test_lines_carry_the_time_at_which_they_arrived_where_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_bytes(b"old\n")
    log = LogTail(tmp_path)
    log.poll(100.0)
    with (tmp_path / "rank-00000.log").open("ab") as file:
        file.write(b"appended\n")
    (tmp_path / "rank-00001.log").write_bytes(b"new file\n")
    log.poll(101.0)
    assert [(line.text, line.seen_at) for line in log.lines()] == [
        ("old", None), ("appended", 101.0), ("new file", 101.0),
    ]  # fmt: skip


def test_a_traceback_is_one_error_from_its_first_line_to_its_exception(
    path: Path, tail: FileTail
) -> None:
    path.write_bytes(
        b"step 3\n"
        b"[rank0]: Traceback (most recent call last):\n"
        b'[rank0]:   File "train.py", line 3, in step\n'
        b"[rank0]:     raise mine.Broken(1)\n"
        b"[rank0]: mine.Broken: the message\n"
        b"step 4\n"
    )
    lines = tail.poll()
    assert [line.in_traceback for line in lines] == [False, True, True, True, True, False]
    assert [line.tone for line in lines if line.tone is not Tone.PLAIN] == [Tone.BAD, Tone.BAD]
    assert lines[4].tone is Tone.BAD


def test_the_file_that_was_written_last_stands_last(tmp_path: Path) -> None:
    for name, age in (("rank-00000.log", 10), ("rank-00001.log", 30), ("engine.log", 20)):
        path = tmp_path / name
        path.write_text(f"{name}\n")
        os.utime(path, (1e9 - age, 1e9 - age))
    log = LogTail(tmp_path)
    log.poll()
    assert texts(log.lines()) == ["rank-00001.log", "engine.log", "rank-00000.log"]
