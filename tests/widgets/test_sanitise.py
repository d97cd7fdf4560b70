"""Text of a hostile process, and the part of it that is shown."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.widgets.sanitise import MAX_LENGTH, clean_line, clean_lines, clean_name

ESC = "\x1b"


@pytest.mark.parametrize(
    ("hostile", "left"),
    [
        (f"{ESC}[31mred{ESC}[0m", "red"),
        (f"{ESC}[2J{ESC}[H{ESC}[?1049hgone", "gone"),
        (f"{ESC}]0;title\x07text", "text"),
        (f"{ESC}]8;;http://evil{ESC}\\link{ESC}]8;;{ESC}\\", "link"),
        (f"{ESC}]52;c;cm0gLXJm\x07clipboard", "clipboard"),
        (f"{ESC}P+q544e{ESC}\\dcs", "dcs"),
        (f"{ESC}_apc{ESC}\\after", "after"),
        (f"{ESC}(0charset{ESC}(B", "charset"),
        (f"{ESC}creset", "reset"),
        ("\x9b31mred\x9bm", "red"),
        ("\x9d0;title\x9ctext", "text"),
        (f"unfinished {ESC}[38;5", "unfinished "),
        (f"unfinished {ESC}", "unfinished "),
        ("bell\x07 null\x00 del\x7f nel\x85", "bell null del nel"),
        ("safe‮gnp.exe", "safegnp.exe"),
        ("a⁦b⁩c‏d", "abcd"),
        ("zero​width﻿", "zerowidth"),
        ("tag\U000e0041s", "tags"),
        ("10 %\r50 %\r100 %", "100 %"),
        ("100 %\r50", "500 %"),
        ("downloading\r\x1b[Kdone", "done"),
        ("windows line\r\n", "windows line"),
        ("abc\b\bXY", "aXY"),
        ("a\tb", "a       b"),
        ("two\nlines", "two lines"),
        ("[bold red]not markup[/] [@click=app.quit]", "[bold red]not markup[/] [@click=app.quit]"),
        ("bad � bytes", "bad � bytes"),
        ("\ud800lone", "lone"),
        ("größer, 日本語, λ", "größer, 日本語, λ"),
        ("", ""),
    ],
)
def test_only_letters_are_left(hostile: str, left: str) -> None:
    assert clean_line(hostile) == left


def test_letters_with_too_many_marks_keep_three() -> None:
    assert clean_line("Z" + "\u0301" * 50) == "Z" + "\u0301" * 3


def test_a_line_of_megabytes_is_cut_and_says_so() -> None:
    shown = clean_line("x" * 5_000_000)
    assert shown.startswith("x" * MAX_LENGTH)
    assert len(shown) < MAX_LENGTH + 50
    assert "more characters" in shown


def test_the_end_of_a_long_progress_line_is_kept() -> None:
    assert clean_line("\r".join(f"{n} of 99999" for n in range(100_000))).startswith("99999 of")


def test_names_are_one_line_without_blanks_around() -> None:
    assert clean_name("  two\n words\t ") == "two words"


def test_lines_are_split_and_each_made_safe() -> None:
    assert clean_lines(f"one\r\n{ESC}[1mtwo\nthree") == ["one", "two", "three"]


_WRITES = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("\x1b\x9b\x9d\x9c\x07[]()m;0123\\KJH\r\n\t\b‮​"),
    )
)


@given(_WRITES)
def test_nothing_that_commands_a_terminal_is_left(text: str) -> None:
    shown = clean_line(text)
    for letter in shown:
        assert unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp"), repr(letter)
        assert not re.match("[\u200b-\u200f\u202a-\u202e\u2066-\u2069]", letter)


@given(_WRITES)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    once = clean_line(text)
    assert clean_line(once) == once
