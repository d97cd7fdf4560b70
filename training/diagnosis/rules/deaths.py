"""Verdicts on ranks whose process is gone or that raised, with causes and consequences apart. Pure.

When a rank dies, its peers' back ends report a closed connection. Those exceptions are
consequences, even if they were reported first. If there are only consequences, the verdict is held
back for a short time, until the cause shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.judge_input import Death
from ltui.training.diagnosis.observations.backend_messages import is_consequence
from ltui.training.diagnosis.observations.stack_frames import frame_text, is_library_file
from ltui.training.diagnosis.prepared_input import PreparedInput, position_facts
from ltui.training.diagnosis.stalls import left_early
from ltui.training.diagnosis.verdict_words import consequences_text, ranks_text, verb
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdict_kinds import VerdictKind

_SIZE_MISMATCH = re.compile(
    r"preamble\.length|size doesn't match|EnforceNotMet|Mismatch between|mismatch", re.IGNORECASE
)
_WORKER_ENDED = re.compile(
    r"DataLoader worker \(pid\(?s?\)?[ (]*(?P<pids>[\d, ]+)\)?.*?"
    r"(killed by signal: (?P<signal>\w+)|exited unexpectedly)",
    re.DOTALL,
)
_SHARED_MEMORY = re.compile(
    r"bus error|shared memory|No space left on device.*shm|shm_open", re.IGNORECASE
)
_TRACEBACK_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_HOLD_BACK_S = 1.5
"""Seconds for which a verdict is held back that has only consequences."""
_MISMATCH_HOLD_BACK_S = 5.0
"""Seconds to wait for the errors of other ranks if a back end aborted a rank, because an aborted
rank is seldom the one at fault."""
_UNSURE = 0.5
"""Confidence of a mismatch of which it is unknown which rank is at fault."""
_CONFIDENT = 0.6
"""Minimum confidence of a cause that explains the end of other ranks."""
_EVALUATION_STEPS = ("validation_step", "test_step")
_CRASH_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_CRASH_REMEDY = (
    "The crash is in native code: check that line, and the versions of PyTorch, the driver and"
    " extensions. Then resume the run."
)
_SIGNAL_REMEDY = (
    "Find out who sent {} (a person, a job scheduler, the limits of a container), then resume"
    " the run."
)
_EXIT_REMEDY = "Find the reason for the exit in the log of the rank, then resume the run."
_EXCEPTION_REMEDY = "Fix the error, then resume the run."


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankEnd:
    """How one rank ended, and whether another rank caused that."""

    rank: int
    kind: VerdictKind
    predicate: str
    """The event, as the end of a sentence that begins with the rank."""
    passive: bool = False
    """True if ``predicate`` is a participle that follows "was" or "were"."""
    frame: Frame | None = None
    remedy: str | None = None
    consequence: bool = False
    confidence: float = 0.95
    worker: int | None = None
    """Pid of the DataLoader worker that ended first."""
    at_s: float = 0.0
    """Time of the exception in seconds, to find the first one."""

    def text(self, ranks: Sequence[int]) -> str:
        """Return the predicate for ``ranks`` that ended alike."""
        return f"{verb(ranks, 'was', 'were')} {self.predicate}" if self.passive else self.predicate

    @property
    def own_text(self) -> str:
        return self.text((self.rank,))


def death_verdicts(inputs: PreparedInput) -> list[Verdict]:
    """Return one verdict for each cause; its evidence names the consequences."""
    died = sorted(r for r, s in inputs.states.items() if s is RankState.DEAD)
    if not died:
        return []
    ends = [_end_of(inputs, r) for r in died]
    causes = [e for e in ends if not e.consequence]
    consequences = [e for e in ends if e.consequence]
    if all(e.kind is VerdictKind.MISMATCH and e.confidence <= _UNSURE for e in causes):
        waited_s = max((inputs.still_s.get(r, _HOLD_BACK_S + 1) for r in died), default=0.0)
        allowed_s = _MISMATCH_HOLD_BACK_S if causes else _HOLD_BACK_S
        if waited_s <= allowed_s and len(died) < len(inputs.states):
            return []
        early = _left_validation(ends)
        if early is not None:
            causes = [early]
            consequences = [e for e in ends if e.rank != early.rank]
    if not causes:
        causes = _left_training_early(inputs)
    if not causes:
        first = min(consequences, key=lambda e: (e.at_s, e.rank))
        causes = [replace(first, confidence=0.4)]
        consequences = [e for e in consequences if e is not first]
    # If another rank's cause is known, a rank without an error may have been ended by the agent.
    if any(e.confidence >= _CONFIDENT for e in causes):
        consequences += [e for e in causes if e.confidence < _CONFIDENT]
        causes = [e for e in causes if e.confidence >= _CONFIDENT]
    living = [r for r, s in inputs.states.items() if s not in (RankState.DEAD, RankState.ENDED)]
    affected = tuple(sorted({*living, *(e.rank for e in consequences)}))
    return [_verdict(inputs, alike, affected, consequences) for alike in _group_alike(causes)]


def _left_validation(ends: list[_RankEnd]) -> _RankEnd | None:
    """Return the one rank that had left a validation in which the others still were.

    This applies to ranks whose collectives did not match in size. Back ends abort the rank that
    receives the wrong size, not the rank that sent it.
    """
    raised = [e for e in ends if e.kind is VerdictKind.RAISED and e.frame is not None]
    inside = [e for e in raised if e.frame and e.frame.function in _EVALUATION_STEPS]
    past = [e for e in raised if e not in inside]
    mismatch = any(e.kind is VerdictKind.MISMATCH for e in ends)
    if not mismatch or not inside or len(past) != 1:
        return None
    others = ranks_text(sorted(e.rank for e in inside))
    return replace(
        past[0],
        kind=VerdictKind.UNEVEN,
        predicate=f"left validation while {others} had batches left: validation batch counts differ"
        " (uneven), and the next collective's sizes did not match (size mismatch)",
        passive=False,
        frame=inside[0].frame,
        remedy="Give every rank the same number of batches: a DistributedSampler, drop_last=True,"
        " or limit_val_batches.",
        consequence=False,
        confidence=0.7,
    )


def _left_training_early(inputs: PreparedInput) -> list[_RankEnd]:
    """Return the ranks that left training before the others, whose collectives then failed."""
    others = [r for r, s in sorted(inputs.states.items()) if s is RankState.DEAD]
    ends = []
    for rank in inputs.ended:
        departure = left_early.find_departure(inputs, (rank,))
        if departure is None:
            continue
        reason = left_early.departure_reason(departure, others, None)
        ends.append(
            _RankEnd(
                rank=rank,
                kind=reason.kind,
                predicate=reason.text,
                remedy=reason.remedy,
                confidence=reason.confidence,
            )
        )
    return ends


def _group_alike(causes: list[_RankEnd]) -> list[list[_RankEnd]]:
    """Group ranks that ended alike at one line, so that they get one verdict."""
    groups: dict[tuple[str, str], list[_RankEnd]] = {}
    for end in causes:
        groups.setdefault((end.kind, end.own_text), []).append(end)
    return list(groups.values())


def _verdict(
    inputs: PreparedInput,
    ends: list[_RankEnd],
    affected: tuple[int, ...],
    consequences: list[_RankEnd],
) -> Verdict:
    first = ends[0]
    ranks = tuple(sorted(e.rank for e in ends))
    pulses = {r: p for r in ranks if (p := inputs.pulses.get(r)) is not None}
    errors = [e for e in consequences if e.consequence]
    evidence: dict[str, Any] = {
        "reasons": {str(e.rank): e.own_text for e in ends},
        "consequences": {str(e.rank): e.own_text for e in errors},
        "ended_too": {str(e.rank): e.own_text for e in consequences if not e.consequence},
        "ranks": {str(r): position_facts(p) for r, p in pulses.items()},
    }
    if first.frame is not None:
        line = first.frame
        evidence["frame"] = f"{line.file}:{line.line} {line.function}"
    if first.worker is not None:
        evidence["worker"] = first.worker
    phase = next((p.phase.label for _, p in sorted(pulses.items())), None)
    line_text = frame_text(first.frame)
    error_ranks = sorted(e.rank for e in errors)
    return Verdict(
        kind=first.kind,
        level=VerdictLevel.DEAD,
        culprits=ranks,
        waiting=tuple(r for r in affected if r not in ranks),
        place=f"{phase}, {line_text}" if phase and line_text else line_text or phase,
        cause=f"{ranks_text(ranks)} {first.text(ranks)}{consequences_text(error_ranks)}",
        remedy=first.remedy,
        confidence=first.confidence,
        began=min((p.changed_wall_s for p in pulses.values()), default=None),
        evidence=evidence,
    )


def _end_of(inputs: PreparedInput, rank: int) -> _RankEnd:
    """Return how the rank ended: by its exception if it reported one, else by its process."""
    rank_fold = inputs.fold.ranks.get(rank)
    event = rank_fold.exception if rank_fold is not None else None
    if event is None:
        return _end_of_process(rank, inputs.deaths.get(rank) or Death(), inputs.oom_kills)
    t = event.fields.get("t")
    at_s = float(t) if isinstance(t, (int, float)) else event.t_ns / 1e9
    end = _end_by_exception(rank, event.fields, event.text, inputs.oom_kills)
    return replace(end, at_s=at_s)


def _end_by_exception(
    rank: int, fields: Mapping[str, Any], event_text: str, oom_kills: int | None
) -> _RankEnd:
    name, message = str(fields.get("type") or ""), str(fields.get("message") or "")
    line = _innermost_user_line(str(fields.get("traceback") or ""))
    first_line = message.strip().split("\n", 1)[0][:300]
    error = f"{name}: {first_line}" if name and first_line else name or event_text or "an exception"
    at_line = f" at {frame_text(line)}" if line else ""
    if (worker := _WORKER_ENDED.search(message)) is not None:
        return _end_by_worker(rank, worker, message, oom_kills)
    if _SHARED_MEMORY.search(message):
        return _RankEnd(
            rank=rank,
            kind=VerdictKind.SHARED_MEMORY,
            frame=line,
            predicate=f"ran out of shared memory (/dev/shm){at_line}: {first_line}",
            remedy="Give the container more (--shm-size), or use fewer workers.",
        )
    if name in ("OutOfMemoryError", "MemoryError") or "out of memory" in message:
        return _RankEnd(
            rank=rank,
            kind=VerdictKind.OUT_OF_MEMORY,
            frame=line,
            predicate=f"ran out of memory{at_line}: {error}",
            remedy="Use a smaller batch, gradient accumulation or a lower precision.",
        )
    if _SIZE_MISMATCH.search(message) and not is_consequence(message):
        return _RankEnd(
            rank=rank,
            kind=VerdictKind.MISMATCH,
            frame=line,
            confidence=_UNSURE,
            predicate=f"raised {error}{at_line}: a collective's sizes differ between ranks"
            " (size mismatch)",
            remedy="Every rank must call collectives with equal sizes; check that line.",
        )
    return _RankEnd(
        rank=rank,
        kind=VerdictKind.RAISED,
        frame=line,
        predicate=f"raised {error}{at_line}",
        consequence=is_consequence(f"{name}: {message}"),
        remedy="Fix the error at that line, then resume the run." if line else _EXCEPTION_REMEDY,
    )


def _end_by_worker(
    rank: int, error: re.Match[str], message: str, oom_kills: int | None
) -> _RankEnd:
    pids = [int(p) for p in re.findall(r"\d+", error["pids"])]
    worker = f"DataLoader worker {pids[0]}" if pids else "DataLoader worker"
    signal_name = error["signal"]
    if signal_name in ("Killed", None) and oom_kills:
        text = f"{worker} was killed by the kernel's out-of-memory killer"
        remedy = "Use fewer workers, smaller samples, or give the job more memory."
    elif _SHARED_MEMORY.search(message):
        text = f"{worker} exited unexpectedly: out of shared memory (/dev/shm)"
        remedy = "Give the container more shared memory (--shm-size), or use fewer workers."
    else:
        how = f"killed by signal {signal_name}" if signal_name else "no reason known"
        text = f"{worker} exited unexpectedly ({how})"
        remedy = "Check the log of the rank; with num_workers=0 the error is raised there."
    return _RankEnd(
        rank=rank,
        kind=VerdictKind.WORKER_DIED,
        predicate=f"lost a worker: {text}",
        remedy=remedy,
        worker=pids[0] if pids else None,
    )


def _end_of_process(rank: int, death: Death, oom_kills: int | None) -> _RankEnd:
    """Return how a rank ended that reported no exception."""
    last_line = death.last_line or ""
    log_text = f" (last line of its log: {last_line})" if last_line else ""
    if oom_kills and death.signal in ("SIGKILL", None) and death.exit_code is None:
        return _RankEnd(
            rank=rank,
            kind=VerdictKind.OUT_OF_MEMORY,
            confidence=0.85,
            predicate="killed by the kernel's out-of-memory killer (SIGKILL)",
            passive=True,
            remedy="Use fewer workers or smaller batches, or give the job more memory.",
        )
    if death.signal is not None:
        return _end_by_signal(rank, death, death.signal, oom_kills)
    if death.exit_code is not None:
        return _RankEnd(
            rank=rank,
            kind=VerdictKind.EXITED,
            predicate=f"exited with code {death.exit_code}{log_text}",
            remedy=_EXIT_REMEDY,
            consequence=is_consequence(last_line),
        )
    if is_consequence(last_line):
        return _RankEnd(
            rank=rank, kind=VerdictKind.EXITED, predicate=f"ended{log_text}", consequence=True
        )
    return _RankEnd(
        rank=rank,
        kind=VerdictKind.EXITED,
        confidence=0.55,
        remedy=_EXIT_REMEDY,
        predicate="died without a Python error (killed by a signal, or it called exit)" + log_text,
    )


def _end_by_signal(rank: int, death: Death, signal_name: str, oom_kills: int | None) -> _RankEnd:
    last_line = death.last_line or ""
    killed = signal_name == "SIGKILL"
    aborted = signal_name == "SIGABRT"
    by_agent = signal_name == "SIGTERM"
    by_mismatch = aborted and bool(_SIZE_MISMATCH.search(last_line))
    at_line = f" at {frame_text(death.frame)}" if death.frame else ""
    no_oom = " (not the out-of-memory killer)" if killed and oom_kills == 0 else ""
    log_text = f" (last line of its log: {last_line})" if last_line and not killed else ""
    crashed = signal_name in _CRASH_SIGNALS
    return _RankEnd(
        rank=rank,
        kind=VerdictKind.MISMATCH if by_mismatch else VerdictKind.KILLED,
        frame=death.frame,
        predicate=f"killed by {signal_name}{no_oom}{at_line}{log_text}",
        passive=True,
        remedy=_CRASH_REMEDY if crashed else _SIGNAL_REMEDY.format(signal_name),
        confidence=_UNSURE if by_agent or by_mismatch else 0.95,
        consequence=aborted and is_consequence(last_line),
    )


def _innermost_user_line(traceback: str) -> Frame | None:
    """Return the innermost frame of user code in a traceback, or else the innermost frame."""
    frames = [
        Frame(file=t["file"], line=int(t["line"]), function=t["function"])
        for t in _TRACEBACK_FRAME.finditer(traceback)
    ]
    user_frames = [f for f in frames if not is_library_file(f.file)]
    return user_frames[-1] if user_frames else frames[-1] if frames else None
