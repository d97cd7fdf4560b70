"""Verdicts over time: which are new, which have ended, and which have lasted long enough to act on.

Pure. The one-line headline of a verdict is here too, so that all user interfaces show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import BLOCKING_LEVELS, severity
from ltui.training.state.run_snapshot import Verdict

if TYPE_CHECKING:
    from ltui.training.config.run_spec import StallPolicy


def most_severe_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sort verdicts: active before ended, then by level, then the oldest first."""
    return sorted(
        verdicts,
        key=lambda v: (v.ended is not None, severity(v.level), v.began is None, v.began or 0.0),
    )


def headline(verdict: Verdict) -> str:
    """Return a line such as ``STALLED: rank 2 makes no progress in forward``.

    It contains text that the run wrote: remove control characters before showing it.
    """
    return f"{verdict.level.upper()}: {verdict.cause}"


class ActiveVerdict(Struct, frozen=True):
    """A verdict that has not ended, with its newest wording."""

    verdict: Verdict
    since_s: float
    """Monotonic seconds when it was first seen, or when its level became more severe."""
    reported_level: str | None = None
    """The most severe level at which it was reported; None until it is reported."""

    @property
    def reported(self) -> bool:
        return self.reported_level is not None


class VerdictTracker(Struct, frozen=True):
    """The active verdicts, from one judgement to the next."""

    active: tuple[ActiveVerdict, ...] = ()

    def update(
        self, current: Sequence[Verdict], now_s: float, monotonic_s: float, *, settle_s: float = 0.0
    ) -> tuple[VerdictTracker, list[Verdict], list[Verdict]]:
        """Return the next tracker, the verdicts to report now, and the reported ones that ended.

        A verdict is reported once it has lasted ``settle_s`` seconds, because the death of a rank
        is seen before its cause is known. It is reported again if it becomes more severe.
        ``now_s`` is the unix time that ended verdicts get as ``ended``.
        """
        unmatched, active, to_report = list(self.active), [], []
        for verdict in current:
            if verdict.ended is not None:
                continue
            previous = next((a for a in unmatched if _is_same(a.verdict, verdict)), None)
            if previous is not None:
                unmatched.remove(previous)
            if previous is None or severity(verdict.level) < severity(previous.verdict.level):
                reported_level = None if previous is None else previous.reported_level
                entry = ActiveVerdict(verdict, monotonic_s, reported_level)
            else:
                entry = replace(previous, verdict=verdict)
            is_news = entry.reported_level is None or severity(verdict.level) < severity(
                entry.reported_level
            )
            if is_news and monotonic_s - entry.since_s >= settle_s:
                to_report.append(verdict)
                entry = replace(entry, reported_level=verdict.level)
            active.append(entry)
        ended = [_ended(a.verdict, now_s) for a in unmatched if a.reported]
        return VerdictTracker(tuple(active)), to_report, ended

    def verdict_to_act_on(self, policy: StallPolicy, monotonic_s: float) -> Verdict | None:
        """Return the most severe verdict that has lasted ``policy.then_after_s`` seconds.

        Return None if there is none, or if the policy only reports verdicts.
        """
        if policy.then not in ("stop", "restart"):
            return None
        candidates = [
            a.verdict
            for a in self.active
            if a.verdict.level in BLOCKING_LEVELS and monotonic_s - a.since_s >= policy.then_after_s
        ]
        return most_severe_first(candidates)[0] if candidates else None


def _ended(verdict: Verdict, now_s: float) -> Verdict:
    return replace(verdict, ended=max(now_s, verdict.began or now_s))


def _is_same(one: Verdict, other: Verdict) -> bool:
    """Return True if both describe one problem; its wording and known cause may have changed."""
    if (one.nodes or other.nodes) and not one.culprits and not other.culprits:
        return one.kind == other.kind and bool({*one.nodes} & {*other.nodes})
    if one.kind == other.kind and one.began == other.began:
        return True
    if one.culprits != other.culprits or one.level != other.level:
        return False
    return (one.kind, one.place) == (other.kind, other.place) or (
        one.level in BLOCKING_LEVELS and bool(one.culprits)
    )


def is_superseded(verdict: Verdict, others: Sequence[Verdict]) -> bool:
    """Return True if another verdict on the same problem began with this one and lasted longer."""
    return any(
        (o.culprits, o.nodes, o.level) == (verdict.culprits, verdict.nodes, verdict.level)
        and o.kind != verdict.kind
        and abs((o.began or 0.0) - (verdict.began or 0.0)) < 1.0
        and (o.ended is None or (verdict.ended is not None and o.ended > verdict.ended))
        for o in others
    )


def triggers_hook(verdict: Verdict, policy: StallPolicy) -> bool:
    """Return True if the policy's ``on_verdict`` is to be called for the verdict."""
    return policy.on_verdict is not None and severity(verdict.level) <= severity(
        policy.on_verdict_level
    )
