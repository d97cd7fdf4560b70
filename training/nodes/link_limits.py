"""Limits of the silence between the head and the agents, which the user may set."""

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
