"""The rule of the step consensus and its table.

That all ranks act at one boundary in every interleaving is in ``test_delayed_views.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.training.rank.coordination.step_consensus import (
    DEPARTED,
    LAST_STEP,
    Action,
    BarrierTable,
    Move,
    boundary_position,
    next_move,
    passed_state,
    waiting_state,
)
from tests.tensor_queue.children import run_child

HERE = boundary_position(1, 10)
BEFORE, AFTER = boundary_position(1, 9), boundary_position(1, 11)
VALIDATING = boundary_position(1, 10, 1)


def test_positions_grow_along_the_run() -> None:
    places = [
        boundary_position(1, 9),
        boundary_position(1, 10),
        boundary_position(1, 10, 1),
        boundary_position(1, 10, 2),
    ]
    places += [boundary_position(1, 11), boundary_position(2, 0), boundary_position(2, 0, 1)]
    words = [word for place in places for word in (waiting_state(place), passed_state(place))]
    assert words == sorted(set(words))
    assert passed_state(boundary_position(4095, LAST_STEP, 1 << 19)) < DEPARTED
    assert DEPARTED < 1 << 63


def test_a_departed_rank_does_not_hold_up_the_next_request(tmp_path: Path) -> None:
    tables = [BarrierTable(tmp_path / "table", rank, 2) for rank in (0, 1)]
    number = tables[0].publish(Action.PAUSE)
    tables[0].set_acted(number)
    assert not tables[0].can_publish()
    tables[1].set_state(DEPARTED)
    assert tables[0].can_publish(), "rank 0 could never continue"


@pytest.mark.parametrize(
    ("words", "acted", "move"),
    [
        ([waiting_state(HERE)], [0], Move.ACT),
        ([waiting_state(HERE), waiting_state(HERE)], [0, 0], Move.ACT),
        ([waiting_state(HERE), passed_state(BEFORE)], [0, 0], Move.WAIT),
        ([waiting_state(HERE), 0], [0, 0], Move.WAIT),
        ([waiting_state(HERE), waiting_state(BEFORE)], [0, 0], Move.WAIT),
        ([waiting_state(HERE), passed_state(HERE)], [0, 0], Move.PROCEED),
        ([waiting_state(HERE), waiting_state(VALIDATING)], [0, 0], Move.PROCEED),
        ([waiting_state(HERE), waiting_state(AFTER)], [0, 0], Move.PROCEED),
        ([waiting_state(HERE), DEPARTED], [0, 0], Move.PROCEED),
        ([waiting_state(HERE), passed_state(HERE)], [0, 7], Move.ACT),
    ],
)
def test_next_move(words: list[int], acted: list[int], move: Move) -> None:
    assert next_move([7] * len(words), words, acted, HERE, 7) is move


def test_a_rank_that_has_not_read_the_request_is_waited_for() -> None:
    """It may wait at this boundary because of the request before, and pass it any time."""
    here = [waiting_state(HERE)] * 2
    assert next_move([7, 6], here, [6, 6], HERE, 7) is Move.WAIT
    assert next_move([7, 7], here, [6, 6], HERE, 7) is Move.ACT
    assert next_move([7, 6], here, [6, 7], HERE, 7) is Move.ACT


def test_dead_peers_are_detected(tmp_path: Path) -> None:
    table = BarrierTable(tmp_path / "b", 0, 2)
    assert table.dead_peers() == []
    run_child(lambda: BarrierTable(tmp_path / "b", 1, 2))
    assert table.dead_peers() == [1]
    table.close()


def test_save_results_wait_for_every_rank(tmp_path: Path) -> None:
    tables = [BarrierTable(tmp_path / "b", rank, 2) for rank in range(2)]
    tables[0].set_save_result(1, ok=True)
    assert tables[0].save_results(1) is None
    tables[1].set_save_result(1, ok=False)
    assert tables[0].save_results(1) is False
    for table in tables:
        table.set_save_result(2, ok=True)
    assert tables[1].save_results(2) is True
    for table in tables:
        table.close()
