"""The points of the throughput that the supervisor stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ltui.training.state.metric_name_patterns import MAX_RANK_RATES, TOTAL_RANK
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.snapshot_from_fold import POINT_INTERVAL_S, next_point, throughput
from ltui.training.tensor_queue.queue_reader import Record

from .records import steps


def fold_of(*ranks: Sequence[Record]) -> FoldState:
    state = FoldState()
    for rank, records in enumerate(ranks):
        state = fold(state, rank, records)
    return state


def test_a_total_is_made_only_when_every_rank_has_a_rate() -> None:
    assert next_point(FoldState(), [], None) is None
    assert next_point(fold_of(steps(20, 0.1)), [0, 1], None) is None
    both = fold_of(steps(20, 0.1), steps(20, 0.1, samples=64))
    point = next_point(both, [0, 1], None)
    assert point is not None
    assert point.rates == pytest.approx({TOTAL_RANK: 320 + 640, 0: 320, 1: 640})
    assert point.step == 20
    assert point.rates[TOTAL_RANK] == throughput(both, point.t_ns).samples_per_s
    assert next_point(both, [0, 1], point) is None, "no step has ended since"
    later = fold_of(*[steps(20 + int(POINT_INTERVAL_S / 0.1) + 1, 0.1)] * 2)
    assert next_point(later, [0, 1], point) is not None


@pytest.mark.parametrize("ranks", [1, MAX_RANK_RATES + 1])
def test_ranks_have_no_point_of_their_own_if_there_is_one_or_too_many(ranks: int) -> None:
    point = next_point(fold_of(*[steps(20, 0.1)] * ranks), range(ranks), None)
    assert point is not None
    assert point.rates == pytest.approx({TOTAL_RANK: 320 * ranks})
