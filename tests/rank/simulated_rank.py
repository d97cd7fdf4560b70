"""A rank that passes boundaries, for simulations of the step consensus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ltui.training.rank.coordination.step_consensus import (
    Action,
    BarrierTable,
    Move,
    boundary_position,
    passed_state,
    waiting_state,
)


class SimulatedRank:
    """A rank as ``RankCoordinator`` drives it.

    ``program`` is advanced by one memory access at a time, so that a simulation may interleave
    ranks in any order.
    """

    def __init__(
        self, table: BarrierTable, last: int, publish: Callable[[int], None] | None = None
    ) -> None:
        """``last`` is the last step.

        ``publish`` is called with the step before each boundary. Rank 0 publishes requests in it,
        and nowhere else, as ``RankCoordinator`` does.
        """
        self.table, self.last, self.publish = table, last, publish
        self.acted_at: list[tuple[int, Action, int]] = []
        """Number of each request, its action, and the step at which this rank acted on it."""
        self.done = table.words[0]
        self.step = 0
        self.program = self.run()

    def run(self) -> Iterator[None]:
        while self.step < self.last:
            self.step += 1
            position = boundary_position(1, self.step)
            yield  # the batch itself
            if self.publish is not None:
                self.publish(self.step)
                yield
            while self.table.words[0] != self.done:
                number, action = self.table.request()
                yield
                self.table.set_state(waiting_state(position))
                yield
                while (move := self.table.next_move(position, number)) is Move.WAIT:
                    yield
                if move is Move.PROCEED:
                    break
                yield
                self.table.set_acted(number)
                self.done = number << 4 | action
                self.acted_at.append((number, action, self.step))
                yield
            yield
            self.table.set_state(passed_state(position))
