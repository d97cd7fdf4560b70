"""The stop ladder: ask the ranks, interrupt them, kill them; each rung has its time. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

INTERRUPT_S = 8.0
"""What the ranks get between the interrupt and the kill."""


class StopStage(IntEnum):
    AGREE = 1
    """Ranks are asked to save and leave at one step."""
    TERMINATE = 2
    """A command without telemetry got SIGTERM."""
    INTERRUPT = 3
    KILL = 4


@dataclass(frozen=True, slots=True)
class StopEscalation:
    """Where a stop stands. Times are of one steady clock, in seconds."""

    began_s: float
    timeout_s: float
    telemetry: bool
    """Whether there are ranks that can be asked."""
    kill_at_once: bool = False

    def stage(self, now_s: float) -> StopStage:
        waited_s = now_s - self.began_s
        if self.kill_at_once:
            return StopStage.KILL
        if not self.telemetry:
            return StopStage.TERMINATE if waited_s < self.timeout_s else StopStage.KILL
        if waited_s < self.timeout_s:
            return StopStage.AGREE
        return StopStage.INTERRUPT if waited_s < self.timeout_s + INTERRUPT_S else StopStage.KILL

    def describe(self, now_s: float) -> str:
        """What is being waited for, for people."""
        waited_s = now_s - self.began_s
        stage = self.stage(now_s)
        if stage is StopStage.AGREE:
            return (
                "stopping: waiting for the ranks to stop together, "
                f"{waited_s:.0f} s of {self.timeout_s:.0f} s"
            )
        if stage is StopStage.TERMINATE:
            return (
                "stopping: waiting for the command to end, "
                f"{waited_s:.0f} s of {self.timeout_s:.0f} s"
            )
        if stage is StopStage.INTERRUPT:
            return (
                f"stopping: the ranks did not stop together within {self.timeout_s:.0f} s"
                " and were interrupted"
            )
        return "stopping: killing the remaining processes"

    def forced_reason(self, now_s: float) -> str | None:
        """Why force was used, as ``ending`` says it; None where it was not."""
        if self.kill_at_once:
            return "on request"
        if self.stage(now_s) < StopStage.INTERRUPT:
            return None
        who = "the ranks did not stop together" if self.telemetry else "the command did not end"
        return f"because {who} within {self.timeout_s:.0f} s"
