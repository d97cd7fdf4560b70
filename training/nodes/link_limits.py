"""How often agents report, and how long a silence between them and the head may last."""

from __future__ import annotations

import math
import os

NODE_GONE_VARIABLE = "LTUI_NODE_GONE_S"
HEAD_LOST_VARIABLE = "LTUI_HEAD_LOST_S"

NODE_GONE_S = 300.0
"""Seconds without a report after which the ranks of an unreachable machine count as lost.

A shorter cut of the link ends nothing: the connections of the training survive it.
"""
HEAD_LOST_S = 600.0
"""Seconds without orders after which an agent ends its ranks.

Without the head nobody could stop them, and they would hold their GPUs for ever.
"""

_REPORT_S = 0.25
"""Seconds between two reports of an agent."""
_URGENT_S = 0.03
"""Seconds between two reports while ranks wait for each other at a boundary."""
_READINGS_S = 1.0
"""Seconds between two reports with readings of the machine."""
_REPORTS_PER_S = 125.0
_URGENT_REPORTS_PER_S = 650.0
"""Reports of all agents together in a second from which on each reports less often."""
_LONGEST_REPORT_S = 1.0
"""Longest time between two reports. It must be clearly below the silence that is noticed."""


def report_period_s(nodes: int, *, urgent: bool) -> float:
    """Return the seconds between two reports of an agent in a run on ``nodes`` machines.

    ``urgent``: ranks wait for each other at a boundary.
    """
    shortest_s, per_s = (
        (_URGENT_S, _URGENT_REPORTS_PER_S) if urgent else (_REPORT_S, _REPORTS_PER_S)
    )
    return min(max(shortest_s, nodes / per_s), _LONGEST_REPORT_S)


def readings_period_s(nodes: int) -> float:
    """Return the seconds between two reports with readings of the machine and its processes."""
    return max(_READINGS_S, 2 * report_period_s(nodes, urgent=False))


def node_gone_s() -> float:
    """Return ``LTUI_NODE_GONE_S``, or ``NODE_GONE_S`` if it is not set or no positive number."""
    return _seconds(NODE_GONE_VARIABLE, NODE_GONE_S)


def head_lost_s() -> float:
    """Return ``LTUI_HEAD_LOST_S``, or ``HEAD_LOST_S`` if it is not set or no positive number."""
    return _seconds(HEAD_LOST_VARIABLE, HEAD_LOST_S)


def _seconds(variable: str, default: float) -> float:
    try:
        seconds = float(os.environ.get(variable, default))
    except ValueError:
        return default
    return seconds if math.isfinite(seconds) and seconds > 0 else default
