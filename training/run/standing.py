"""Verdicts over time: which are new, which are over, and when one has stood long enough to act on.

Pure. What is said of a verdict in one line is here too, so that events, calls and front ends agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ltui.training.run.snapshot import Verdict
from ltui.training.run.spec import LEVELS, StallPolicy

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The verdicts in force, and since when each has been seen."""

    verdicts: tuple[Verdict, ...] = ()
    seen_s: Mapping[tuple[str, float | None], float] = field(default_factory=dict)
    """By kind and ``began``: the monotonic second at which it was first seen."""

    def follow(
        self, now: Sequence[Verdict], now_s: float, monotonic_s: float
    ) -> tuple[Standing, list[Verdict], list[Verdict]]:
        """The verdicts of this moment; those that are new; those that are over, with ``ended``.

        A verdict that only changed its words, or its ranks while its beginning stays, is the same.
        ``now_s`` is unix time, for ``ended``.
        """
        before = list(self.verdicts)
        kept, new, seen = [], [], {}
        for verdict in now:
            if verdict.ended is not None:
                continue
            old = next((v for v in before if _same(v, verdict)), None)
            if old is None:
                new.append(verdict)
                seen[_key(verdict)] = monotonic_s
            else:
                before.remove(old)
                seen[_key(verdict)] = self.seen_s.get(_key(old), monotonic_s)
            kept.append(verdict)
        over = [replace(v, ended=max(now_s, v.began or now_s)) for v in before]
        return Standing(verdicts=tuple(kept), seen_s=seen), new, over

    def to_act_on(self, policy: StallPolicy, monotonic_s: float) -> Verdict | None:
        """The gravest verdict that has stood as long as the policy wants before it acts."""
        if policy.then not in ("stop", "restart"):
            return None
        ripe = [
            v
            for v in self.verdicts
            if v.level in GRAVE
            and monotonic_s - self.seen_s.get(_key(v), monotonic_s) >= policy.then_after_s
        ]
        return gravest_first(ripe)[0] if ripe else None


def _key(verdict: Verdict) -> tuple[str, float | None]:
    return verdict.kind, verdict.began


def _same(one: Verdict, other: Verdict) -> bool:
    return one.kind == other.kind and (
        one.began == other.began or (one.culprits, one.place) == (other.culprits, other.place)
    )


def calls_somebody(verdict: Verdict, policy: StallPolicy) -> bool:
    """Whether ``on_verdict`` is to be called for it."""
    return policy.on_verdict is not None and gravity(verdict.level) <= gravity(
        policy.on_verdict_level
    )
