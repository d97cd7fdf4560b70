"""The machines of a run on several: which ranks run where, and which cannot be observed now. Pure.

On one machine ``nodes`` is empty, and so are the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ltui.training.state.run_snapshot import NodeSnapshot, NodeState

LOST_AFTER_S = 3.0
"""Age in seconds of a machine's last report beyond which its ranks cannot be observed any more.
A report that is a second or two late is common on a busy network."""
_LOST_STATES = frozenset(
    {NodeState.UNREACHABLE, NodeState.FROZEN, NodeState.AGENT_DEAD, NodeState.GONE}
)
_LONGEST_RESEND_S = 120.0
"""Maximum of Linux's time between two attempts to send a segment (TCP_RTO_MAX)."""
_RESEND_MARGIN_S = 10.0
"""Seconds that ranks, and the reports of them, may take after that."""
MAY_BE_LATE = frozenset({NodeState.CONNECTED, NodeState.SILENT})
"""States in which it is not known why a report is late."""

NO_MACHINES: Mapping[int, str] = MappingProxyType({})
"""The names of the ranks' machines in a run on one machine, where they are left out of texts."""


def rank_machines(nodes: Sequence[NodeSnapshot]) -> Mapping[int, str]:
    """Return rank -> name of its machine; empty on one machine."""
    if len(nodes) < 2:
        return NO_MACHINES
    return {rank: node.name for node in nodes for rank in node.ranks}


def rank_nodes(nodes: Sequence[NodeSnapshot]) -> dict[int, int]:
    """Return rank -> number of its machine; empty on one machine."""
    return {rank: node.node for node in nodes for rank in node.ranks}


def lost_machines(nodes: Sequence[NodeSnapshot]) -> dict[int, NodeSnapshot]:
    """Return number -> machine of those whose ranks cannot be observed now."""
    return {
        node.node: node
        for node in nodes
        if node.state in _LOST_STATES
        or (node.state in MAY_BE_LATE and (node.link_age_s or 0.0) > LOST_AFTER_S)
    }


def report_ages_ns(nodes: Sequence[NodeSnapshot]) -> dict[int, int]:
    """Return rank -> age in nanoseconds of the report that contains its pulse.

    Ranks of node 0, which the head observes itself, are left out.
    """
    return {
        rank: round(node.link_age_s * 1e9)
        for node in nodes
        if node.link_age_s is not None
        for rank in node.ranks
    }


def resend_s(cut_s: float) -> float:
    """Return the seconds after the end of a cut within which TCP sends lost data again.

    TCP doubles the time between its attempts, to two minutes at most, so the last attempt during
    the cut and the first one after it are at most as far apart as the cut lasted (RFC 6298).
    """
    return min(cut_s, _LONGEST_RESEND_S) + _RESEND_MARGIN_S


def resumes_by_itself(node: NodeSnapshot) -> bool:
    """Return True if the link was cut, and TCP may not have sent the lost data again yet."""
    if node.cut_s is None or node.restored_s is None or node.state is not NodeState.CONNECTED:
        return False
    return node.restored_s <= resend_s(node.cut_s)


MOST_NAMED = 6
"""Maximum number of ranks or machines that a sentence lists."""


def machines_text(names: Sequence[str]) -> str:
    """Return ``machine b``, ``machines b and c`` or ``machines b, c, d and 5 others``."""
    return names_text("machine", names)


def names_text(noun: str, names: Sequence[str]) -> str:
    """Return the noun with one name, with a few of them, or with three and how many others."""
    if len(names) == 1:
        return f"{noun} {names[0]}"
    if len(names) > MOST_NAMED:
        return f"{noun}s {', '.join(names[:3])} and {len(names) - 3} others"
    return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"
