"""Classify how a run ended, from the facts known after its last process has exited. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.diagnosis.error_texts import is_consequence
from ltui.training.diagnosis.verdict_words import NO_MACHINES, consequences_text, ranks_text
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.shared.record_types import Outcome, PulseState
from ltui.training.state.good_checkpoints import FINITE, newest_checkpoint
from ltui.training.state.record_fold import FoldedEvent, FoldState
from ltui.training.state.run_snapshot import CheckpointInfo, RunState, Verdict


class EndFacts(Struct, frozen=True, kw_only=True):
    """The facts from which ``classify_end`` decides how an attempt ended."""

    exit: EngineExit | None = None
    shim_died: bool = False
    pulses: Mapping[int, PulseState | None] = field(default_factory=dict)
    fold: FoldState = field(default_factory=FoldState)
    failures: tuple[WorkerFailure, ...] = ()
    last_line: str | None = None
    """The line of a log that most likely states the error."""
    stop_requested: bool = False
    stop_signal: int = signal.SIGTERM
    """The signal by which a command is stopped of which ltui saves no checkpoint."""
    forced_reason: str | None = None
    """Why the run was killed, for example ``on request``. None if it was not killed by ltui."""
    rebooted: bool = False
    checkpoints: tuple[CheckpointInfo, ...] = ()
    user_command: bool = False
    multi_node: bool = False
    """True if the run has ranks on other nodes. A stop here ends them without coordination."""
    global_step: int | None = None
    machines: Mapping[int, str] = field(default_factory=dict)
    """rank -> name of its machine; empty in a run on one machine."""
    lost_engines: Mapping[str, EngineExit] = field(default_factory=dict)
    """Name of a machine -> how its engine was killed; empty in a run on one machine."""

    def rank_name(self, rank: int) -> str:
        """Return ``rank 3``, or ``rank 3 on b`` in a run on several machines."""
        return ranks_text((rank,), self.machines)


class AttemptEnd(Struct, frozen=True):
    """How an attempt ended. ``detail`` is a sentence that names the cause."""

    state: RunState
    detail: str
    exit_code: int | None = None
    first_failed_rank: int | None = None


def with_verdict_cause(
    end: AttemptEnd,
    verdicts: Sequence[Verdict],
    global_step: int | None,
    machines: Mapping[int, str] = NO_MACHINES,
) -> AttemptEnd:
    """Return ``end`` with the cause from the verdict on the rank that was killed or exited.

    This makes the end, the verdict and the diagnosis of a run agree on a dead rank.
    """
    deaths = [v for v in verdicts if v.level == "dead" and v.confidence >= _MIN_CONFIDENCE]
    step = "" if global_step is None else f" at step {global_step}"
    rank = end.first_failed_rank
    if rank is None and end.state is RunState.FAILED and deaths:
        first = min(deaths, key=lambda v: (v.began or float("inf"), len(v.culprits)))
        culprit = first.culprits[0] if len(first.culprits) == 1 else None
        killed = first.kind in ("killed", "out_of_memory")
        return replace(
            end,
            state=RunState.CRASHED if killed else end.state,
            detail=f"{first.cause}{step}",
            first_failed_rank=culprit,
        )
    for verdict in deaths:
        if verdict.kind == "left_early":
            # The other ranks only reported that this rank had exited.
            return replace(end, detail=verdict.cause, first_failed_rank=verdict.culprits[0])
        text = verdict.evidence.get("reasons", {}).get(str(rank))
        if rank is not None and verdict.kind in _SILENT_DEATHS and text:
            others = sorted(int(r) for r in verdict.evidence.get("consequences", {}))
            detail = (
                f"{ranks_text((rank,), machines)} {text}{step}{consequences_text(others, machines)}"
            )
            return replace(end, detail=detail)
    return end


_MIN_CONFIDENCE = 0.6
"""Minimum confidence of a verdict that determines how a rank died."""
_SILENT_DEATHS = frozenset({"killed", "out_of_memory", "exited"})
"""Kinds of verdicts on ranks that could not report an error themselves."""


def classify_end(facts: EndFacts) -> AttemptEnd:
    """Return the final state and a sentence that names the cause."""
    return replace(_classify(facts), exit_code=facts.exit.exit_code if facts.exit else None)


def _classify(facts: EndFacts) -> AttemptEnd:
    """Return the end without its exit code."""
    if facts.forced_reason is not None:
        detail = f"killed {facts.forced_reason}{_at(facts)}; {_saved(facts)}"
        return AttemptEnd(RunState.STOPPED, detail)
    if facts.exit is None:
        return _unobserved(facts)
    code, number = facts.exit.exit_code, _signal_of(facts.exit)
    if facts.exit.error is not None:
        return AttemptEnd(RunState.FAILED, facts.exit.error)
    if _all_ranks_ended(facts, Outcome.STOPPED):
        return _stopped(facts)
    if code == 0:
        return _exited_with_zero(facts)
    if facts.stop_requested and facts.multi_node and _only_consequences(facts):
        return _stopped(facts)
    if facts.stop_requested and not _any_rank_raised(facts) and number is not None:
        detail = f"stopped by {_signal_name(number)}{_at(facts)}; {_saved(facts)}"
        return AttemptEnd(RunState.STOPPED, detail)
    ended_by_request = facts.stop_requested and not _any_rank_raised(facts)
    if ended_by_request and _cannot_save(facts) and _terminated(facts):
        # For example, torchrun raises an exception on SIGTERM and exits with code 1.
        detail = f"stopped on request (the command exited with code {code}); {_saved(facts)}"
        return AttemptEnd(RunState.STOPPED, detail)
    if ended_by_request and _terminated(facts) and _launcher_was_signalled(facts):
        return _stopped(facts)
    return _failed(facts, facts.exit)


# -- the run finished or was stopped -----------------------------------------------------------


def _all_ranks_ended(facts: EndFacts, outcome: Outcome) -> bool:
    """Return True if every rank with a pulse ended its training with ``outcome``."""
    pulses = [p for p in facts.pulses.values() if p is not None]
    return bool(pulses) and all(p.outcome is outcome for p in pulses)


def _without_telemetry(facts: EndFacts) -> bool:
    """Return True if the run is a user command and no rank ever sent telemetry."""
    return facts.user_command and not any(p is not None for p in facts.pulses.values())


def _cannot_save(facts: EndFacts) -> bool:
    """Return True if the run is a user command of which ltui saves no checkpoints."""
    return _without_telemetry(facts) or (facts.user_command and not facts.fold.saves_checkpoints)


def _terminated(facts: EndFacts) -> bool:
    """Return True if no rank failed in any other way than by the signal of the stop."""
    by_signal = {-signal.SIGTERM, -facts.stop_signal}
    return all(failure.exit_code in by_signal for failure in facts.failures)


def _launcher_was_signalled(facts: EndFacts) -> bool:
    """Return True if torchrun reports that the signal of the stop ended it.

    It does so if a run is stopped before its ranks have begun to train.
    """
    reported = re.search(r"\bSignalException: Process \d+ got signal: (\d+)", facts.last_line or "")
    return reported is not None and int(reported[1]) in (signal.SIGTERM, facts.stop_signal)


def _any_rank_raised(facts: EndFacts) -> bool:
    """Return True if a rank raised, except for what a requested stop by SIGINT raises."""
    raised = {r for r, p in facts.pulses.items() if p is not None and p.outcome is Outcome.RAISED}
    if facts.stop_requested and facts.stop_signal == signal.SIGINT:
        events = {r: f.exception for r, f in facts.fold.ranks.items() if f.exception is not None}
        raised -= {r for r, e in events.items() if e.fields.get("type") == "KeyboardInterrupt"}
    return bool(raised)


def _only_consequences(facts: EndFacts) -> bool:
    """Return True if every exception was a consequence of another rank's exit."""
    raised = (f.exception for f in facts.fold.ranks.values())
    return all(event is None or _is_consequence(event) for event in raised)


def _exited_with_zero(facts: EndFacts) -> AttemptEnd:
    pulses = [p for p in facts.pulses.values() if p is not None]
    # A program that handles the signal of a stop may exit as if it had finished.
    finished = _all_ranks_ended(facts, Outcome.FINISHED) and not _cannot_save(facts)
    if facts.stop_requested and not finished:
        return _stopped(facts)
    detail = f"finished{_at(facts)}" if pulses or not facts.user_command else "exit code 0"
    unfinished = [p.rank for p in pulses if p.outcome is Outcome.RUNNING]
    if unfinished:
        detail = f"exit code 0, but rank {unfinished[0]} had not ended its training{_at(facts)}"
    return AttemptEnd(RunState.FINISHED, detail)


def _stopped(facts: EndFacts) -> AttemptEnd:
    return AttemptEnd(RunState.STOPPED, f"stopped{_at(facts)}, {_saved(facts)}")


def _at(facts: EndFacts) -> str:
    return "" if facts.global_step is None else f" at step {facts.global_step}"


def _saved(facts: EndFacts) -> str:
    """Return a phrase that names the checkpoint from which the run can be resumed."""
    last = newest_checkpoint(facts.checkpoints)
    if last is None and not facts.fold.saves_checkpoints:
        return "the program has not told ltui how to save a checkpoint"
    if last is None:
        return "no checkpoint was saved"
    checked = "verified" if last.ok else "saved"
    at_the_end = last.global_step == facts.global_step
    if last.weights not in (None, FINITE):
        whose = "its checkpoint" if at_the_end else f"the checkpoint of step {last.global_step}"
        return f"{whose} has {last.weights} weights"
    if at_the_end:
        return f"checkpoint {checked}"
    return f"the last checkpoint is of step {last.global_step}"


# -- the run failed, crashed or was lost -------------------------------------------------------


def _unobserved(facts: EndFacts) -> AttemptEnd:
    """Classify an end for which there is no exit code, because the shim did not record one."""
    if facts.shim_died:
        detail = f"its shim process was killed{_at(facts)}, and the ranks with it; {_saved(facts)}"
        return AttemptEnd(RunState.CRASHED, detail)
    for outcome, state in (
        (Outcome.FINISHED, RunState.FINISHED),
        (Outcome.STOPPED, RunState.STOPPED),
    ):
        if _all_ranks_ended(facts, outcome):
            detail = f"{state.value}{_at(facts)}, {_saved(facts)}; its exit code is unknown"
            return AttemptEnd(state, detail)
    why = "the machine was restarted" if facts.rebooted else "how it ended is unknown"
    seen = "" if facts.global_step is None else f"last seen{_at(facts)}, "
    detail = f"none of its processes is alive, and {why}; {seen}{_saved(facts)}"
    return AttemptEnd(RunState.LOST, detail)


def _failed(facts: EndFacts, exit_: EngineExit) -> AttemptEnd:
    killed = _killed_rank(facts)
    raised = _first_exception(facts)
    if facts.lost_engines and (raised is None or _is_consequence(raised)):
        name, lost = next(iter(facts.lost_engines.items()))
        how = lost.error or f"the {_engine(facts)} was killed by {_signal_name(lost.signal or 0)}"
        victims = [] if raised is None else [raised.rank]
        detail = f"on {name} {how}{_at(facts)}{consequences_text(victims, facts.machines)}"
        return AttemptEnd(RunState.CRASHED, detail)
    if raised is not None and (killed is None or not _is_consequence(raised)):
        who = facts.rank_name(raised.rank)
        detail = f"{who} raised {_exception_text(raised)}{_step_of(raised)}"
        if _is_consequence(raised) and (early := _finished_early(facts)) is not None:
            detail = f"{early} while the others went on; then {detail}"
        return AttemptEnd(RunState.FAILED, detail, first_failed_rank=raised.rank)
    if killed is not None:
        rank, how = killed
        return AttemptEnd(
            RunState.CRASHED, f"{facts.rank_name(rank)} {how}{_at(facts)}", first_failed_rank=rank
        )
    engine = _engine(facts)
    number = _signal_of(exit_)
    if number is not None:
        detail = f"the {engine} was killed by {_signal_name(number)}{_at(facts)}"
        return AttemptEnd(RunState.CRASHED, detail)
    suffix = f": {facts.last_line}" if facts.last_line else ""
    failure = next((f for f in facts.failures if f.first), None)
    if failure is not None:
        who = facts.rank_name(failure.rank)
        detail = f"{who} exited with code {failure.exit_code}{suffix}"
        return AttemptEnd(RunState.FAILED, detail, first_failed_rank=failure.rank)
    return AttemptEnd(RunState.FAILED, f"the {engine} exited with code {exit_.exit_code}{suffix}")


def _finished_early(facts: EndFacts) -> str | None:
    """Return ``rank 1 ended its training at step 150``; None if no rank ended without an error."""
    finished = [p for p in facts.pulses.values() if p and p.outcome is Outcome.FINISHED]
    if not finished:
        return None
    first = min(finished, key=lambda p: p.changed_wall_s)
    return f"{facts.rank_name(first.rank)} ended its training at step {first.global_step}"


def _engine(facts: EndFacts) -> str:
    return "command" if facts.user_command else "launcher"


def _killed_rank(facts: EndFacts) -> tuple[int, str] | None:
    """Return the rank that was killed from outside, and how. None if no such rank is known."""
    for failure in sorted(facts.failures, key=lambda f: not f.first):
        # After the first failure the elastic agent terminates the other ranks with SIGTERM.
        if failure.exit_code < 0 and (failure.first or failure.exit_code != -signal.SIGTERM):
            return failure.rank, f"was killed by {_signal_name(-failure.exit_code)}"
    exit_codes = {f.rank: f.exit_code for f in facts.failures}
    raised = {r for r, f in facts.fold.ranks.items() if f.exception is not None}
    # If the engine died first, it took its ranks along, so no rank is the cause.
    if facts.exit is not None and facts.exit.signal is not None:
        return None
    silent = [
        p
        for rank, p in sorted(facts.pulses.items())
        if p is not None and p.outcome is Outcome.RUNNING and rank not in raised
    ]
    silent = [p for p in silent if exit_codes.get(p.rank, -1) < 0 and p.rank not in exit_codes]
    if not silent or not (raised or len(silent) == 1) or facts.failures:
        return None
    if not raised and len(facts.pulses) < max(p.world_size for p in silent):
        return None  # The rank that died may be one that never sent a pulse.
    first = min(silent, key=lambda p: p.changed_wall_s)
    return first.rank, "died without a Python error (killed by a signal, or it called exit)"


def _first_exception(facts: EndFacts) -> FoldedEvent | None:
    """Return the earliest exception, preferring those that no other rank's exit has caused."""
    exceptions = [f.exception for f in facts.fold.ranks.values() if f.exception is not None]
    if not exceptions:
        return None
    return min(exceptions, key=lambda e: (_is_consequence(e), _unix_time(e), e.rank))


def _unix_time(event: FoldedEvent) -> float:
    t = event.fields.get("t")
    return float(t) if isinstance(t, (int, float)) else event.t_ns / 1e9


def _is_consequence(event: FoldedEvent) -> bool:
    return is_consequence(_exception_text(event))


def _exception_text(event: FoldedEvent) -> str:
    name, message = event.fields.get("type"), event.fields.get("message")
    if not name:
        return event.text or "an exception"
    first_line = str(message or "").strip().split("\n", 1)[0][:300]
    return f"{name}: {first_line}" if first_line else str(name)


def _step_of(event: FoldedEvent) -> str:
    step = event.fields.get("step")
    return f" at step {step}" if isinstance(step, int) else ""


def _signal_of(exit_: EngineExit) -> int | None:
    """Return the signal that ended the engine, also if a shell reported it as 128 + signal."""
    if exit_.signal is not None:
        return exit_.signal
    if exit_.exit_code is not None and 128 < exit_.exit_code < 128 + 65:
        return exit_.exit_code - 128
    return None


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "SIGKILL (sent by a person, or by the kernel when memory ran out)"
    return name
