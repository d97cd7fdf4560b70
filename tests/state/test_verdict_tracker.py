"""Verdicts over time: which are new, which have ended, and which the policy acts on."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.state.run_snapshot import Verdict
from ltui.training.state.verdicts import (
    VerdictTracker,
    is_superseded,
    most_severe_first,
    triggers_hook,
)

STALL = Verdict(kind="frozen", level="stalled", culprits=(1,), cause="rank 1 hangs", began=100.0)
DEAD = Verdict(kind="exited", level="dead", culprits=(0,), cause="rank 0 is gone", began=101.0)
SLOW = Verdict(kind="straggler", level="slow", culprits=(2,), cause="rank 2 is slow", began=90.0)
AGAIN = replace(STALL, cause="rank 1 hangs for 9 s")
KILLED = replace(DEAD, kind="killed", cause="rank 0 was killed by SIGKILL", place="forward")
STALL_DIED = replace(DEAD, culprits=(1,), began=100.0)
SLOWER = replace(STALL, level="slow", cause="rank 1 is slow")
OTHER = replace(STALL, culprits=(3,), cause="rank 3 hangs", began=102.0)
LOST = Verdict(kind="node_unreachable", level="warning", nodes=(1,), cause="b", began=100.0)
MORE_LOST = replace(LOST, nodes=(1, 2), cause="b and c", began=100.2)
OTHER_LOST = replace(LOST, nodes=(5,), cause="f")


@pytest.mark.parametrize(
    ("judgements", "settle_s", "reports"),
    [
        # A verdict is new once and over once, also if its words change, or its level for a time.
        ([(0, STALL), (1, AGAIN), (2, AGAIN), (3,), (4,)], 0.0,
         ["new: rank 1 hangs", "over: rank 1 hangs for 9 s"]),
        ([(0, DEAD), (0.2, KILLED), (2, KILLED)], 1.5, ["new: rank 0 was killed by SIGKILL"]),
        ([(0, SLOWER), (120, STALL), (121, SLOWER), (122, STALL), (123,)], 0.0,
         ["new: rank 1 is slow", "new: rank 1 hangs", "over: rank 1 hangs"]),
        # A stalled rank that dies is news, and so is another rank or machine.
        ([(0, STALL), (1, STALL_DIED)], 0.0,
         ["new: rank 1 hangs", "new: rank 0 is gone", "over: rank 1 hangs"]),
        ([(0, STALL), (1, STALL, OTHER), (2, OTHER)], 0.0,
         ["new: rank 1 hangs", "new: rank 3 hangs", "over: rank 1 hangs"]),
        # One cut that reaches more machines is one verdict.
        ([(0, LOST), (1, MORE_LOST), (2, OTHER_LOST)], 0.0, ["new: b", "new: f", "over: b and c"]),
        # Not before it has settled, and not one that has ended.
        ([(0, STALL), (1,), (2,)], 1.5, []),
        ([(0, replace(STALL, ended=101.0))], 0.0, []),
    ],
)  # fmt: skip
def test_a_verdict_is_reported_when_it_begins_and_ends(
    judgements: list[tuple[Any, ...]], settle_s: float, reports: list[str]
) -> None:
    tracker, found = VerdictTracker(), []
    for at, *verdicts in judgements:
        tracker, new, over = tracker.update(verdicts, 1000 + at, at, settle_s=settle_s)
        found += [f"new: {v.cause}" for v in new] + [f"over: {v.cause}" for v in over]
    assert found == reports


def test_a_verdict_that_becomes_more_severe_is_acted_on_from_then() -> None:
    tracker = VerdictTracker()
    for at, verdict in ((0.0, SLOWER), (120.0, STALL), (149.0, STALL)):
        tracker, _, _ = tracker.update([verdict], 1000 + at, at)
    policy = StallPolicy(then="stop", then_after_s=30)
    assert tracker.verdict_to_act_on(policy, 149.0) is None
    assert tracker.verdict_to_act_on(policy, 150.0) == STALL


def test_a_verdict_ends_after_it_began_whatever_the_clock_says() -> None:
    tracker, _, _ = VerdictTracker().update([STALL], 50.0, 0.0)
    _, _, (over,) = tracker.update([], 60.0, 1.0)
    assert over.ended == 100.0


@pytest.mark.parametrize(
    ("policy", "verdicts", "after_s", "acted_on"),
    [
        (StallPolicy(), [DEAD, STALL], 1e9, None),
        (StallPolicy(then="stop", then_after_s=30), [STALL], 29.0, None),
        (StallPolicy(then="stop", then_after_s=30), [STALL], 30.0, STALL),
        (StallPolicy(then="restart", then_after_s=0), [STALL, DEAD], 0.0, DEAD),
        (StallPolicy(then="stop", then_after_s=0), [SLOW], 1e9, None),
        (StallPolicy(then="a later version's"), [STALL], 1e9, None),
    ],
)
def test_the_verdict_that_the_policy_acts_on(
    policy: StallPolicy, verdicts: list[Verdict], after_s: float, acted_on: Verdict | None
) -> None:
    tracker, _, _ = VerdictTracker().update(verdicts, 1000.0, 5.0)
    tracker, _, _ = tracker.update(verdicts, 1000.0, 5.0 + after_s)
    assert tracker.verdict_to_act_on(policy, 5.0 + after_s) == acted_on


def test_the_levels_that_trigger_the_hook() -> None:
    hook = StallPolicy(on_verdict="http://a/b", on_verdict_level="stalled")
    assert [triggers_hook(v, hook) for v in (DEAD, STALL, SLOW)] == [True, True, False]
    assert triggers_hook(SLOW, StallPolicy(on_verdict=("mail",)))
    assert not triggers_hook(DEAD, StallPolicy())


def test_the_most_severe_and_the_oldest_come_first() -> None:
    over = replace(DEAD, ended=200.0)
    unknown = Verdict(kind="x", level="a later version's", cause="c")
    assert most_severe_first([unknown, over, SLOW, STALL]) == [STALL, SLOW, unknown, over]


def test_the_first_report_of_a_death_is_superseded_by_a_better_one() -> None:
    first = replace(DEAD, ended=101.2)
    better = replace(DEAD, kind="killed", began=101.0)
    assert is_superseded(first, [first, better])
    assert not is_superseded(better, [first, better])
    assert not is_superseded(STALL, [STALL, better])
