"""What follows from verdicts: events when they begin and end, calls, and what the policy does then.

Used by the supervisor's loop alone; the calls run in a thread of their own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import ProblemError
from ltui.training.state.run_event import Event
from ltui.training.state.run_snapshot import Verdict, to_json
from ltui.training.state.verdict_tracker import VerdictTracker, headline, triggers_hook
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.watchdog.verdict_hooks import VerdictHooks

SETTLE_S = 1.5
"""A verdict that stood for less is told to nobody; its cause is often known only after it."""


class VerdictNotifier:
    """One attempt's verdicts, followed from tick to tick."""

    def __init__(self, spec: RunSpec, attempt: int, run_dir: str) -> None:
        self._policy = spec.stall
        self._tracker = VerdictTracker()
        self._calls = VerdictHooks(spec, attempt, run_dir)
        self._answered = False

    def restore(self, verdicts: Sequence[Verdict], now_s: float, monotonic_s: float) -> None:
        """Those that a supervisor before this one has told of already."""
        self._tracker, _, _ = self._tracker.update(verdicts, now_s, monotonic_s)

    def update(
        self, verdicts: Sequence[Verdict], now_s: float, monotonic_s: float, *, ending: bool
    ) -> list[Event]:
        """Take the verdicts of this tick; the events that come of it.

        ``ending``: the run was asked to end, so that a rank that dies is no news.
        """
        heard = [v for v in verdicts if not (ending and v.level == "dead")]
        self._tracker, new, over = self._tracker.update(
            heard, now_s, monotonic_s, settle_s=SETTLE_S
        )
        rows = [row for verdict in new for row in self._tell(verdict, now_s)]
        rows += [_row(now_s, "verdict_over", _over(v), v) for v in over]
        return rows + self._told()

    def _tell(self, verdict: Verdict, now_s: float) -> list[Event]:
        if triggers_hook(verdict, self._policy):
            self._calls.call(verdict)
        return [_row(now_s, "verdict", headline(verdict), verdict)]

    def verdict_to_act_on(self, monotonic_s: float) -> Verdict | None:
        """The verdict that the policy acts on now: at most one in an attempt."""
        if self._answered:
            return None
        found = self._tracker.verdict_to_act_on(self._policy, monotonic_s)
        self._answered = found is not None
        return found

    def end(self, now_s: float) -> list[Event]:
        """The attempt is over, and so is every verdict; one that had not settled is told of now."""
        stands, self._tracker = self._tracker.active, VerdictTracker()
        rows = [row for s in stands if not s.reported for row in self._tell(s.verdict, now_s)]
        for stand in stands:
            verdict = replace(stand.verdict, ended=max(now_s, stand.verdict.began or now_s))
            text = f"In force until the run ended: {headline(verdict)}"
            rows.append(_row(now_s, "verdict_over", text, verdict))
        return rows + self._told()

    def wait_for_hooks(self, patience_s: float) -> list[Event]:
        """Wait for calls that are under way, not longer than that; what they came to."""
        self._calls.close(patience_s)
        return self._told()

    def _told(self) -> list[Event]:
        return [Event(t, "on_verdict", text, data) for t, text, data in self._calls.take_events()]


def read_stored_verdicts(run_dir: RunDir) -> tuple[Verdict, ...]:
    """Those in force when a supervisor last wrote; none where that can't be read."""
    try:
        with RunStore(run_dir) as store:
            return store.snapshot().verdicts
    except (ProblemError, sqlite3.Error):
        return ()


def _row(now_s: float, kind: str, text: str, verdict: Verdict) -> Event:
    # Its evidence stands with the verdict itself; an event is a line.
    fields = {"verdict": to_json(replace(verdict, evidence={}))}
    return Event(now_s, kind, text, fields)


def _over(verdict: Verdict) -> str:
    lasted = "" if verdict.began is None else f" after {_lasted(verdict):.0f} s"
    return f"Recovered{lasted}. It was: {headline(verdict)}"


def _lasted(verdict: Verdict) -> float:
    return max(0.0, (verdict.ended or 0.0) - (verdict.began or 0.0))
