"""Default values that more than one part of ltui uses."""

from __future__ import annotations

STOP_TIMEOUT_S = 60.0
"""Seconds that ranks have to stop together and save a checkpoint before the stop escalates."""

CHECKPOINTS_KEPT = 2
"""Number of periodic checkpoints that are kept."""

QUEUE_BYTES = 4 << 20
"""Capacity of each rank's queue."""

SAMPLE_S = 10.0
"""Seconds for which the stacks of ranks are sampled, to find out why one is slower."""

MIRROR_PATTERN = r"tensorboard(:[^\0]+)?"
"""Values of the setting ``mirror``: ``tensorboard`` or ``tensorboard:FOLDER``."""
RERUN_VARIABLE = "LTUI_RERUN"
"""Names the steps that ``ltui rerun`` executes again (``training/rank/step_rerun.py``)."""
