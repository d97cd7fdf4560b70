"""Ranks whose process is gone or that raised: causes told from consequences. Pure.

When a rank dies its peers' back ends report a closed connection; those exceptions are consequences,
whoever said them first. A consequence alone is held back for a moment, until its cause shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.rules import left_early
from ltui.training.diagnosis.rules.backend_messages import is_consequence
from ltui.training.diagnosis.rules.judge_input import PreparedInput, position_facts
from ltui.training.diagnosis.rules.stack_frames import frame_text, is_library_file
from ltui.training.diagnosis.rules.verdict_words import consequences_text, ranks_text
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.tensor_queue.record_types import PulseState

_SIZES = re.compile(
    r"preamble\.length|size doesn't match|EnforceNotMet|Mismatch between|mismatch", re.IGNORECASE
)
_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)?[ (]*(?P<pids>[\d, ]+)\)?.*?"
    r"(killed by signal: (?P<signal>\w+)|exited unexpectedly)",
    re.DOTALL,
)
_SHM = re.compile(r"bus error|shared memory|No space left on device.*shm|shm_open", re.IGNORECASE)
_HOLD_BACK_S = 1.5
_MISMATCH_HOLD_BACK_S = 5.0
"""Who was aborted is seldom who is at fault: the others' last words are waited for."""
_UNSURE = 0.5
_EVALUATION_STEPS = ("validation_step", "test_step")
_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_NATIVE_CRASH = (
    "The crash is in native code: check that line, and the versions of PyTorch, the driver and"
    " extensions. Then resume the run."
)
_KILLED = (
    "Find out who sent {} (a person, a job scheduler, the limits of a container), then resume"
    " the run."
)
_EXITED = "Find the reason for the exit in the log of the rank, then resume the run."
_RAISED = "Fix the error, then resume the run."
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How one rank's process ended, as far as anybody saw."""

    how: str
    """``killed by SIGSEGV``, ``exit code 3``, ``its process is gone``."""
    signal: str | None = None
    exit_code: int | None = None
    frame: Frame | None = None
    """The user's line where it died, from faulthandler."""
    last_line: str | None = None
    """Of its log: what most likely says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    rank: int
    kind: str
    text: str
    frame: Frame | None = None
    remedy: str | None = None
    consequence: bool = False
    confidence: float = 0.95
    worker: int | None = None
    at_s: float = 0.0


def death_verdicts(
    m: PreparedInput, told: Mapping[int, Death], oom_kills: int | None
) -> list[Verdict]:
    """One verdict for each cause; consequences stand in the causes' evidence."""
    died = sorted(r for r, s in m.states.items() if s is RankState.DEAD)
    if not died:
        return []
    ends = [_end(m, r, told.get(r) or Death(how=m.dead.get(r, "")), oom_kills) for r in died]
    causes = [e for e in ends if not e.consequence]
    consequences = [e for e in ends if e.consequence]
    if not any(e.kind != "mismatch" or e.confidence > _UNSURE for e in causes):
        waited_s = max((m.still.get(r, _HOLD_BACK_S + 1) for r in died), default=0.0)
        allowed_s = _MISMATCH_HOLD_BACK_S if causes else _HOLD_BACK_S
        if waited_s <= allowed_s and len(died) < len(m.states):
            return []
        if (short := _short_of_evaluation(ends)) is not None:
            causes = [short]
            consequences = [e for e in ends if e.rank != short.rank]
    if not causes:
        causes = _left_early(m)
    if not causes:
        first = min(consequences, key=lambda e: (e.at_s, e.rank))
        causes = [replace(first, confidence=0.4)]
        consequences = [e for e in consequences if e is not first]
    # A rank that is gone without a word beside one that says why may have been ended by the agent.
    if any(e.confidence >= 0.6 for e in causes):
        silent = [e for e in causes if e.confidence < 0.6]
        consequences += silent
        causes = [e for e in causes if e not in silent]
    living = sorted(r for r, s in m.states.items() if s not in (RankState.DEAD, RankState.ENDED))
    affected = tuple(sorted({*living, *(e.rank for e in consequences)}))
    return [_verdict(m, same, affected, consequences) for same in _alike(causes)]


def _short_of_evaluation(ends: list[_End]) -> _End | None:
    """Of ranks whose collectives did not match in size: the one that was past the validation's
    batches while others were in one. Back ends abort whoever receives the wrong size, not who sent
    it."""
    raised = [e for e in ends if e.kind == "raised" and e.frame is not None]
    inside = [e for e in raised if e.frame and e.frame.function in _EVALUATION_STEPS]
    past = [e for e in raised if e not in inside]
    if not any(e.kind == "mismatch" for e in ends) or not inside or len(past) != 1:
        return None
    others = ranks_text(sorted(e.rank for e in inside))
    return replace(
        past[0],
        kind="uneven",
        text=f"left validation while {others} had batches left: validation batch counts differ"
        " (uneven), and the next collective's sizes did not match (size mismatch)",
        frame=inside[0].frame,
        remedy="Give every rank the same number of batches: a DistributedSampler, drop_last=True,"
        " or limit_val_batches.",
        consequence=False,
        confidence=0.7,
    )


def _left_early(m: PreparedInput) -> list[_End]:
    """Ranks that left training before the others, whose collectives then failed."""
    found = []
    for rank in m.ended:
        departure = left_early.departure(m, (rank,))
        if departure is not None:
            others = [r for r, s in sorted(m.states.items()) if s is RankState.DEAD]
            reason = left_early.reason(departure, others, None)
            found.append(
                _End(rank=rank, kind=reason.kind, text=reason.text, remedy=reason.remedy,
                     confidence=reason.confidence)
            )  # fmt: skip
    return found


def _alike(causes: list[_End]) -> list[list[_End]]:
    """Ranks that ended alike, at one line, share a verdict."""
    grouped: dict[tuple[str, str], list[_End]] = {}
    for end in causes:
        grouped.setdefault((end.kind, end.text), []).append(end)
    return list(grouped.values())


def _verdict(
    m: PreparedInput, ends: list[_End], affected: tuple[int, ...], consequences: list[_End]
) -> Verdict:
    first = ends[0]
    ranks = tuple(sorted(e.rank for e in ends))
    pulses = {r: p for r in ranks if (p := m.pulses.get(r)) is not None}
    what = first.text if len(ranks) == 1 else re.sub(r"^was\b", "were", first.text)
    cause = f"{ranks_text(ranks)} {what}"
    errors = [e for e in consequences if e.consequence]
    cause += consequences_text(sorted(e.rank for e in errors))
    evidence: dict[str, Any] = {
        "reasons": {str(e.rank): e.text for e in ends},
        "consequences": {str(e.rank): e.text for e in errors},
        "ended_too": {str(e.rank): e.text for e in consequences if not e.consequence},
        "ranks": {str(r): position_facts(p) for r, p in pulses.items()},
    }
    if first.frame is not None:
        line = first.frame
        evidence["frame"] = f"{line.file}:{line.line} {line.function}"
    if first.worker is not None:
        evidence["worker"] = first.worker
    phase = _phase(pulses)
    line_text = frame_text(first.frame)
    place = f"{phase}, {line_text}" if phase and line_text else line_text or phase
    return Verdict(
        kind=first.kind,
        level="dead",
        culprits=ranks,
        waiting=tuple(r for r in affected if r not in ranks),
        place=place,
        cause=cause,
        remedy=first.remedy,
        confidence=first.confidence,
        began=min((p.changed_wall_s for p in pulses.values()), default=None),
        evidence=evidence,
    )


def _phase(pulses: Mapping[int, PulseState]) -> str | None:
    return next((p.phase.label for _, p in sorted(pulses.items())), None)


def _end(m: PreparedInput, rank: int, death: Death, oom_kills: int | None) -> _End:
    folded = m.fold.ranks.get(rank)
    event = folded.exception if folded is not None else None
    if event is not None:
        t = event.fields.get("t")
        at_s = float(t) if isinstance(t, (int, float)) else event.t_ns / 1e9
        return replace(_raised(rank, event.fields, event.text, oom_kills), at_s=at_s)
    return _gone(rank, death, oom_kills)


def _raised(rank: int, fields: Mapping[str, Any], said: str, oom_kills: int | None) -> _End:
    name, message = str(fields.get("type") or ""), str(fields.get("message") or "")
    line = _line_of(str(fields.get("traceback") or ""))
    short = message.strip().split("\n", 1)[0][:300]
    told = f"{name}: {short}" if name and short else name or said or "an exception"
    at = f" at {frame_text(line)}" if line else ""
    if (worker := _WORKER.search(message)) is not None:
        return _worker_end(rank, worker, message, oom_kills)
    if _SHM.search(message):
        return _End(
            rank=rank, kind="shared_memory", frame=line,
            text=f"ran out of shared memory (/dev/shm){at}: {short}",
            remedy="Give the container more (--shm-size), or use fewer workers.",
        )  # fmt: skip
    if name in ("OutOfMemoryError", "MemoryError") or "out of memory" in message:
        return _End(
            rank=rank, kind="out_of_memory", frame=line, text=f"ran out of memory{at}: {told}",
            remedy="Use a smaller batch, gradient accumulation or a lower precision.",
        )  # fmt: skip
    if _SIZES.search(message) and not is_consequence(message):
        return _End(
            rank=rank, kind="mismatch", frame=line, confidence=0.5,
            text=f"raised {told}{at}: a collective's sizes differ between ranks (size mismatch)",
            remedy="Every rank must call collectives with equal sizes; check that line.",
        )  # fmt: skip
    consequence = is_consequence(f"{name}: {message}")
    return _End(
        rank=rank, kind="raised", frame=line, text=f"raised {told}{at}", consequence=consequence,
        remedy="Fix the error at that line, then resume the run." if line else _RAISED,
    )  # fmt: skip


def _worker_end(rank: int, found: re.Match[str], message: str, oom_kills: int | None) -> _End:
    pids = [int(p) for p in re.findall(r"\d+", found["pids"])]
    number = f" {pids[0]}" if pids else ""
    name = found["signal"]
    if name in ("Killed", None) and oom_kills:
        text = f": DataLoader worker{number} was killed by the kernel's out-of-memory killer"
        remedy = "Use fewer workers, smaller samples, or give the job more memory."
    elif _SHM.search(message):
        text = f": DataLoader worker{number} exited unexpectedly: out of shared memory (/dev/shm)"
        remedy = "Give the container more shared memory (--shm-size), or use fewer workers."
    else:
        how = f"killed by signal {name}" if name else "no reason known"
        text = f": DataLoader worker{number} exited unexpectedly ({how})"
        remedy = "Check the log of the rank; with num_workers=0 the error is raised there."
    return _End(
        rank=rank, kind="worker_died", text=f"lost a worker{text}", remedy=remedy,
        worker=pids[0] if pids else None,
    )  # fmt: skip


def _gone(rank: int, death: Death, oom_kills: int | None) -> _End:
    at = f" at {frame_text(death.frame)}" if death.frame else ""
    said = f" (last line of its log: {death.last_line})" if death.last_line else ""
    name = death.signal
    if oom_kills and name in ("SIGKILL", None) and death.exit_code is None:
        return _End(
            rank=rank, kind="out_of_memory", confidence=0.85,
            text="was killed by the kernel's out-of-memory killer (SIGKILL)",
            remedy="Use fewer workers or smaller batches, or give the job more memory.",
        )  # fmt: skip
    if name is not None:
        by_agent = name in ("SIGTERM",)
        oom = " (not the out-of-memory killer)" if name == "SIGKILL" and oom_kills == 0 else ""
        abort = name == "SIGABRT" and bool(death.last_line and _SIZES.search(death.last_line))
        return _End(
            rank=rank, kind="mismatch" if abort else "killed", frame=death.frame,
            text=f"was killed by {name}{oom}{at}{said if name != 'SIGKILL' else ''}",
            remedy=_NATIVE_CRASH if name in _CRASHES else _KILLED.format(name),
            confidence=0.5 if by_agent or abort else 0.95,
            consequence=name == "SIGABRT" and is_consequence(death.last_line or ""),
        )  # fmt: skip
    if death.exit_code is not None:
        return _End(
            rank=rank, kind="exited", text=f"exited with code {death.exit_code}{said}",
            remedy=_EXITED,
            consequence=is_consequence(death.last_line or ""),
        )  # fmt: skip
    if death.last_line is not None and is_consequence(death.last_line):
        return _End(rank=rank, kind="exited", text=f"ended{said}", consequence=True)
    how = death.how or "its process is gone"
    if how.startswith("killed"):
        return _End(
            rank=rank, kind="killed", text=f"was {how}{said}", remedy=_KILLED.format("the signal")
        )
    return _End(
        rank=rank, kind="exited", confidence=0.55, remedy=_EXITED,
        text=f"died without a Python error (killed by a signal, or it called exit){said}",
    )  # fmt: skip


def _line_of(traceback: str) -> Frame | None:
    """The innermost line of a traceback that is the user's."""
    found = [
        Frame(file=t["file"], line=int(t["line"]), function=t["function"])
        for t in _FRAME.finditer(traceback)
    ]
    own = [f for f in found if not is_library_file(f.file)]
    return own[-1] if own else found[-1] if found else None
