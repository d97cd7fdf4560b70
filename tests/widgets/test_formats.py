"""Numbers as text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.widgets import formats
from ltui.widgets.formats import NA


def plain(text: str) -> str:
    return text.replace(formats.THIN, " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.count(1204), "1 204"),
        (formats.count(0), "0"),
        (formats.count_of(1204, 2930), "1 204/2 930"),
        (formats.count_of(1204, None), "1 204"),
        (formats.count_of(None, 2930), "n/a/2 930"),
        (formats.quantity(31412, "img/s"), "31.4 k img/s"),
        (formats.quantity(999.7, "img/s"), "1.00 k img/s"),
        (formats.quantity(1.2e6, "B/s"), "1.20 MB/s"),
        (formats.quantity(3e9, "FLOP"), "3.00 GFLOP"),
        (formats.quantity(512.0, "B/s"), "512 B/s"),
        (formats.quantity(512.0, "s"), "512 s"),
        (formats.quantity(3.21, "it/s"), "3.21 it/s"),
        (formats.size(0), "0 B"),
        (formats.size(1023), "1023 B"),
        (formats.size(1024), "1.00 KiB"),
        (formats.size(2**30 - 1), "1.00 GiB"),
        (formats.size(61.2 * 2**30), "61.2 GiB"),
        (formats.size_of(61.2 * 2**30, 141 * 2**30), "61.2 / 141 GiB"),
        (formats.size_of(None, 141 * 2**30), "n/a / 141 GiB"),
        (formats.power(612, 700), "612 / 700 W"),
        (formats.power(None, None), NA),
        (formats.temperature(64), "64 °C"),
        (formats.clock(1980), "1 980 MHz"),
        (formats.duration(728), "12 m 08 s"),
        (formats.duration(11_040), "3 h 04 m"),
        (formats.duration(190_800), "2 d 05 h"),
        (formats.duration(59.96), "1 m 00 s"),
        (formats.duration(3599.6), "1 h 00 m"),
        (formats.duration(0.012), "12 ms"),
        (formats.duration(0.9996), "1.0 s"),
        (formats.duration(0.00034), "340 µs"),
        (formats.duration(0), "0 s"),
        (formats.age(8.2), "8.2 s"),
        (formats.age(42.4), "42 s"),
        (formats.age(61), "1 m 01 s"),
        (formats.ago(0.2), "just now"),
        (formats.ago(7300), "2 h ago"),
        (formats.significant(9.996), "10.0"),
        (formats.significant(0.8421), "0.842"),
        (formats.significant(-31.44), "-31.4"),
        (formats.metric(1.2e-5), "1.200e-05"),
        (formats.metric(64_200), "64 200"),
        (formats.metric(0.0), "0.000"),
        (formats.ranks((0, 1, 2, 3, 7, 9)), "0-3, 7, 9"),
        (formats.ranks((1, 0)), "0, 1"),
        (formats.ranks(tuple(range(0, 40, 2)), limit=2), "0, 2 and 18 more"),
        (formats.ranks(()), ""),
    ],
)
def test_reads_as_written(text: str, expected: str) -> None:
    assert plain(text) == expected


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "write",
    [
        formats.count,
        formats.significant,
        formats.size,
        formats.percent,
        formats.duration,
        formats.age,
        formats.ago,
        formats.temperature,
        formats.clock,
        formats.power,
    ],
)
def test_missing_is_not_zero(write: object, missing: float | None) -> None:
    assert write(missing) == NA  # type: ignore[operator]


def test_a_logged_value_that_is_not_finite_has_one_word() -> None:
    texts = [formats.metric(v) for v in (math.nan, -math.nan, math.inf, -math.inf, None, 0.5)]
    assert texts == ["NaN", "NaN", "inf", "-inf", "n/a", "0.5000"]


@given(st.floats(0, 1))
def test_percent_does_not_round_into_all_or_nothing(share: float) -> None:
    text = formats.percent(share)
    assert (text == "100 %") == (share == 1)
    assert (text == "0 %") == (share == 0)
    assert formats.percent(1e308) == NA


@given(st.floats(1e-7, 1e8))
def test_three_digits_stay_within_their_width(value: float) -> None:
    text = formats.quantity(value, "img/s")
    assert len(text) <= len("1.00e-05 k img/s")
    assert float(plain(formats.significant(value)).replace(" ", "")) == pytest.approx(
        value, rel=6e-3
    )


@given(st.floats(0, 1e7))
def test_no_duration_has_sixty_of_a_unit(seconds: float) -> None:
    for text in (formats.duration(seconds), formats.age(seconds)):
        assert not re.search(r"\b(60(\.0)? (s|m)|1000 (ms|µs))\b", text)
