"""Divide the time of a training step into phases by marks inside of Lightning's training loop.

Every mark adds the time since the last mark to the phase that ends, and begins the next phase. The
marks wrap methods of the Trainer's own objects, because a callback hook costs twice as much. They
are:

- the profiler hooks around ``next(iterator)``, which enclose exactly the wait for data, without the
  broadcast of Lightning that precedes it
- the logger connector's ``on_batch_start`` (``telemetry.py``)
- the strategy's ``backward``
- the precision plugin's ``_after_closure``, which runs between the backward pass and the
  optimizer's step

The rest of the step belongs to no phase: callbacks, logging, and waiting for other ranks in
Lightning's own broadcast for each step.

Between two marks a part of a training step runs, which evicts most of this code from the CPU's
caches. So a mark costs as much as the memory that it touches. Therefore the class has slots, and
the code of a mark stands in every place that needs it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ltui.training.rank import lightning_internals
from ltui.training.shared.record_types import Phase

clock = time.monotonic_ns

# Plain numbers: reading a member from an enumeration takes a call.
FETCH, TRANSFER, FORWARD = int(Phase.FETCH), int(Phase.TRANSFER), int(Phase.FORWARD)
BACKWARD, OPTIMIZER = int(Phase.BACKWARD), int(Phase.OPTIMIZER)
BATCH_END = int(Phase.BATCH_END)

_NO_TIME = [0] * len(Phase)


class PhaseClock:
    """The phase that a rank is in, and the time in each phase since the last batch ended.

    ``mark`` is ``PulseWriter.mark``, with the indices 0 phase, 1 time of its begin, 2 batch, 3
    global step. ``failed`` is called with an error in a mark.
    """

    __slots__ = (
        *("_before_fetch", "_failed", "doing", "mark", "next_batch", "profiling", "since"),
        *("spent", "step_began"),
    )

    def __init__(self, mark: Any, failed: Callable[[BaseException], None]) -> None:
        self.mark = mark
        self._failed = failed
        self.next_batch = 0
        self.profiling = True
        """True if a profiler is in use. Lightning's default profiler does nothing."""
        self.doing = self._before_fetch = BATCH_END
        """The phase that the time since the last mark belongs to."""
        self.since = self.step_began = clock()
        self.spent = list(_NO_TIME)
        """Nanoseconds in each phase since the end of the previous batch."""

    def restart(self) -> None:
        """Exclude the time since the last batch (validation, a pause) from the next step."""
        self.spent[:] = _NO_TIME
        self.doing = BATCH_END
        self.since = self.step_began = clock()

    def install_marks(self, trainer: Any) -> None:
        """Wrap the methods between which the phases lie, except for the start of a batch."""
        epoch_loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
        lightning_internals.wrap_fetch_hooks(epoch_loop, self._mark_fetch)
        strategy.backward = self._marked(strategy.backward, BACKWARD)
        lightning_internals.wrap_after_closure(
            strategy.precision_plugin, lambda method: self._marked(method, OPTIMIZER)
        )
        lightning_internals.wrap_after_manual_step(
            epoch_loop.manual_optimization, self._mark_manual_step
        )

    def _mark_fetch(
        self, before: Callable[[], None], after: Callable[[], None]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        def on_before_fetch() -> None:
            now, doing, mark = clock(), self.doing, self.mark
            self.spent[doing] += now - self.since
            self.since = now
            self._before_fetch = doing
            if doing == BATCH_END:
                mark[2] = self.next_batch
            mark[1] = now
            mark[0] = self.doing = FETCH
            if self.profiling:
                before()

        def on_after_fetch() -> None:
            if self.profiling:
                after()
            now, mark = clock(), self.mark
            self.spent[self.doing] += now - self.since
            self.since = now
            mark[1] = now
            # If the user's module iterates the loader itself, it fetches inside training_step.
            before_fetch = self._before_fetch
            mark[0] = self.doing = TRANSFER if before_fetch == BATCH_END else before_fetch

        return on_before_fetch, on_after_fetch

    def _marked(self, method: Callable[..., Any], phase: int) -> Callable[..., Any]:
        """Return a wrapper of ``method`` that enters ``phase``, which lasts until the next mark."""

        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            try:
                now = clock()
                self.spent[self.doing] += now - self.since
                self.since = now
                mark = self.mark
                mark[1] = now
                mark[0] = self.doing = phase
            except Exception as error:  # noqa: BLE001
                self._failed(error)
            return method(*args, **kwargs)

        return marked

    def _mark_manual_step(self, after_step: Callable[[], None]) -> Callable[[], None]:
        def on_after_step() -> None:
            after_step()
            now, mark = clock(), self.mark
            self.spent[self.doing] += now - self.since
            self.since = now
            mark[1] = now
            mark[0] = self.doing = FORWARD

        return on_after_step
