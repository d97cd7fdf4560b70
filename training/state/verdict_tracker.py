"""Verdicts over time: which are new, which are over, and when one has stood long enough to act on.

Pure. What is said of a verdict in one line is here too, so that events, calls and front ends agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ltui.training.config.run_spec import LEVELS, StallPolicy
from ltui.training.state.run_snapshot import Verdict

GRAVE = frozenset({"dead", "stalled"})
"""Levels that the policy's ``then`` answers; a slow run or a warning is left alone."""


def gravity(level: str) -> int:
    """0 for the gravest level; an unknown one is the least grave."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def gravest_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Open ones before those that are over, then by level, then the oldest first."""
    return sorted(
        verdicts,
        key=lambda v: (v.ended is not None, gravity(v.level), v.began is None, v.began or 0.0),
    )


def headline(verdict: Verdict) -> str:
    """``STALLED: rank 2 stands still in forward``. Holds what a run wrote: clean it to show it."""
    return f"{verdict.level.upper()}: {verdict.cause}"


@dataclass(frozen=True, slots=True)
class Stand:
    """A verdict in force, as it reads now."""

    verdict: Verdict
    seen_s: float
    """The monotonic second at which it was first seen, or became graver."""
    told_as: str | None = None
    """The gravest level that it was told of as."""

    @property
    def told(self) -> bool:
        return self.told_as is not None


@dataclass(frozen=True, slots=True)
class Standing:
    """The verdicts in force, from one look to the next."""

    stands: tuple[Stand, ...] = ()

    def follow(
        self, now: Sequence[Verdict], now_s: float, monotonic_s: float, *, settle_s: float = 0.0
    ) -> tuple[Standing, list[Verdict], list[Verdict]]:
        """The verdicts of this moment; those to tell of; those told of that are over.

        One is told of once it has stood for ``settle_s``: a rank is seen to be dead before it is
        known of what; and again where it has become graver. ``now_s`` is unix time, for ``ended``.
        """
        before, stands, tell = list(self.stands), [], []
        for verdict in now:
            if verdict.ended is not None:
                continue
            old = next((s for s in before if _same(s.verdict, verdict)), None)
            if old is not None:
                before.remove(old)
            if old is None or gravity(verdict.level) < gravity(old.verdict.level):
                told_as = None if old is None else old.told_as
                stand = Stand(verdict, monotonic_s, told_as)
            else:
                stand = replace(old, verdict=verdict)
            news = stand.told_as is None or gravity(verdict.level) < gravity(stand.told_as)
            if news and monotonic_s - stand.seen_s >= settle_s:
                tell.append(verdict)
                stand = replace(stand, told_as=verdict.level)
            stands.append(stand)
        over = [_ended(s.verdict, now_s) for s in before if s.told]
        return Standing(tuple(stands)), tell, over

    def to_act_on(self, policy: StallPolicy, monotonic_s: float) -> Verdict | None:
        """The gravest verdict that has stood as long as the policy wants before it acts."""
        if policy.then not in ("stop", "restart"):
            return None
        ripe = [
            s.verdict
            for s in self.stands
            if s.verdict.level in GRAVE and monotonic_s - s.seen_s >= policy.then_after_s
        ]
        return gravest_first(ripe)[0] if ripe else None


def _ended(verdict: Verdict, now_s: float) -> Verdict:
    return replace(verdict, ended=max(now_s, verdict.began or now_s))


def _same(one: Verdict, other: Verdict) -> bool:
    """Whether they are of one thing: its words, and what is known of its cause, may change."""
    if one.kind == other.kind and one.began == other.began:
        return True
    if one.culprits != other.culprits or one.level != other.level:
        return False
    return (one.kind, one.place) == (other.kind, other.place) or (
        one.level in GRAVE and bool(one.culprits)
    )


def superseded(verdict: Verdict, others: Sequence[Verdict]) -> bool:
    """Whether one of ``others`` says the same better: it began as this did and lasted longer."""
    return any(
        (o.culprits, o.level) == (verdict.culprits, verdict.level)
        and o.kind != verdict.kind
        and abs((o.began or 0.0) - (verdict.began or 0.0)) < 1.0
        and (o.ended is None or (verdict.ended is not None and o.ended > verdict.ended))
        for o in others
    )


def calls_somebody(verdict: Verdict, policy: StallPolicy) -> bool:
    """Whether ``on_verdict`` is to be called for it."""
    return policy.on_verdict is not None and gravity(verdict.level) <= gravity(
        policy.on_verdict_level
    )
