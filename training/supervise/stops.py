"""The stops of one attempt: from a request or a stop condition to the saved checkpoint or the kill.

Called by the supervisor's loop only. Requests reach the ranks through the control file. Signals
are sent only in the stages of the stop escalation. ``orders.json`` holds the stop conditions and
the stop that is in progress, so that a supervisor that recovers the run continues with both.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import WRONG_CONTENT, to_json
from ltui.training.lifecycle.rank_queue_poller import is_dead, local_processes
from ltui.training.lifecycle.run_processes import send_signal
from ltui.training.lifecycle.stop_escalation import (
    INTERRUPT_AGAIN_S,
    NOT_SAVED,
    NOT_STOPPED,
    StopEscalation,
    StopStage,
)
from ltui.training.process.identity import ProcessIdentity, boot_id
from ltui.training.shared.defaults import STOP_TIMEOUT_S
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunState
from ltui.training.state.snapshot_from_fold import logged_values
from ltui.training.state.stop_conditions import (
    StopCondition,
    add_condition,
    from_document,
    metric_reason,
    time_reason,
)
from ltui.training.store.run_directory import RunDir, read_json, write_json
from ltui.training.tensor_queue.control_block import (
    Command,
    ControlFile,
    ControlFileError,
    ControlState,
)
from ltui.training.tensor_queue.queue_reader import Poll


class StoredStops(Struct, frozen=True, kw_only=True):
    """The stop conditions of one run, and the stop that is in progress."""

    conditions: tuple[StopCondition, ...] = ()
    attempt: int = 0
    """The attempt that ``escalation`` belongs to."""
    escalation: StopEscalation | None = None


def read_stops(run_dir: RunDir) -> StoredStops:
    """Return the stored stops, or none if the file is missing or unreadable."""
    try:
        document = read_json(run_dir.requests_path) or {}
        same_boot = document.get("boot") == boot_id()
        conditions = [from_document(c) for c in document["conditions"]]
        escalation = document.get("ladder")
        return StoredStops(
            # Monotonic time is not comparable across a reboot.
            conditions=tuple(c for c in conditions if same_boot or c.until_s is None),
            attempt=int(document.get("attempt", 0)),
            escalation=StopEscalation(**escalation) if escalation and same_boot else None,
        )
    except WRONG_CONTENT:
        return StoredStops()


def write_stops(run_dir: RunDir, stored: StoredStops) -> None:
    """Store the stops. Raises ``OSError`` if they cannot be written."""
    document = {
        "boot": boot_id(),
        "conditions": [condition.to_document() for condition in stored.conditions],
        "attempt": stored.attempt,
        "ladder": to_json(stored.escalation),
    }
    write_json(run_dir.requests_path, document)


class Stops:
    """The stop conditions, the requests to the ranks, and the stop in progress (``escalation``).

    ``error`` is the reason why the last request could not be carried out. ``forced_reason`` is set
    once force is used to stop the run.
    """

    def __init__(
        self, run_dir: RunDir, attempt: int, stop_signal: signal.Signals = signal.SIGTERM
    ) -> None:
        """``stop_signal`` stops a command of which ltui saves no checkpoint."""
        self._run_dir = run_dir
        self._attempt = attempt
        self._stop_signal = stop_signal
        self._stored = read_stops(run_dir)
        self._control_path = run_dir.queue_dir(attempt) / "control.bin"
        self._met: dict[StopCondition, str] = {}
        """Conditions on metrics that a value has met -> the reason."""
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

    def restore(self) -> None:
        """Restore the requests of the previous supervisor of this attempt: a stop or a pause."""
        if self._stored.attempt == self._attempt:
            self.escalation = self._stored.escalation
        state = self._read_control()
        if state is not None and state.request is not None:
            self._request_id = state.request.request_id
            self.pausing = state.request.kind is Command.PAUSE

    def record(self) -> None:
        """Store the stop that is in progress, or that there is none."""
        if self.escalation != self._stored.escalation:
            self._store(replace(self._stored, escalation=self.escalation, attempt=self._attempt))

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _store(self, stored: StoredStops) -> None:
        # If the disk is full, the change lasts only as long as this process.
        self._stored = stored
        with contextlib.suppress(OSError):
            write_stops(self._run_dir, stored)

    # -- stop conditions -----------------------------------------------------------------------

    @property
    def conditions(self) -> tuple[StopCondition, ...]:
        return self._stored.conditions

    def descriptions(self) -> tuple[str, ...]:
        """Return the stop conditions in words."""
        return tuple(condition.describe() for condition in self.conditions)

    def continue_from(self, step: int | None) -> None:
        """Let the values after ``step`` count, at which a restart continues; None: all values."""
        passed = [c for c in self.conditions if (c.after_step or 0) > (step or 0)]
        if passed:
            self._set_conditions(
                replace(c, after_step=step) if c in passed else c for c in self.conditions
            )

    def add_conditions(self, conditions: Sequence[StopCondition] | None) -> None:
        """Add conditions; None removes all. They are on disk and with the ranks afterwards."""
        merged: Sequence[StopCondition] = () if conditions is None else self.conditions
        for condition in conditions or ():
            merged = add_condition(merged, condition)
        self._set_conditions(merged)
        self.plan()

    def check_metrics(self, fold: FoldState, polls: Mapping[int, Poll]) -> None:
        """Check the conditions on metrics against every value in the polls that were folded last.

        A value that meets a condition counts even if a later value of the same poll does not.
        """
        for condition in self.conditions:
            if condition.kind == "metric" and condition not in self._met:
                values = logged_values(fold, polls, condition.metric or "")
                if (reason := metric_reason(condition, values)) is not None:
                    self._met[condition] = reason

    def pop_due(self, now_s: float, steady_s: float) -> str | None:
        """Remove the first condition that is met. Return why it is met, or None.

        ``now_s`` is wall clock time, ``steady_s`` monotonic time.
        """
        for condition in self.conditions:
            if condition.kind == "metric":
                reason = self._met.pop(condition, None)
            else:
                reason = time_reason(condition, now_s, steady_s)
            if reason is not None:
                self._set_conditions(c for c in self.conditions if c is not condition)
                return reason
        return None

    def plan(self) -> None:
        """Set the step or the number of epochs at which the ranks stop by themselves."""
        step = min((c.step for c in self.conditions if c.step is not None), default=None)
        epochs = min((c.epochs for c in self.conditions if c.epochs is not None), default=None)
        try:
            if self._control is not None or step is not None or epochs is not None:
                self._open_control().plan(step, epochs)
        except (OSError, ControlFileError) as error:
            self.error = f"the ranks cannot be reached: {error}"

    def _set_conditions(self, conditions: Iterable[StopCondition]) -> None:
        self._store(replace(self._stored, conditions=tuple(conditions)))

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

    def stop_failed(self, reason: str, step: int = 0, epochs: int = 0) -> None:
        """End the stop, because the ranks could not save a checkpoint and continue to train.

        Using force would lose the progress that the ranks refused to lose. Conditions at or before
        this position are removed, because the ranks have passed it.
        """
        if (
            self.escalation is not None
            and not self.escalation.kill_at_once
            and self.forced_reason is None
        ):
            self.escalation = None
            self.error = f"{NOT_STOPPED}{reason} A kill would still end it."
        reachable = [
            c
            for c in self.conditions
            if not (c.step is not None and c.step <= step)
            and not (c.epochs is not None and c.epochs <= epochs)
        ]
        if len(reachable) != len(self.conditions):
            self._set_conditions(reachable)
        self.plan()

    def save_failed(self, reason: str) -> None:
        """Say why the ranks could not save a checkpoint that was requested."""
        if self.escalation is None:
            self.error = f"{NOT_SAVED}{reason}"

    def checkpoint_saved(self) -> None:
        """Forget why the last stop or save failed: the ranks can save again."""
        if (self.error or "").startswith((NOT_STOPPED, NOT_SAVED)):
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
            control = self._open_control()
            last = control.read().request
            self._request_id = max(self._request_id, last.request_id if last else 0) + 1
            control.request(command, self._request_id)
        except (OSError, ControlFileError) as error:
            self.error = f"the ranks cannot be reached: {error}"

    def is_requested(self, pulses: Mapping[int, PulseState | None]) -> bool:
        """Return True if ranks have not acted yet on the last request."""
        live = (p for p in pulses.values() if p is not None and p.outcome is Outcome.RUNNING)
        return any(pulse.decision_done < self._request_id for pulse in live)

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
        control = self._read_control()
        return 0 if control is None else control.signal

    def _read_control(self) -> ControlState | None:
        """Return the content of the control file, or None if it does not exist or is damaged."""
        try:
            if self._control is None and not self._control_path.exists():
                return None
            return self._open_control().read()
        except (OSError, ControlFileError):
            return None

    def _open_control(self) -> ControlFile:
        if self._control is None:
            self._control_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._control = ControlFile.open(self._control_path)
        return self._control

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


def _any_rank_died(pulses: Mapping[int, PulseState | None]) -> bool:
    """Return True if a rank has raised, or if its process has ended before its training."""
    return any(
        pulse.outcome is Outcome.RAISED or is_dead(pulse)
        for pulse in pulses.values()
        if pulse is not None
    )
