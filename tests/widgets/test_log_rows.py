"""Rows of a log: wrapped, filtered, laid out bit by bit as at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ltui.widgets.log_rows import LogBuffer, LogLevel, LogRows, wrap_rows
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
