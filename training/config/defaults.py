"""Default values that more than one part of ltui uses.

The rank package cannot import this module; ``training/rank/environment.py`` repeats the defaults
that it needs for ranks that are started without the variables of a supervisor.
"""

from __future__ import annotations

STOP_TIMEOUT_S = 60.0
"""Seconds that ranks have to stop together and save a checkpoint before the stop escalates."""

CHECKPOINTS_KEPT = 2
"""Number of periodic checkpoints that are kept."""

MIRROR_PATTERN = r"tensorboard(:[^\0]+)?"
"""Values of the setting ``mirror``: ``tensorboard`` or ``tensorboard:FOLDER``."""
