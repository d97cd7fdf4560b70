"""What ``ltui show --time`` prints: one bar, its parts, and what would be faster."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.presentation.time_view import BAR_CELLS, summary, time_bar, time_lines
from ltui.training.state.run_snapshot import Limit
from ltui.training.state.time_advice import Advice
from ltui.training.state.time_ledger import AttemptTimes, Interval, Part, StepBlock, TimeFacts
from ltui.training.state.time_ledger import time_ledger as ledger_of
from tests.cli.conftest import Ltui
from tests.ltui_command import answer
from tests.stored_runs import stored_run

FACTS = TimeFacts(
    begin=0.0,
    until=100.0,
    attempts=[AttemptTimes(number=1, begin=0.0, end=100.0, last_step=1 << 40)],
    intervals=[Interval(attempt=1, begin=60.0, end=80.0, part=Part.STALLS, cause="frozen")],
    blocks=[
        StepBlock(
            attempt=1, rank=rank, group=0, first_step=1, last_step=50, batches=50, end=100.0,
            seconds=70.0, fetch_s=10.0 + rank,
        )
        for rank in range(2)
    ],
)  # fmt: skip


def test_the_bar_is_divided_like_the_time() -> None:
    bar = time_bar(ledger_of(FACTS).run, 50)
    assert len(bar) == 50
    assert [bar.count(sign) for sign in "█▓▁!"] == [30, 5, 5, 10]
    nothing = ledger_of(TimeFacts(begin=5.0, until=5.0))
    assert time_bar(nothing.run, BAR_CELLS) == ""
    assert summary(nothing) == ""


def test_the_report_has_all_parts_ranks_and_advice() -> None:
    found = [Advice(0.1, "Use \x1b[31mfewer\x1b[0m pauses.")]
    text = "\n".join(time_lines(ledger_of(FACTS, 8), "brave-owl · quickstart", found))
    assert text.startswith("brave-owl · quickstart: 1 m 40 s, goodput 59 %\n")
    words = " ".join(text.split())
    for part in ("▓ waiting for data 11 % 11.0 s", "! stalls 20 % 20.0 s", "rank time goodput"):
        assert part in words
    assert "stalls by cause: frozen 20.0 s" in text
    assert "pauses." in text
    assert "\x1b" not in text
    assert "0 1 m 40 s 60 %" in words, "rank 0 waits less by itself"
    assert "Before" not in text
    late = replace(FACTS, attempts=[replace(FACTS.attempts[0], begin=5.0)])
    text = "\n".join(time_lines(ledger_of(late, 8), "brave-owl", ()))
    assert " before " in text
    assert text.endswith("Before is the time from the launch to the first attempt.")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rank", "speed limited by rank 1, which the others wait for: it works longer"),
        ("unknown", "what limits the speed is not known: it works longer"),
        ("device", ""),
    ],
)
def test_the_report_says_what_limits_the_speed(
    private_home: Path, command: Ltui, kind: str, said: str
) -> None:
    limit = Limit(kind=kind, rank=1, evidence=("it works longer",))
    stored_run(private_home, "brave-owl-0001", limit=limit)
    text = command("show", "brave-owl", "--time").stdout
    assert said in text.splitlines()
    assert ("speed" in text) == bool(said)
    assert "to gain" not in text
    document = answer(command("show", "brave-owl", "--time", "--json").stdout)
    assert document["limit"]["kind"] == kind
