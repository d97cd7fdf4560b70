"""Act on verdicts: events when they begin and end, hooks, and the verdict that the policy acts on.

Only the supervisor's loop uses it. Hooks run in a thread of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.state.run_event import Event
from ltui.training.state.run_snapshot import Verdict, to_json
from ltui.training.state.verdict_tracker import VerdictTracker, headline, triggers_hook
from ltui.training.supervise.watchdog.verdict_hooks import VerdictHooks

SETTLE_S = 1.5
"""Seconds that a verdict must last before it is reported, because its cause may show only then."""

RECOVERY_SETTLE_S = 5.0
"""Seconds that a slow rank must be as fast as the others before its recovery is reported."""


class VerdictNotifier:
    """Reports the verdicts of one attempt from tick to tick."""

    def __init__(self, spec: RunSpec, attempt: int, run_dir: str) -> None:
        self._policy = spec.stall
        self._tracker = VerdictTracker()
        self._hooks = VerdictHooks(spec, attempt, run_dir)
        self._policy_has_acted = False
        self._over: list[tuple[float, Verdict]] = []
        """Verdicts that have ended and are not reported yet, with the monotonic time."""

    def restore(self, verdicts: Sequence[Verdict], now_s: float, monotonic_s: float) -> None:
        """Take over the verdicts that an earlier supervisor of the attempt has already reported."""
        self._tracker, _, _ = self._tracker.update(verdicts, now_s, monotonic_s)

    def update(
        self, verdicts: Sequence[Verdict], now_s: float, monotonic_s: float, *, ending: bool
    ) -> list[Event]:
        """Return the events that follow from the current verdicts, and start hooks.

        ``ending`` means that the run was asked to end: ranks that die are not reported.
        """
        reportable = [v for v in verdicts if not (ending and v.level == VerdictLevel.DEAD)]
        self._tracker, begun, ended = self._tracker.update(
            reportable, now_s, monotonic_s, settle_s=SETTLE_S
        )
        events = [self._report(verdict, now_s) for verdict in begun]
        self._over += [(monotonic_s, verdict) for verdict in ended]
        # Ranks that have ended are not slow any more, but they have not recovered either.
        due = [
            (at, v)
            for at, v in self._over
            if begun or v.level != VerdictLevel.SLOW or monotonic_s - at >= RECOVERY_SETTLE_S
        ]
        self._over = [one for one in self._over if one not in due]
        events += [_event(now_s, "verdict_over", _recovered_text(v), v) for _, v in due]
        return events + self._hooks.take_events()

    def verdict_to_act_on(self, monotonic_s: float) -> Verdict | None:
        """Return the verdict that the policy acts on now: at most one in an attempt."""
        if self._policy_has_acted:
            return None
        verdict = self._tracker.verdict_to_act_on(self._policy, monotonic_s)
        self._policy_has_acted = verdict is not None
        return verdict

    def end(self, now_s: float) -> list[Event]:
        """End all verdicts with the attempt. Report first those that have not been reported."""
        active, self._tracker = self._tracker.active, VerdictTracker()
        events = [self._report(entry.verdict, now_s) for entry in active if not entry.reported]
        for _, verdict in self._over:
            events.append(_event(now_s, "verdict_over", _until_the_end(verdict), verdict))
        self._over = []
        for entry in active:
            verdict = replace(entry.verdict, ended=max(now_s, entry.verdict.began or now_s))
            events.append(_event(now_s, "verdict_over", _until_the_end(verdict), verdict))
        return events + self._hooks.take_events()

    def wait_for_hooks(self, timeout_s: float) -> list[Event]:
        """Wait for hooks in progress, at most ``timeout_s``, and return events with the results."""
        self._hooks.close(timeout_s)
        return self._hooks.take_events()

    def _report(self, verdict: Verdict, now_s: float) -> Event:
        """Return the event of a new verdict, and start its hook."""
        if triggers_hook(verdict, self._policy):
            self._hooks.call(verdict)
        return _event(now_s, "verdict", headline(verdict), verdict)


def _event(now_s: float, kind: str, text: str, verdict: Verdict) -> Event:
    # The evidence is stored with the verdict itself. An event is one line.
    return Event(now_s, kind, text, {"verdict": to_json(replace(verdict, evidence={}))})


def _until_the_end(verdict: Verdict) -> str:
    return f"Active until the run ended: {headline(verdict)}"


def _recovered_text(verdict: Verdict) -> str:
    lasted = ""
    if verdict.began is not None:
        lasted = f" after {max(0.0, (verdict.ended or 0.0) - verdict.began):.0f} s"
    return f"Recovered{lasted}. It was: {headline(verdict)}"
