"""Stop escalation: request a stop from the ranks, then interrupt them, then kill them. Pure.

Each stage has a time limit, after which the next stage begins.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

INTERRUPT_S = 8.0
"""Seconds between the interrupt and the kill."""

INTERRUPT_AGAIN_S = 2.0
"""Seconds between the first and the second SIGINT to a rank.

Longer than ``REPEAT_S`` of the ranks (``training/rank/coordination/stop_signals.py``).
"""

NOT_STOPPED, NOT_SAVED = "not stopped: ", "not saved: "
"""Prefix of the detail of a run whose ranks could not save and therefore continue to train."""


class StopStage(IntEnum):
    """A stage of a stop. Later stages use more force."""

    AGREE = 1
    """The ranks are requested to save a checkpoint and exit at the same step."""
    TERMINATE = 2
    """A command of which ltui saves no checkpoint receives its stop signal, usually SIGTERM."""
    INTERRUPT = 3
    """The ranks receive SIGINT."""
    KILL = 4
    """All processes receive SIGKILL."""


class StopEscalation(Struct, frozen=True):
    """A stop that is in progress. Times are monotonic, in seconds."""

    began_s: float
    timeout_s: float
    telemetry: bool
    """True if there are ranks that can stop at the same step on request."""
    kill_at_once: bool = False
    stalled: str = ""
    """The verdict that was active when the run was killed; empty if there was none."""

    def stage(self, now_s: float) -> StopStage:
        """Return the stage that is due at ``now_s``."""
        waited_s = now_s - self.began_s
        if self.kill_at_once:
            return StopStage.KILL
        if not self.telemetry:
            return StopStage.TERMINATE if waited_s < self.timeout_s else StopStage.KILL
        if waited_s < self.timeout_s:
            return StopStage.AGREE
        return StopStage.INTERRUPT if waited_s < self.timeout_s + INTERRUPT_S else StopStage.KILL

    def describe(self, now_s: float, *, saving: bool = False, stopped: bool = False) -> str:
        """Return a sentence that states what the stop is waiting for.

        ``saving``: the ranks save the checkpoint. ``stopped``: all ranks have stopped training, so
        the checkpoint is there.
        """
        waited = f"{now_s - self.began_s:.0f} s of {self.timeout_s:.0f} s"
        stage = self.stage(now_s)
        if stage is StopStage.AGREE and stopped:
            return f"stopping: all ranks have stopped; waiting for the program to end, {waited}"
        if stage is StopStage.AGREE and saving:
            return f"stopping: saving the checkpoint, {waited}"
        if stage is StopStage.AGREE:
            return f"stopping: waiting for the ranks to stop together, {waited}"
        if stage is StopStage.TERMINATE:
            return f"stopping: waiting for the command to end, {waited}"
        if stage is StopStage.INTERRUPT:
            if stopped:
                return f"stopping: the program did not end within {self.timeout_s:.0f} s"
            return (
                f"stopping: the ranks did not stop together within {self.timeout_s:.0f} s"
                " and were interrupted"
            )
        return "stopping: killing the remaining processes"

    def forced_reason(self, now_s: float) -> str | None:
        """Return why force is used, as it appears in the detail of the end, or None."""
        if self.kill_at_once:
            return f"on request ({self.stalled})" if self.stalled else "on request"
        if self.stage(now_s) < StopStage.INTERRUPT:
            return None
        who = "the ranks did not stop together" if self.telemetry else "the command did not end"
        return f"because {who} within {self.timeout_s:.0f} s"
