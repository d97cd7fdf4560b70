"""The history of a run as it was at a moment of the past. SQL only."""

from __future__ import annotations

from msgspec.structs import replace

from ltui.training.state.run_snapshot import Verdict
from ltui.training.store.curve_reader import FloatArray
from ltui.training.store.history_queries import Span, spans
from ltui.training.store.history_reader import RunStore, StoredAttempt, StoredEvent
from ltui.training.store.history_windows import STEPS, Series, SeriesPart
from ltui.training.store.run_directory import RunDir

_STEP_TIMES = Series(STEPS, "step_s")


class PastStore(RunStore):
    """Read-only access to the part of a run's history that was there at a moment.

    Methods raise ``StoreError`` as those of ``RunStore``.
    """

    def __init__(self, run_dir: RunDir, at: float, place: tuple[int, int] | None) -> None:
        """``at``: unix seconds. ``place``: attempt and step at that moment; if it is not known, it
        is found by the times of the steps."""
        super().__init__(run_dir)
        self._at = at
        try:
            self._attempt, self._step = place or self._place()
        except BaseException:
            self.close()
            raise

    def _place(self) -> tuple[int, int]:
        begun = [a.number for a in super().attempts() if (a.started_at or 0.0) <= self._at]
        attempt = max(begun, default=0)
        part = SeriesPart(self._connection, _STEP_TIMES, attempt, 0, (1 << 60, self._at))
        (last,) = part.rows("max(step)").fetchone()
        if last is None:
            # The first step of a window: the time of a window is the mean of its times.
            (last,) = part.windows("max(first_step)").fetchone()
        return attempt, last or 0

    def part(self, series: Series, attempt: int, rank: int | None) -> SeriesPart:
        """Return what a series of an attempt had until the moment."""
        step = self._step if attempt == self._attempt else 1 << 60
        return SeriesPart(self._connection, series, attempt, rank, (step, self._at))

    def spans(self, begun: int | None = None) -> list[Span]:
        """Return the attempts with steps that counted, first to last."""
        # The attempt replaces steps of earlier ones once it has trained.
        trained = self.part(_STEP_TIMES, self._attempt, 0).has_values()
        newest = self._attempt if trained else self._attempt - 1
        kept = []
        for span in spans(self._connection, begun, newest):
            last = self._step if span.attempt == self._attempt else span.last_step
            kept.append(replace(span, last_step=min(last, span.last_step)))
        return [span for span in kept if span.last_step > 0]

    def metric_names(self) -> list[str]:
        """Return the names of the metrics that had a value."""
        parts = []
        attempts = [span.attempt for span in self.spans()]
        for name in super().metric_names():
            series = self._series(name)
            parts += [(name, self.part(series, n, 0)) for n in attempts if series is not None]
        return sorted({name for name, part in parts if part.has_values()})

    def queue_position(self, attempt: int) -> tuple[int, int] | None:
        """Return a number that changes with the moment, and that of earlier queues of rank 0."""
        position = super().queue_position(attempt)
        return None if position is None else (int(self._at * 1000), position[1])

    def attempts(self) -> list[StoredAttempt]:
        """Return the attempts that had begun, the first one first."""
        return [
            replace(one, ended_at=None if (one.ended_at or 0.0) > self._at else one.ended_at)
            for one in super().attempts()
            if one.number <= self._attempt
        ]

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts that had begun, oldest first."""
        return [
            replace(one, ended=None if (one.ended or 0.0) > self._at else one.ended)
            for one in super().verdicts()
            if one.began is not None and one.began <= self._at
        ]

    def events(self, after_id: int = 0) -> list[StoredEvent]:
        """Return the events until the moment, with a larger id than ``after_id``."""
        return [event for event in super().events(after_id) if event.t <= self._at]

    def gpu_history(
        self, number: int, last_s: float, until: float | None = None
    ) -> dict[str, FloatArray]:
        """Return the readings of a GPU in the ``last_s`` seconds before the moment."""
        return super().gpu_history(number, last_s, self._at if until is None else until)


def time_of_step(store: RunStore, step: int) -> float | None:
    """Return when a step that counts was trained, in unix seconds; None if it is not stored.

    The time of an old step is the mean of those of its window.
    """
    span = next((span for span in store.spans() if span.last_step >= step), None)
    if span is None:
        return None
    part = store.part(_STEP_TIMES, span.attempt, 0)
    rows = part.rows("wall_s", "AND step >= ? AND step <= ? + 8 ORDER BY step LIMIT 1", step, step)
    inside = "AND first_step <= ? AND last_step >= ? ORDER BY level LIMIT 1"
    row = rows.fetchone() or part.windows("wall_s", inside, step, step).fetchone()
    return None if row is None else row[0]
