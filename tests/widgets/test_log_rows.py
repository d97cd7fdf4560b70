"""The buffer of log lines and its rows: what is folded, kept, searched and wrapped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ltui.widgets.log_rows import LogBuffer, LogLevel, LogRows, occurrences, unfolded, wrap_rows
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

TEXTS = st.text(alphabet="ab é日本 ", max_size=30)


@given(TEXTS, st.integers(2, 12))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    parts = wrap_rows(text, width)
    assert "".join(text[begin:end] for begin, end in parts) == text
    assert all(cell_len(text[begin:end]) <= width for begin, end in parts)


def test_a_row_ends_after_a_blank_that_is_near() -> None:
    assert wrap_rows("one two three", 9) == [(0, 8), (8, 13)]
    assert wrap_rows("a/very/long/path", 9) == [(0, 9), (9, 16)]
    assert wrap_rows("anything", None) == [(0, 8)]
    assert wrap_rows("", 9) == [(0, 0)]


@given(
    st.lists(st.lists(st.sampled_from(["a", "b" * 20, "日" * 9]), max_size=5), max_size=9),
    st.integers(1, 6),
    st.sampled_from(LogLevel),
)
def test_rows_laid_out_bit_by_bit_are_those_laid_out_at_once(
    batches: list[list[str]], most: int, level: LogLevel
) -> None:
    lines = LogBuffer(most)
    rows = LogRows(lines)
    rows.lay_out(10, level)
    for batch in batches:
        tones = {"a": Tone.PLAIN, "b": Tone.WARN, "日": Tone.BAD}
        lines.extend(LogLine(rank=0, text=text, tone=tones[text[0]]) for text in batch)
        rows.update()
        fresh = LogRows(lines)
        fresh.lay_out(10, level)
        assert [rows[i] for i in range(len(rows))] == [fresh[i] for i in range(len(fresh))]


def lines(*texts: str, rank: int | None = 0) -> list[LogLine]:
    return [LogLine(rank=rank, text=t) for t in texts]


def test_identical_neighbours_of_a_rank_become_one() -> None:
    held = LogBuffer(10)
    held.extend(lines("a", "a"))
    held.extend(lines("a"))
    held.extend(lines("a", rank=1))
    assert [(x.rank, x.text, x.count) for x in held] == [(0, "a", 3), (1, "a", 1)]


def test_only_the_newest_are_kept() -> None:
    held = LogBuffer(3)
    assert held.extend(lines("a", "b")) == 0
    assert held.extend(lines("c", "d", "e")) == 2
    assert [x.text for x in held] == ["c", "d", "e"]
    assert held.first == 2


@given(st.lists(st.lists(st.sampled_from("abcA"), max_size=8), max_size=12), st.integers(1, 9))
def test_hits_found_bit_by_bit_are_those_of_one_search(batches: list[list[str]], most: int) -> None:
    held = LogBuffer(most)
    for batch in batches:
        held.extend(lines(*batch))
        expected = [i for i, line in enumerate(held) if "a" in line.text.lower()]
        assert held.hits("A") == expected
    assert held.hits("") == []
    assert held.hits("c") == [i for i, line in enumerate(held) if line.text == "c"]


def test_clearing_forgets_hits() -> None:
    held = LogBuffer(5)
    held.extend(lines("a", "b"))
    assert held.hits("a") == [0]
    held.clear()
    held.extend(lines("b", "a"))
    assert held.hits("a") == [1]


def test_occurrences_do_not_overlap_and_ignore_case() -> None:
    assert occurrences("aXaxA", "ax") == [0, 2]
    assert occurrences("aaa", "aa") == [0]
    assert occurrences("anything", "") == []
    assert occurrences("İİ", "i") == []


def test_lines_of_frameworks_are_one_line_until_somebody_unfolds_them() -> None:
    start_up = (
        "[rank: 0] Seed set to 7", "GPU available: False, used: False", "-" * 60, "",
        "distributed_backend=gloo", "All distributed processes registered.",
    )  # fmt: skip
    leaks = ("nanobind: leaked 64 types!", ' - leaked type "ATOMIC_OP"', " - ... skipped remainder")
    held = LogBuffer(100)
    warning = LogLine(rank=0, text="UserWarning: few workers", tone=Tone.WARN)
    for part in (lines(*start_up), [warning], lines("epoch 0", "----"), lines(*leaks)):
        held.extend(part)
    assert [x.text for x in held] == [
        "6 lines of start-up (u: show)", "UserWarning: few workers", "epoch 0", "----",
        "3 lines about objects that were not freed (u: show)",
    ]  # fmt: skip
    written = [*start_up, warning.text, "epoch 0", "----", *leaks]
    assert [x.text for x in unfolded(held)] == written
    alone = LogBuffer(5)
    alone.extend(lines("GPU available: True", "my own line"))
    assert [x.text for x in alone] == ["GPU available: True", "my own line"]
