"""A rank that passes boundaries, for simulations of the step consensus."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from ltui.training.rank.coordination.step_consensus import (
    Action,
    BarrierTable,
    Move,
    boundary_position,
    passed_state,
    waiting_state,
)

_SAVING = (Action.STOP, Action.CHECKPOINT)


class SimulatedRank:
    """A rank as ``RankCoordinator`` drives it.

    ``program`` is advanced by one memory access at a time, so that a simulation may interleave
    ranks in any order.
    """

    def __init__(
        self,
        table: BarrierTable,
        last: int,
        publish: Callable[[int], None] | None = None,
        save: Callable[[int], bool] | None = None,
    ) -> None:
        """``last`` is the last step.

        ``publish`` is called with the step before each boundary. Rank 0 publishes requests and
        stop plans in it, and nowhere else, as ``RankCoordinator`` does. ``save`` saves a checkpoint
        and returns if that succeeded; without it no action saves one.
        """
        self.table, self.last, self.publish, self.save = table, last, publish, save
        self.acted_at: list[tuple[int, Action, int]] = []
        """Number of each request, its action, and the step at which this rank acted on it."""
        self.saved: list[bool] = []
        """The result of each checkpoint on which the ranks agreed."""
        self.done = table.words[0]
        self.step = 0
        self.program = self.run()

    def run(self) -> Iterator[None]:
        table = self.table
        while self.step < self.last:
            self.step += 1
            position = boundary_position(1, self.step)
            yield  # the batch itself
            if self.publish is not None:
                self.publish(self.step)
                yield
            while table.words[0] != self.done or (yield from self.await_planned_stop(position)):
                number, action = table.request()
                yield
                table.set_seen(number)
                yield
                table.set_state(waiting_state(position))
                yield
                while (move := table.next_move(position, number)) is Move.WAIT:
                    yield
                if move is Move.PROCEED:
                    break
                yield
                table.set_acted(number)
                self.done = number << 4 | action
                self.acted_at.append((number, action, self.step))
                if self.publish is not None and action is Action.STOP:
                    table.plan_stop(0, 0)
                yield
                if self.save is not None and action in _SAVING:
                    yield from self.save_together(self.save)
            yield
            table.set_state(passed_state(position))

    def await_planned_stop(self, position: int) -> Generator[None, None, bool]:
        """Return True if there is a request."""
        table = self.table
        yield
        if not table.is_stop_planned(position):
            return False
        table.set_state(waiting_state(position))
        while True:
            yield
            if table.words[0] != self.done:
                return True
            if not table.is_stop_planned(position):
                return False
            if self.publish is not None and table.can_publish():
                table.publish(Action.STOP)
                return True
            if table.any_rank_beyond(position):
                return False

    def save_together(self, save: Callable[[int], bool]) -> Iterator[None]:
        number = len(self.saved) + 1
        table = self.table
        table.set_save_result(number, ok=save(number))
        yield
        while (result := table.save_results(number)) is None:
            yield
        self.saved.append(result)
