"""The time ledger: its parts sum to the wall clock exactly, and each moment has the right part."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from ltui.training.state.time_advice import LoaderSetting, advice
from ltui.training.state.time_ledger import (
    Account,
    AttemptTimes,
    Interval,
    Part,
    StepBlock,
    TimeFacts,
    time_ledger,
)

OVERLAPPING = (
    *(Part.QUEUE, Part.PAUSES, Part.STALLS, Part.CHECKPOINTS, Part.VALIDATION, Part.UNKNOWN),
)


def random_history(seed: int) -> TimeFacts:
    """Attempts overlap and lie outside of the run, clocks jump, and numbers may be anything."""
    draw = Random(seed)
    odd = draw.random() < 0.3

    def moment() -> float:
        strange = (math.nan, math.inf, -math.inf, 1e308, -5.0, 1e12)
        return draw.choice(strange) if odd and draw.random() < 0.2 else draw.uniform(0, 200)

    def number() -> int:
        return draw.randint(0, 4)

    return TimeFacts(
        begin=draw.uniform(0, 50),
        until=moment(),
        attempts=[
            AttemptTimes(
                number=n, begin=moment(), end=draw.choice([None, moment()]),
                restarted=draw.random() < 0.5, last_step=draw.randint(0, 50),
            )
            for n in draw.sample(range(5), number())
        ],
        intervals=[
            Interval(
                attempt=number(), begin=moment(), end=moment(), part=draw.choice(OVERLAPPING),
                cause=draw.choice(["", "frozen"]), unsupervised=draw.random() < 0.2,
            )
            for _ in range(draw.randint(0, 12))
        ],
        blocks=[
            StepBlock(
                attempt=number(), rank=draw.randint(0, 2), group=draw.randint(0, 8),
                first_step=draw.randint(0, 60), last_step=draw.randint(0, 60),
                batches=draw.randint(0, 5), end=moment(), seconds=moment(), fetch_s=moment(),
            )
            for _ in range(draw.randint(0, 30))
        ],
        node_of={0: 0, 1: 1, 2: 1},
    )  # fmt: skip


@pytest.mark.parametrize("block", range(4))
def test_the_parts_sum_to_the_wall_clock(block: int) -> None:
    for seed in range(500 * block, 500 * block + 500):
        facts = random_history(seed)
        ledger = time_ledger(facts, 8)
        ends = (facts.begin, facts.until)
        begin, until = (round(t * 1e6) if math.isfinite(t * 1e6) else 0 for t in ends)
        assert ledger.run.wall_us == max(0, until - begin), seed
        assert sum(attempt.wall_us for attempt in ledger.attempts) == ledger.run.wall_us, seed
        for account in (ledger.run, *ledger.attempts, *ledger.machines, *ledger.ranks):
            assert sum(account.parts_us.values()) == account.wall_us, seed
            assert min(account.parts_us.values(), default=0) >= 0, seed
            assert sum(account.stalls_us.values()) == account.us(Part.STALLS), seed
        for account in (*ledger.machines, *ledger.ranks):
            assert account.wall_us == ledger.run.wall_us, seed


def steps(
    attempt: int, begin: float, count: int, seconds: float = 1.0, **changes: Any
) -> list[StepBlock]:
    """Steps without gaps from ``begin`` on, the first one with the number ``first``."""
    first = changes.pop("first", 1)
    values = {"rank": 0, "fetch_s": 0.0, "batches": 1, **changes}
    return [
        StepBlock(
            attempt=attempt, group=first + n, first_step=first + n, last_step=first + n,
            end=begin + (n + 1) * seconds, seconds=seconds, **values,
        )
        for n in range(count)
    ]  # fmt: skip


def one_attempt(until: float, **facts: Any) -> Account:
    """Account of a run with one attempt from 0 to ``until``."""
    attempt = AttemptTimes(number=1, begin=0.0, end=until, last_step=1 << 40)
    return time_ledger(TimeFacts(begin=0.0, until=until, attempts=[attempt], **facts)).run


def interval(part: Part, begin: float, end: float, **changes: Any) -> Interval:
    return Interval(attempt=1, begin=begin, end=end, part=part, **changes)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(
            {"blocks": steps(1, 10.0, 20)},
            {"training": 20, "start_up": 10, "shutdown": 10},
            id="start, steps, end",
        ),
        pytest.param(
            {
                "blocks": [
                    *steps(1, 10.0, 20, fetch_s=0.25),
                    *steps(1, 10.0, 20, rank=1, fetch_s=0.75),
                    *steps(1, 10.0, 20, rank=2, fetch_s=0.5),
                ]
            },
            {"training": 5, "data": 15, "start_up": 10, "shutdown": 10},
            id="the rank that waits longest for data",
        ),
        pytest.param(
            {"blocks": [*steps(1, 10.0, 1, 6.0), *steps(1, 16.0, 14, first=2)]},
            {"training": 15, "compilation": 5, "start_up": 10, "shutdown": 10},
            id="the first step compiles",
        ),
        pytest.param(
            {
                "blocks": [*steps(1, 0.0, 10), *steps(1, 20.0, 20, first=11)],
                "intervals": [interval(Part.VALIDATION, 10.0, 18.0)],
            },
            {"training": 30, "validation": 8, "between_steps": 2},
            id="a validation between two steps",
        ),
        pytest.param(
            {
                "blocks": [
                    *steps(1, 0.0, 10),
                    *steps(1, 10.0, 1, 11.0, first=11),
                    *steps(1, 21.0, 19, first=12),
                ],
                "intervals": [
                    interval(Part.CHECKPOINTS, 12.0, 15.0),
                    interval(Part.STALLS, 14.0, 20.0, cause="frozen"),
                    interval(Part.PAUSES, 19.0, 20.0),
                ],
            },
            {"training": 32, "checkpoints": 2, "stalls": 5, "pauses": 1},
            id="a pause before a stall before a checkpoint before a step",
        ),
        pytest.param(
            {
                "blocks": [*steps(1, 0.0, 12), *steps(1, 30.0, 10, first=13)],
                "intervals": [interval(Part.UNKNOWN, 10.0, 25.0, unsupervised=True)],
            },
            {"training": 22, "between_steps": 5, "unknown": 13},
            id="what ranks recorded without a supervisor counts",
        ),
        pytest.param(
            {"intervals": [interval(Part.UNKNOWN, 5.0, 40.0)]},
            {"start_up": 5, "unknown": 35},
            id="a program that reports no steps",
        ),
    ],
)  # fmt: skip
def test_each_moment_has_one_part(facts: dict[str, Any], expected: dict[str, int]) -> None:
    account = one_attempt(40.0, **facts)
    assert {part: us / 1e6 for part, us in account.parts_us.items()} == expected


def test_attempts_restarts_and_repeated_steps() -> None:
    facts = TimeFacts(
        begin=0.0,
        until=120.0,
        attempts=[
            AttemptTimes(number=1, begin=20.0, end=50.0, last_step=10),
            AttemptTimes(number=2, begin=60.0, end=75.0, last_step=20, restarted=True),
            AttemptTimes(number=3, begin=100.0, end=120.0, last_step=1 << 40),
        ],
        blocks=[
            *steps(1, 30.0, 20, fetch_s=0.5),
            *steps(2, 65.0, 10, first=11),
            *steps(3, 105.0, 15, first=21),
        ],
    )
    ledger = time_ledger(facts, 8)
    assert {part: us / 1e6 for part, us in ledger.run.parts_us.items()} == {
        "training": 30, "data": 5, "start_up": 20, "repeated_steps": 10, "restarts": 10,
        "queue": 20, "stopped": 25,
    }  # fmt: skip
    assert [(a.number, a.wall_us // 1_000_000) for a in ledger.attempts] == [
        (0, 20), (1, 40), (2, 40), (3, 20),
    ]  # fmt: skip
    # Of what was neither queue nor stopped by a person.
    assert ledger.goodput == pytest.approx(30 / 75)


def test_of_a_window_that_was_replaced_in_part_the_rest_counts() -> None:
    attempt = AttemptTimes(number=1, begin=0.0, end=10.0, last_step=5)
    window = StepBlock(
        attempt=1, rank=0, group=0, first_step=1, last_step=10, batches=10, end=10.0,
        seconds=10.0, fetch_s=4.0,
    )  # fmt: skip
    facts = TimeFacts(begin=0.0, until=10.0, attempts=[attempt], blocks=[window])
    parts = time_ledger(facts).run.parts_us
    assert {part: us / 1e6 for part, us in parts.items()} == {
        "training": 3, "data": 2, "repeated_steps": 5,
    }  # fmt: skip


def test_a_window_ends_before_the_next_one_begins() -> None:
    """Only the mean of the times of a window is known, which a long first step shifts."""
    slow = StepBlock(
        attempt=1, rank=0, group=0, first_step=1, last_step=64, batches=64, end=36.0,
        seconds=26.3, fetch_s=0.0,
    )  # fmt: skip
    others = [
        StepBlock(
            attempt=1, rank=0, group=n, first_step=64 * n, last_step=64 * n + 63, batches=64,
            end=26.3 + 6.4 * n, seconds=6.4, fetch_s=0.0,
        )
        for n in range(1, 4)
    ]  # fmt: skip
    account = one_attempt(45.5, blocks=[slow, *others])
    assert account.parts_us == {"training": 25_600_000, "compilation": 19_900_000}


def test_a_live_run_does_not_know_the_step_in_progress() -> None:
    attempt = AttemptTimes(number=1, begin=0.0, end=None, last_step=1 << 40)
    facts = TimeFacts(begin=0.0, until=13.0, attempts=[attempt], blocks=steps(1, 0.0, 10))
    assert time_ledger(facts).run.parts_us == {"training": 10_000_000, "unknown": 3_000_000}


def saves(every: float, seconds: float, until: float) -> list[Interval]:
    count = int(until / every)
    return [
        interval(Part.CHECKPOINTS, (n + 1) * every - seconds, (n + 1) * every) for n in range(count)
    ]


@pytest.mark.parametrize(
    ("facts", "loader", "begins"),
    [
        ({"fetch_s": 0.41}, LoaderSetting(preset="p", workers=2, best_workers=6),
         ["The run waits for data 41 % of the time: 6 workers instead of 2 (measured by"]),
        ({"fetch_s": 0.41}, LoaderSetting(preset="p"),
         ["The run waits for data 41 % of the time: `ltui bench data p` measures"]),
        ({"fetch_s": 0.05}, LoaderSetting(), []),
        ({"intervals": saves(180.0, 11.0, 7200.0)}, LoaderSetting(),
         ["Checkpoints every 3 min cost 6 %: every 7 min would do (Young's rule from 11.0 s a "
          "checkpoint and no restart in 2.0 h)."]),
        ({"intervals": saves(180.0, 0.2, 7200.0)}, LoaderSetting(), []),
        ({"intervals": saves(180.0, 60.0, 360.0)}, LoaderSetting(), []),
        ({"fetch_s": 0.2, "intervals": [interval(Part.VALIDATION, 0.0, 3000.0)]}, LoaderSetting(),
         ["Validation takes 42 % of the time: half as often would gain 21 %.",
          "The run waits for data 12 % of the time: give its DataLoader more workers"]),
    ],
)  # fmt: skip
def test_advice_comes_in_the_order_of_its_gain(
    facts: dict[str, Any], loader: LoaderSetting, begins: list[str]
) -> None:
    fetch_s = facts.pop("fetch_s", 0.0)
    attempt = AttemptTimes(number=1, begin=0.0, end=7200.0, last_step=1 << 40)
    history = TimeFacts(
        begin=0.0, until=7200.0, attempts=[attempt], blocks=steps(1, 0.0, 7200, fetch_s=fetch_s),
        **facts,
    )  # fmt: skip
    found = advice(time_ledger(history), history, loader)
    assert len(found) == len(begins)
    assert all(one.text.startswith(text) for one, text in zip(found, begins, strict=True)), found


def test_steps_that_are_often_repeated_need_more_checkpoints() -> None:
    attempts = [
        AttemptTimes(number=n + 1, begin=n * 3600.0, end=n * 3600.0 + 3600, restarted=n > 0,
                     last_step=int((n + 0.5) * 3600))
        for n in range(4)
    ]  # fmt: skip
    blocks = [b for n in range(4) for b in steps(n + 1, n * 3600.0, 3600, first=n * 3600 + 1)]
    intervals = [
        Interval(attempt=n, begin=n * 3600.0 - 1802, end=n * 3600.0 - 1800, part=Part.CHECKPOINTS)
        for n in range(1, 5)
    ]
    facts = TimeFacts(
        begin=0.0, until=14400.0, attempts=attempts, blocks=blocks, intervals=intervals
    )
    (found,) = advice(time_ledger(facts), facts, LoaderSetting())
    assert found.text.startswith(
        "Repeated steps cost 50 %: a checkpoint every 2 min instead of 1.0 h"
    )
