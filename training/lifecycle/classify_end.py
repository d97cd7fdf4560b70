"""How a run ended, from everything that is known after its last process is gone. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ltui.training.diagnosis.rules.backend_messages import is_consequence
from ltui.training.diagnosis.rules.verdict_words import consequences_text
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.shim_files import EngineExit
from ltui.training.state.record_fold import FoldedEvent, FoldState
from ltui.training.state.run_snapshot import CheckpointInfo, RunState, Verdict
from ltui.training.tensor_queue.record_types import Outcome, PulseState


@dataclass(frozen=True, kw_only=True, slots=True)
class EndFacts:
    """What is known of the end."""

    exit: EngineExit | None = None
    shim_died: bool = False
    pulses: Mapping[int, PulseState | None] = field(default_factory=dict)
    fold: FoldState = field(default_factory=FoldState)
    failures: tuple[WorkerFailure, ...] = ()
    last_line: str | None = None
    """Of the engine's log."""
    stop_requested: bool = False
    forced_reason: str | None = None
    """Why the run was ended by force: ``on request``, ``because the ranks did not ...``."""
    rebooted: bool = False
    checkpoints: tuple[CheckpointInfo, ...] = ()
    user_command: bool = False
    multi_node: bool = False
    """Whether other ranks were on other nodes: a stop here ends these without an agreement."""
    global_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    state: RunState
    detail: str
    exit_code: int | None = None
    first_failed_rank: int | None = None


def with_verdict_cause(
    found: AttemptEnd, verdicts: Sequence[Verdict], global_step: int | None
) -> AttemptEnd:
    """``found`` with what the judge knows of the rank that was killed or exited.

    So the end, the verdict and the diagnosis of a run say the same of a dead rank.
    """
    died = [v for v in verdicts if v.level == "dead" and v.confidence >= _KNOWN]
    step = "" if global_step is None else f" at step {global_step}"
    rank = found.first_failed_rank
    if rank is None and found.state is RunState.FAILED and died:
        first = min(died, key=lambda v: (v.began or float("inf"), len(v.culprits)))
        alone = first.culprits[0] if len(first.culprits) == 1 else None
        killed = first.kind in ("killed", "out_of_memory")
        return replace(
            found,
            state=RunState.CRASHED if killed else found.state,
            detail=f"{first.cause}{step}",
            first_failed_rank=alone,
        )
    for verdict in died:
        if verdict.kind == "left_early":
            # The others reported only that it had gone.
            return replace(found, detail=verdict.cause, first_failed_rank=verdict.culprits[0])
        text = verdict.evidence.get("reasons", {}).get(str(rank))
        if verdict.kind in _SILENT_DEATHS and text:
            others = sorted(int(r) for r in verdict.evidence.get("consequences", {}))
            return replace(found, detail=f"rank {rank} {text}{step}{consequences_text(others)}")
    return found


_KNOWN = 0.6
"""Least confidence of a verdict that says how a rank died."""
_SILENT_DEATHS = frozenset({"killed", "out_of_memory", "exited"})
"""Kinds of verdicts on ranks that could not report an error themselves."""


def classify_end(facts: EndFacts) -> AttemptEnd:
    """The final state and a sentence that names the cause."""
    code = facts.exit.exit_code if facts.exit else None
    if facts.forced_reason is not None:
        detail = f"killed {facts.forced_reason}{_at(facts)}; {_saved(facts)}"
        return AttemptEnd(state=RunState.STOPPED, detail=detail, exit_code=code)
    if facts.exit is None:
        return _unseen(facts)
    if facts.exit.error is not None:
        return AttemptEnd(state=RunState.FAILED, detail=facts.exit.error, exit_code=code)
    if _left(facts, Outcome.STOPPED):
        return _stopped(facts, code)
    if code == 0:
        return _exited_well(facts)
    if facts.stop_requested and facts.multi_node and _only_consequences(facts):
        return _stopped(facts, code)
    if facts.stop_requested and not _failed_pulses(facts) and _by_signal(facts.exit):
        return AttemptEnd(
            state=RunState.STOPPED,
            detail=f"stopped by {_named(_signal_of(facts.exit))}{_at(facts)}; {_saved(facts)}",
            exit_code=code,
        )
    if facts.stop_requested and _without_telemetry(facts) and not facts.failures:
        # torchrun, for one, answers SIGTERM with an exception of its own and exit code 1.
        return AttemptEnd(
            state=RunState.STOPPED,
            detail=f"stopped on request (the command exited with code {code}); {_saved(facts)}",
            exit_code=code,
        )
    return _failed(facts, code)


# -- good ends ---------------------------------------------------------------------------------


def _left(facts: EndFacts, outcome: Outcome) -> bool:
    """Whether every rank that is known left its loop like that."""
    known = [p for p in facts.pulses.values() if p is not None]
    return bool(known) and all(p.outcome is outcome for p in known)


def _without_telemetry(facts: EndFacts) -> bool:
    """Whether the run is a command of which no rank ever reported anything."""
    return facts.user_command and not any(p is not None for p in facts.pulses.values())


def _failed_pulses(facts: EndFacts) -> bool:
    return any(p is not None and p.outcome is Outcome.RAISED for p in facts.pulses.values())


def _only_consequences(facts: EndFacts) -> bool:
    """Whether no rank raised but because another had gone."""
    raised = (f.exception for f in facts.fold.ranks.values())
    return all(event is None or _is_consequence(event) for event in raised)


def _exited_well(facts: EndFacts) -> AttemptEnd:
    known = [p for p in facts.pulses.values() if p is not None]
    if facts.stop_requested and not _left(facts, Outcome.FINISHED):
        return _stopped(facts, 0)
    detail = f"finished{_at(facts)}" if known or not facts.user_command else "exit code 0"
    unfinished = [p.rank for p in known if p.outcome is Outcome.RUNNING]
    if unfinished:
        detail = f"exit code 0, but rank {unfinished[0]} had not ended its training{_at(facts)}"
    return AttemptEnd(state=RunState.FINISHED, detail=detail, exit_code=0)


def _stopped(facts: EndFacts, code: int | None) -> AttemptEnd:
    return AttemptEnd(
        state=RunState.STOPPED, detail=f"stopped{_at(facts)}, {_saved(facts)}", exit_code=code
    )


def _at(facts: EndFacts) -> str:
    return "" if facts.global_step is None else f" at step {facts.global_step}"


def _saved(facts: EndFacts) -> str:
    """What can be resumed from, in words."""
    whole = [c for c in facts.checkpoints if c.ok is not False]
    if not whole and _without_telemetry(facts):
        return "ltui saves no checkpoints of a command without telemetry"
    if not whole:
        return "no checkpoint was saved"
    last = max(whole, key=lambda c: (c.saved_at or 0.0, c.global_step))
    checked = "verified" if last.ok else "saved"
    if last.global_step == facts.global_step:
        return f"checkpoint {checked}"
    return f"the last checkpoint is of step {last.global_step}"


# -- bad ends ----------------------------------------------------------------------------------


def _unseen(facts: EndFacts) -> AttemptEnd:
    """Nobody saw the engine end."""
    if facts.shim_died:
        return AttemptEnd(
            state=RunState.CRASHED,
            detail=f"its keeper was killed{_at(facts)}, and the ranks with it; {_saved(facts)}",
        )
    for outcome, state in (
        (Outcome.FINISHED, RunState.FINISHED),
        (Outcome.STOPPED, RunState.STOPPED),
    ):
        if _left(facts, outcome):
            return AttemptEnd(
                state=state,
                detail=f"{state.value}{_at(facts)}, {_saved(facts)}; how it exited is unknown",
            )
    why = "the machine was restarted" if facts.rebooted else "how it ended is unknown"
    return AttemptEnd(
        state=RunState.LOST,
        detail=f"none of its processes is alive, and {why}; last seen{_at(facts)}, {_saved(facts)}",
    )


def _failed(facts: EndFacts, code: int | None) -> AttemptEnd:
    assert facts.exit is not None
    killed = _killed_rank(facts)
    raised = _first_exception(facts)
    if raised is not None and (killed is None or not _is_consequence(raised)):
        return AttemptEnd(
            state=RunState.FAILED,
            detail=f"rank {raised.rank} raised {_exception_text(raised)}{_step_of(raised)}",
            exit_code=code,
            first_failed_rank=raised.rank,
        )
    if killed is not None:
        rank, how = killed
        return AttemptEnd(
            state=RunState.CRASHED,
            detail=f"rank {rank} {how}{_at(facts)}",
            exit_code=code,
            first_failed_rank=rank,
        )
    if _by_signal(facts.exit):
        number = _signal_of(facts.exit)
        return AttemptEnd(
            state=RunState.CRASHED,
            detail=f"the {_engine(facts)} was killed by {_named(number)}{_at(facts)}",
            exit_code=code,
        )
    failure = next((f for f in facts.failures if f.first), None)
    said = f": {facts.last_line}" if facts.last_line else ""
    if failure is not None:
        return AttemptEnd(
            state=RunState.FAILED,
            detail=f"rank {failure.rank} exited with code {failure.exit_code}{said}",
            exit_code=code,
            first_failed_rank=failure.rank,
        )
    return AttemptEnd(
        state=RunState.FAILED,
        detail=f"the {_engine(facts)} exited with code {code}{said}",
        exit_code=code,
    )


def _engine(facts: EndFacts) -> str:
    return "command" if facts.user_command else "launcher"


def _killed_rank(facts: EndFacts) -> tuple[int, str] | None:
    """The rank that was killed from outside, and how; None where none is known to have been."""
    for failure in sorted(facts.failures, key=lambda f: not f.first):
        # The agent ends the others by SIGTERM once one has failed.
        if failure.exit_code < 0 and (failure.first or failure.exit_code != -signal.SIGTERM):
            return failure.rank, f"was killed by {_named(-failure.exit_code)}"
    said = {f.rank: f.exit_code for f in facts.failures}
    raised = {r for r, f in facts.fold.ranks.items() if f.exception is not None}
    # An engine that dies first takes its ranks along: then no rank is to blame.
    if facts.exit is not None and facts.exit.signal is not None:
        return None
    silent = [
        p
        for rank, p in sorted(facts.pulses.items())
        if p is not None and p.outcome is Outcome.RUNNING and rank not in raised
    ]
    silent = [p for p in silent if said.get(p.rank, -1) < 0 and p.rank not in said]
    if not silent or not (raised or len(silent) == 1) or facts.failures:
        return None
    if not raised and len(facts.pulses) < max(p.world_size for p in silent):
        return None  # It may be one of those that were never heard of.
    first = min(silent, key=lambda p: p.changed_wall_s)
    return first.rank, "died without a Python error (killed by a signal, or it called exit)"


def _first_exception(facts: EndFacts) -> FoldedEvent | None:
    """The earliest exception that is not plainly the consequence of another rank's end."""
    found = [f.exception for f in facts.fold.ranks.values() if f.exception is not None]
    if not found:
        return None
    return min(found, key=lambda e: (_is_consequence(e), _time(e), e.rank))


def _time(event: FoldedEvent) -> float:
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


def _by_signal(exit_: EngineExit) -> bool:
    return _signal_of(exit_) is not None


def _signal_of(exit_: EngineExit) -> int | None:
    """The signal that ended the engine, also as shells pass it on (128 + signal)."""
    if exit_.signal is not None:
        return exit_.signal
    if exit_.exit_code is not None and 128 < exit_.exit_code < 128 + 65:
        return exit_.exit_code - 128
    return None


def _named(number: int | None) -> str:
    if number is None:
        return "a signal"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "SIGKILL (sent by a person, or by the kernel when memory ran out)"
    return name
