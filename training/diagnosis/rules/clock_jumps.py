"""The wall clock of a machine was set to another time. Pure.

Ages are computed on each machine with a clock that never jumps, so a jump harms no judgement. It
spoils the times in logs and histories, certificates, and libraries that compare wall clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.state.run_snapshot import NodeSnapshot, Verdict
from ltui.training.state.verdict_kinds import VerdictKind

_JUMP_S = 2.0
"""Smallest jump in seconds that is reported; estimates of a skew differ by less."""
_KEPT_S = 60.0
"""Seconds for which the warning stays active."""
_REMEDY = (
    "Let a time service set it (chronyc tracking, timedatectl). Ages and budgets of this run are"
    " not affected."
)


def clock_skews_s(nodes: Sequence[NodeSnapshot]) -> dict[int, float]:
    """Return node -> seconds by which its clock is ahead of node 0's, as far as it is known."""
    return {n.node: n.clock_skew_s for n in nodes if n.clock_skew_s is not None}


def clock_jump_warnings(inputs: PreparedInput) -> list[Verdict]:
    """Return a warning for each machine whose clock jumped within the last minute."""
    if not inputs.machines:
        return []
    jumps_s = _jumps_s(inputs)
    names = {n.node: n.name for n in inputs.nodes}
    warnings = [_warning(inputs, node, names[node], jump) for node, jump in jumps_s.items()]
    return warnings + [v for v in _recent(inputs) if v.nodes[0] not in jumps_s]


def _jumps_s(inputs: PreparedInput) -> dict[int, float]:
    """Return node -> seconds by which its clock jumped since the last judgement.

    If node 0's own clock jumped, every other one seems to have jumped by as much the other way.
    """
    history = inputs.history
    own_s = 0.0
    if history.judged_ns is not None and history.judged_s is not None and inputs.now_s is not None:
        elapsed_s = (inputs.now_ns - history.judged_ns) / 1e9
        own_s = inputs.now_s - history.judged_s - elapsed_s
    own_s = own_s if abs(own_s) >= _JUMP_S else 0.0
    jumps_s = {0: own_s} if own_s else {}
    for node, skew_s in clock_skews_s(inputs.nodes).items():
        before_s = history.clock_skews_s.get(node)
        if before_s is None or node == 0:
            continue
        jump_s = skew_s - before_s + own_s
        # The head's jump may be seen one report earlier or later than in its own clock.
        if abs(jump_s) >= _JUMP_S and not _is_heads_jump(inputs, skew_s - before_s, own_s):
            jumps_s[node] = jump_s
    return jumps_s


def _is_heads_jump(inputs: PreparedInput, change_s: float, own_s: float) -> bool:
    """Return True if a change of a skew is node 0's recent jump."""
    recent = [v.evidence.get("jump_s") for v in _recent(inputs) if v.nodes == (0,)]
    own_jumps_s = [*recent, *([own_s] if own_s else [])]
    return any(
        isinstance(j, (int, float)) and abs(change_s + j) < _JUMP_S for j in own_jumps_s
    ) or (bool(own_s) and abs(change_s) < _JUMP_S)


def _recent(inputs: PreparedInput) -> list[Verdict]:
    """Return the active warnings that are to stay active."""
    now_s = inputs.now_s
    return [
        v
        for v in inputs.history.active.values()
        if v.kind == VerdictKind.CLOCK_JUMP
        and (now_s is None or v.evidence.get("until_ns", 0) > inputs.now_ns)
    ]


def _warning(inputs: PreparedInput, node: int, name: str, jump_s: float) -> Verdict:
    direction = "forward" if jump_s > 0 else "back"
    return Verdict(
        kind=VerdictKind.CLOCK_JUMP,
        level=VerdictLevel.WARNING,
        nodes=(node,),
        place=f"machine {name}",
        cause=(
            f"the clock of machine {name} jumped {direction} by {abs(jump_s):.0f} s: times in its"
            " logs do not fit to those before"
        ),
        remedy=_REMEDY,
        confidence=0.9,
        # The history tells verdicts of one kind apart by when they began.
        began=None if inputs.now_s is None else inputs.now_s + 1e-6 * node,
        evidence={
            "jump_s": round(jump_s, 1),
            "until_ns": inputs.now_ns + round(_KEPT_S * 1e9),
        },
    )
