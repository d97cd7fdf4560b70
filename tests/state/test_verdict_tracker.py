"""Verdicts over time: which are new, which have ended, and which the policy acts on."""

from __future__ import annotations

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


def reports_of(
    *judgements: tuple[float, list[Verdict]], settle_s: float = 0.0
) -> list[tuple[str, str]]:
    """Return (new or over, cause) of all verdicts that were reported."""
    tracker, reports = VerdictTracker(), []
    for at, verdicts in judgements:
        tracker, new, over = tracker.update(verdicts, 1000 + at, at, settle_s=settle_s)
        reports += [("new", v.cause) for v in new] + [("over", v.cause) for v in over]
    return reports


def test_a_verdict_is_new_once_and_over_once() -> None:
    again = replace(STALL, cause="rank 1 hangs for 9 s")
    reports = reports_of((0, [STALL]), (1, [again]), (2, [again]), (3, []), (4, []))
    assert reports == [("new", "rank 1 hangs"), ("over", "rank 1 hangs for 9 s")]


def test_a_better_known_cause_is_the_same_verdict() -> None:
    killed = replace(DEAD, kind="killed", cause="rank 0 was killed by SIGKILL", place="forward")
    assert reports_of((0, [DEAD]), (0.2, [killed]), (2, [killed]), settle_s=1.5) == [
        ("new", "rank 0 was killed by SIGKILL")
    ]


def test_a_stalled_rank_that_dies_is_news() -> None:
    dead = replace(DEAD, culprits=(1,), began=100.0)
    assert [kind for kind, _ in reports_of((0, [STALL]), (1, [dead]))] == ["new", "new", "over"]


def test_a_verdict_that_becomes_more_severe_is_reported_again_and_acted_on_from_then() -> None:
    slow = replace(STALL, level="slow", cause="rank 1 is slow")
    reports = reports_of((0, [slow]), (120, [STALL]), (121, [slow]), (122, [STALL]), (123, []))
    assert reports == [("new", "rank 1 is slow"), ("new", "rank 1 hangs"), ("over", "rank 1 hangs")]
    tracker = VerdictTracker()
    for at, verdict in ((0.0, slow), (120.0, STALL), (149.0, STALL)):
        tracker, _, _ = tracker.update([verdict], 1000 + at, at)
    policy = StallPolicy(then="stop", then_after_s=30)
    assert tracker.verdict_to_act_on(policy, 149.0) is None
    assert tracker.verdict_to_act_on(policy, 150.0) == STALL


def test_two_ranks_at_once_are_two_verdicts() -> None:
    other = replace(STALL, culprits=(3,), cause="rank 3 hangs", began=102.0)
    reports = reports_of((0, [STALL]), (1, [STALL, other]), (2, [other]))
    assert reports == [("new", "rank 1 hangs"), ("new", "rank 3 hangs"), ("over", "rank 1 hangs")]


def test_a_verdict_that_ends_before_it_has_settled_is_not_reported() -> None:
    assert reports_of((0, [STALL]), (1, []), (2, []), settle_s=1.5) == []


def test_a_verdict_ends_after_it_began_whatever_the_clock_says() -> None:
    tracker, _, _ = VerdictTracker().update([STALL], 50.0, 0.0)
    _, _, (over,) = tracker.update([], 60.0, 1.0)
    assert over.ended == 100.0


def test_verdicts_that_have_ended_are_not_active() -> None:
    assert reports_of((0, [replace(STALL, ended=101.0)])) == []


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


def test_one_cut_that_reaches_more_machines_is_one_verdict() -> None:
    lost = Verdict(kind="node_unreachable", level="warning", nodes=(1,), cause="b", began=100.0)
    more = replace(lost, nodes=(1, 2), cause="b and c", began=100.2)
    other = replace(lost, nodes=(5,), cause="f")
    reports = reports_of((0, [lost]), (1, [more]), (2, [other]))
    assert reports == [("new", "b"), ("new", "f"), ("over", "b and c")]
