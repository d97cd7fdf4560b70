"""How a run is doing, in one sentence that also a tired person understands. Pure."""

from __future__ import annotations

from ltui.training.run.snapshot import LIVE, RankSnapshot, RunSnapshot, RunState
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line

ALIKE = 1.1
"""A slowest rank within this of the fastest is as fast as the others."""


def state_sentence(snapshot: RunSnapshot) -> str:
    """Of a run without a verdict: that nothing stalls, and who is slowest; or how it ended."""
    if snapshot.state not in LIVE:
        return _ended(snapshot)
    if snapshot.state is RunState.PAUSED:
        return "not stalled: the run is paused, so its ranks stand still on purpose"
    if snapshot.state is not RunState.RUNNING:
        return f"not stalled: the run is {snapshot.state.value}"
    if not snapshot.ranks:
        return "not stalled as far as is known: no rank has reported"
    count = len(snapshot.ranks)
    who = "its rank advances" if count == 1 else f"all {count} ranks advance"
    return f"not stalled: {who}{_slowest(snapshot.ranks)}"


def _slowest(ranks: tuple[RankSnapshot, ...]) -> str:
    known = [(r.step_s, r.rank) for r in ranks if r.step_s]
    if not known:
        return ""
    (slow_s, slow), (fast_s, _) = max(known), min(known)
    if len(known) == 1:
        return f", {formats.duration(slow_s)} a step"
    if slow_s < ALIKE * fast_s:
        return f", equally fast ({formats.duration(slow_s)} a step)"
    return (
        f", slowest is rank {slow} ({formats.duration(slow_s)} a step, "
        f"the fastest takes {formats.duration(fast_s)})"
    )


def _ended(snapshot: RunSnapshot) -> str:
    detail = clean_line(snapshot.detail or "")
    word = snapshot.state.value
    return detail if detail.lower().startswith(word) else f"{word}: {detail}" if detail else word
