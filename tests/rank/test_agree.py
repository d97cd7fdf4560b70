"""The rule by which ranks meet: every interleaving ends with all ranks acting at one boundary."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.rank.coordination.step_consensus import (
    GONE,
    Action,
    BarrierTable,
    Move,
    frozen,
    judge,
    passed,
    position,
)

HERE = position(1, 10)
BEFORE, AFTER = position(1, 9), position(1, 11)
VALIDATING = position(1, 10, 1)


def test_boundaries_are_in_the_order_of_the_run() -> None:
    places = [position(1, 9), position(1, 10), position(1, 10, 1), position(1, 10, 2)]
    places += [position(1, 11), position(2, 0), position(2, 0, 1)]
    words = [word for place in places for word in (frozen(place), passed(place))]
    assert words == sorted(set(words))
    assert passed(position(62, (1 << 36) - 1, 1 << 19)) < GONE
    assert GONE < 1 << 63


@pytest.mark.parametrize(
    ("words", "acted", "move"),
    [
        ([frozen(HERE)], [0], Move.ACT),
        ([frozen(HERE), frozen(HERE)], [0, 0], Move.ACT),
        ([frozen(HERE), passed(BEFORE)], [0, 0], Move.WAIT),
        ([frozen(HERE), 0], [0, 0], Move.WAIT),
        ([frozen(HERE), frozen(BEFORE)], [0, 0], Move.WAIT),
        ([frozen(HERE), passed(HERE)], [0, 0], Move.PROCEED),
        ([frozen(HERE), frozen(VALIDATING)], [0, 0], Move.PROCEED),
        ([frozen(HERE), frozen(AFTER)], [0, 0], Move.PROCEED),
        ([frozen(HERE), GONE], [0, 0], Move.PROCEED),
        ([frozen(HERE), passed(HERE)], [0, 7], Move.ACT),
    ],
)
def test_the_rule(words: list[int], acted: list[int], move: Move) -> None:
    assert judge(words, acted, HERE, 7) is move


class Rank:
    """A rank as ``RankCoordinator`` drives it, one memory access at a time."""

    def __init__(self, board: BarrierTable, last: int, leads: bool) -> None:
        self.board, self.last, self.leads = board, last, leads
        self.acted_at: list[tuple[int, int, int]] = []
        self.done = board.words[0]
        self.step = 0
        self.life = self.live()

    def live(self):
        while self.step < self.last:
            self.step += 1
            here = position(1, self.step)
            yield  # the batch itself
            if self.board.words[0] != self.done:
                number, action = self.board.request()
                yield
                self.board.say(frozen(here))
                yield
                while (move := self.board.judge(here, number)) is Move.WAIT:
                    yield
                if move is Move.ACT:
                    yield
                    self.board.set_acted(number)
                    self.done = number << 4 | action
                    self.acted_at.append((number, action, self.step))
                    yield
            yield
            self.board.say(passed(here))


@pytest.mark.parametrize("seed", range(300))
def test_any_interleaving_meets_at_one_step(tmp_path: Path, seed: int) -> None:
    """Ranks of 1 to 4, no more than one step apart (as an all-reduce keeps them) or far apart."""
    dice = random.Random(seed)
    world, steps = dice.randint(1, 4), 12
    lead = dice.choice([1, 1, 3])
    boards = [BarrierTable(tmp_path / "b", rank, world) for rank in range(world)]
    ranks = [Rank(board, steps, board.rank == 0) for board in boards]
    waiting = [Action.PAUSE, Action.CONTINUE, Action.STOP]
    ask_at = dice.randint(1, 8)
    alive = list(ranks)
    for _ in range(100_000):
        if waiting and ranks[0].step >= ask_at and boards[0].all_acted():
            boards[0].publish(waiting.pop(0))
        if not alive:
            break
        rank = dice.choice(alive)
        if rank.step - min(r.step for r in ranks) >= lead:
            continue  # the device holds it back
        if next(rank.life, "end") == "end":
            alive.remove(rank)
    assert not alive, "a rank waits for ever"
    assert len({tuple(rank.acted_at) for rank in ranks}) == 1
    assert len(ranks[0].acted_at) >= 1
    for board in boards:
        board.close()


def test_a_dead_peer_is_seen(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from ltui.training.rank.coordination.step_consensus import BarrierTable; "
        "BarrierTable(Path(sys.argv[1]), 1, 2)"
    )
    board = BarrierTable(tmp_path / "b", 0, 2)
    assert board.dead_peers() == []
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, timeout=60)
    assert board.dead_peers() == [1]
    board.close()


def test_results_wait_for_every_rank(tmp_path: Path) -> None:
    boards = [BarrierTable(tmp_path / "b", rank, 2) for rank in range(2)]
    boards[0].set_save_result(1, ok=True)
    assert boards[0].results(1) is None
    boards[1].set_save_result(1, ok=False)
    assert boards[0].results(1) is False
    for board in boards:
        board.set_save_result(2, ok=True)
    assert boards[1].results(2) is True
    for board in boards:
        board.close()
