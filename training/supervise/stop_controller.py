"""Carry out stop, pause and checkpoint requests: write them for the ranks, and escalate a stop.

Called by the supervisor's loop only. Requests reach the ranks through the control file. Signals
are sent only in the stages of the stop escalation.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from ltui.training.lifecycle.rank_queue_poller import is_dead, local_processes
from ltui.training.lifecycle.run_processes import send_signal
from ltui.training.lifecycle.stop_escalation import INTERRUPT_AGAIN_S, StopEscalation, StopStage
from ltui.training.process.identity import ProcessIdentity
from ltui.training.shared.defaults import STOP_TIMEOUT_S
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.state.run_snapshot import RunState
from ltui.training.tensor_queue.control_block import (
    Command,
    ControlFile,
    ControlFileError,
    ControlState,
)

NOT_STOPPED = "not stopped: "
"""Prefix of the detail of a run whose ranks could not save and therefore continue to train."""


class StopController:
    """The pending requests of one attempt, and the stop that is in progress (``escalation``).

    ``error`` is the reason why the last request could not be carried out. ``forced_reason`` is set
    once force is used to stop the run.
    """

    def __init__(self, control_path: Path, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """``stop_signal`` stops a command of which ltui saves no checkpoint."""
        self._control_path = control_path
        self._stop_signal = stop_signal
        self._control: ControlFile | None = None
        self._request_id = 0
        self._sent: set[tuple[StopStage, ProcessIdentity, int]] = set()
        self._interrupted_s: dict[ProcessIdentity, float] = {}
        """Rank -> monotonic second of its first SIGINT."""
        self.escalation: StopEscalation | None = None
        self.pausing = False
        self.forced_reason: str | None = None
        self.has_signalled = False
        """True if this supervisor has sent a signal to a living process of the run."""
        self.error: str | None = None

    # -- requests ------------------------------------------------------------------------------

    def stop(self, now_s: float, timeout_s: float, telemetry: bool) -> None:
        """Begin a stop. If one is in progress, only shorten its time limit.

        ``telemetry``: there are ranks that can save a checkpoint and stop at the same step.
        """
        if self.escalation is None:
            self.escalation = StopEscalation(now_s, timeout_s, telemetry)
            self.error = None
            if telemetry:
                self.request(Command.STOP)
        else:
            until_s = now_s + timeout_s - self.escalation.began_s
            self.escalation = replace(
                self.escalation, timeout_s=min(self.escalation.timeout_s, until_s)
            )

    def stop_failed(self, reason: str) -> None:
        """End the stop, because the ranks could not save a checkpoint and continue to train.

        Using force would lose the progress that the ranks refused to lose.
        """
        if (
            self.escalation is not None
            and not self.escalation.kill_at_once
            and self.forced_reason is None
        ):
            self.escalation = None
            self.error = f"{NOT_STOPPED}{reason} A kill would still end it."

    def checkpoint_saved(self) -> None:
        """Forget why the last stop failed: the ranks can save again."""
        if (self.error or "").startswith(NOT_STOPPED):
            self.error = None

    def pause_failed(self, reason: str) -> None:
        """End a pause that is requested, because a rank cannot take part in it."""
        if self.pausing:
            self.pausing, self.error = False, f"not paused: {reason}"

    def kill(self, now_s: float, stalled: str = "") -> None:
        """Kill the run at once. ``stalled``: the verdict that was active, for the detail."""
        began = self.escalation or StopEscalation(now_s, 0.0, telemetry=False)
        self.escalation = replace(began, kill_at_once=True, stalled=stalled)

    def request(self, command: Command) -> None:
        """Send ``command`` to the ranks, which carry it out together at the next step."""
        if command in (Command.PAUSE, Command.CONTINUE):
            self.pausing = command is Command.PAUSE
        try:
            control = self._open()
            last = control.read().request
            self._request_id = max(self._request_id, last.request_id if last else 0) + 1
            control.request(command, self._request_id)
        except (OSError, ControlFileError) as error:
            self.error = f"the ranks cannot be reached: {error}"

    def is_requested(self, pulses: Mapping[int, PulseState | None]) -> bool:
        """Return True if ranks have not acted yet on the last request."""
        live = (p for p in pulses.values() if p is not None and p.outcome is Outcome.RUNNING)
        return any(pulse.decision_done < self._request_id for pulse in live)

    def plan_stop(self, step: int | None, epochs: int | None) -> None:
        """Set the step or the number of epochs at which the ranks stop; None removes it."""
        try:
            if self._control is None and step is None and epochs is None:
                return
            self._open().plan(step, epochs)
        except (OSError, ControlFileError) as error:
            self.error = f"the ranks cannot be reached: {error}"

    def detect_rank_stop(self, now_s: float, pulses: Mapping[int, PulseState | None]) -> bool:
        """Begin the escalation if ranks stop without a request. Return True if it begins now.

        This happens when a rank received a signal, or when the ranks reached a planned step.
        """
        live = [p for p in pulses.values() if p is not None and p.telemetry_ok]
        if self.escalation is not None or not live:
            return False
        stopping = any(p.phase is Phase.STOPPING or p.outcome is Outcome.STOPPED for p in live)
        # A rank may have received a signal on which the ranks have not yet agreed. After the death
        # of a rank it is the launcher that ends the others by a signal.
        if not stopping and (not self.signal_of_rank() or _any_rank_died(pulses)):
            return False
        self.escalation = StopEscalation(now_s, STOP_TIMEOUT_S, telemetry=True)
        self.error = None
        return True

    def signal_of_rank(self) -> int:
        """Return the number of a stop signal that a rank of this machine received, or 0."""
        control = self._read()
        return 0 if control is None else control.signal

    def _read(self) -> ControlState | None:
        """Return the content of the control file, or None if it does not exist or is damaged."""
        try:
            if self._control is None and not self._control_path.exists():
                return None
            return self._open().read()
        except (OSError, ControlFileError):
            return None

    def _open(self) -> ControlFile:
        if self._control is None:
            self._control_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._control = ControlFile.open(self._control_path)
        return self._control

    def restore(self, escalation: StopEscalation | None) -> None:
        """Restore the requests of the previous supervisor: a stop (``escalation``) or a pause."""
        self.escalation = escalation
        state = self._read()
        if state is not None and state.request is not None:
            self._request_id = state.request.request_id
            self.pausing = state.request.kind is Command.PAUSE

    # -- each tick -----------------------------------------------------------------------------

    def escalate(
        self,
        now_s: float,
        pulses: Mapping[int, PulseState | None],
        engine: ProcessIdentity | None,
        others: Mapping[int, ProcessIdentity],
    ) -> None:
        """Send the signals of the current stage, each once to every process.

        ``others`` are processes of ranks without a pulse.
        """
        if self.escalation is None:
            return
        stage = self.escalation.stage(now_s)
        ranks = {*local_processes(pulses).values(), *others.values()}
        if stage is StopStage.TERMINATE and engine is not None:
            self._signal_once(stage, engine, self._stop_signal, group=True)
            # A process that is stopped (SIGSTOP) does not handle a signal until it continues.
            for process in {engine, *ranks}:
                self._signal_once(stage, process, signal.SIGCONT, turn=2)
        elif stage is StopStage.INTERRUPT:
            # The first SIGINT sets a flag in the rank. The second interrupts it, as Ctrl-C does.
            for process in ranks:
                first_s = self._interrupted_s.setdefault(process, now_s)
                turn = 1 if now_s - first_s < INTERRUPT_AGAIN_S else 2
                self._signal_once(stage, process, signal.SIGINT, turn=turn)
        elif stage is StopStage.KILL:
            for process in ranks:
                self._signal_once(stage, process, signal.SIGKILL)
            if engine is not None:
                self._signal_once(stage, engine, signal.SIGKILL, group=True)
        self.forced_reason = self.escalation.forced_reason(now_s)

    def _signal_once(
        self,
        stage: StopStage,
        process: ProcessIdentity,
        number: int,
        *,
        group: bool = False,
        turn: int = 1,
    ) -> None:
        if (stage, process, turn) in self._sent:
            return
        self._sent.add((stage, process, turn))
        self.has_signalled = self.has_signalled or process.alive()
        if group:
            send_signal(process, number, group=True)
        send_signal(process, number)

    # -- the state of the run ------------------------------------------------------------------

    def state(self, pulses: Mapping[int, PulseState | None], state: RunState) -> RunState:
        """Return the state of a live run, given ``state`` without the effect of requests."""
        live = [p for p in pulses.values() if p is not None and p.outcome is Outcome.RUNNING]
        if self.escalation is not None or any(p.phase is Phase.STOPPING for p in live):
            return RunState.STOPPING
        if live and all(p.phase is Phase.PAUSED for p in live):
            return RunState.PAUSED
        if self.pausing:
            return RunState.PAUSING
        return state

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None


def _any_rank_died(pulses: Mapping[int, PulseState | None]) -> bool:
    """Return True if a rank has raised, or if its process has ended before its training."""
    return any(
        pulse.outcome is Outcome.RAISED or is_dead(pulse)
        for pulse in pulses.values()
        if pulse is not None
    )
