"""Verdicts on ranks whose process is gone or that raised, with causes and consequences apart. Pure.

When a rank dies, its peers' back ends report a closed connection. Those exceptions are
consequences, even if they were reported first. If there are only consequences, the verdict is held
back for a short time, until the cause shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.error_texts import (
    is_consequence,
    is_out_of_memory,
    memory_remedy,
    memory_text,
)
from ltui.training.diagnosis.evidence import Frame
from ltui.training.diagnosis.judge_input import (
    LIVE_STATES,
    Death,
    PreparedInput,
    first_change_s,
    position_facts,
)
from ltui.training.diagnosis.stack_frames import at_frame, frame_facts, frame_text, is_library_file
from ltui.training.diagnosis.stalls import uneven_batches
from ltui.training.diagnosis.stalls.missing_ranks import machine_verdicts
from ltui.training.diagnosis.verdict_words import (
    EQUAL_BATCHES,
    EQUAL_PROGRAM_BATCHES,
    consequences_text,
    place_text,
    verb,
)
from ltui.training.shared.record_types import Outcome
from ltui.training.state.good_checkpoints import last_good_checkpoint
from ltui.training.state.run_snapshot import CheckpointInfo, RankState, Verdict
from ltui.training.state.verdicts import VerdictKind

_SIZE_MISMATCH = re.compile(
    r"preamble\.length|size doesn't match|EnforceNotMet|Mismatch between|mismatch", re.IGNORECASE
)
_WORKER_ENDED = re.compile(
    r"DataLoader worker \(pid\(?s?\)?[ (]*(?P<pids>[\d, ]+)\)?.*?"
    r"(killed by signal: (?P<signal>\w+)|exited unexpectedly(: (?P<reason>[^\n]+))?)",
    re.DOTALL,
)
_SHARED_MEMORY = re.compile(
    # Not that of a GPU, of which Triton says "out of resource: shared memory".
    r"bus error|(?<!out of resource: )shared memory|No space left on device.*shm|shm_open",
    re.IGNORECASE,
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


class _RankEnd(Struct, frozen=True, kw_only=True):
    """How one rank ended, and whether another rank caused that."""

    kind: VerdictKind
    predicate: str
    """The event, as the end of a sentence that begins with the rank."""
    passive: bool = False
    """True if ``predicate`` is a participle that follows "was" or "were"."""
    frame: Frame | None = None
    remedy: str | None = None
    consequence: bool = False
    by_sigterm: bool = False
    confidence: float = 0.95
    worker: int | None = None
    """Pid of the DataLoader worker that ended first."""
    at_s: float = 0.0
    """Time of the exception in seconds, to find the first one."""

    def text(self, ranks: Sequence[int] = (0,)) -> str:
        """Return the predicate for ``ranks`` that ended alike, or for one rank."""
        return f"{verb(ranks, 'was', 'were')} {self.predicate}" if self.passive else self.predicate


_RankEnds = dict[int, _RankEnd]
"""rank -> how it ended."""


def death_verdicts(inputs: PreparedInput) -> list[Verdict]:
    """Return one verdict for each cause; its evidence names the consequences."""
    died = sorted(r for r, s in inputs.states.items() if s is RankState.DEAD)
    if not died:
        return []
    ends = {r: _end_of(inputs, r) for r in died}
    causes = {r: e for r, e in ends.items() if not e.consequence}
    # An agent ends the other ranks by SIGTERM. A program without Lightning does not catch it.
    causes = {r: e for r, e in causes.items() if not e.by_sigterm} or causes
    if all(e.kind is VerdictKind.MISMATCH and e.confidence <= _UNSURE for e in causes.values()):
        waited_s = max((inputs.still_s.get(r, _HOLD_BACK_S + 1) for r in died), default=0.0)
        allowed_s = _MISMATCH_HOLD_BACK_S if causes else _HOLD_BACK_S
        # The cause may be in the next report of another machine.
        ages_s = [n.link_age_s or 0.0 for n in inputs.nodes if n.node not in inputs.lost]
        allowed_s += max(ages_s, default=0.0)
        if waited_s <= allowed_s and len(died) < len(inputs.states):
            return []
        causes = _left_validation(inputs, ends) or causes
    causes = causes or _left_training_early(inputs, died)
    if not causes and inputs.lost:
        return _caused_by_lost_machines(inputs, ends)
    if not causes:
        first = min(ends, key=lambda r: (ends[r].at_s, r))
        causes = {first: replace(ends[first], confidence=0.4)}
    causes = _of_both_ranks(inputs, causes)
    # If another rank's cause is known, a rank without an error may have been ended by the agent.
    if any(e.confidence >= _CONFIDENT for e in causes.values()):
        causes = {r: e for r, e in causes.items() if e.confidence >= _CONFIDENT}
    consequences = {r: e for r, e in ends.items() if r not in causes}
    living = [r for r, s in inputs.states.items() if s not in (RankState.DEAD, RankState.ENDED)]
    affected = tuple(sorted({*living, *consequences}))
    # Ranks that ended alike at one line get one verdict.
    alike: dict[tuple[str, str], _RankEnds] = {}
    for rank, end in causes.items():
        alike.setdefault((end.kind, end.text()), {})[rank] = end
    return [_verdict(inputs, group, affected, consequences) for group in alike.values()]


def _caused_by_lost_machines(inputs: PreparedInput, ends: _RankEnds) -> list[Verdict]:
    """Blame machines that do not answer for the end of the ranks that lost their peers there."""
    died = tuple(sorted(ends))
    living = (r for r, s in inputs.states.items() if s in LIVE_STATES)
    lost_text = f"; {inputs.ranks_text(died)} lost the connection and ended with an error"
    return [
        replace(
            verdict,
            level=VerdictLevel.DEAD,
            waiting=tuple(sorted({*living, *died} - {*verdict.culprits})),
            cause=verdict.cause + lost_text,
            confidence=min(verdict.confidence, 0.8),
            evidence={**verdict.evidence, "consequences": _texts(ends)},
        )
        for verdict in machine_verdicts(inputs)
    ]


def _of_both_ranks(inputs: PreparedInput, causes: _RankEnds) -> _RankEnds:
    """Blame both of two ranks for sizes that differ, because the back end may abort either."""
    if len(inputs.states) != 2 or len(causes) != 1:
        return causes
    ((rank, end),) = causes.items()
    if end.kind is not VerdictKind.MISMATCH or end.confidence > _UNSURE:
        return causes
    both = replace(
        end,
        passive=False,
        predicate="called a collective with different sizes, and it is unknown which of them is"
        f" wrong: {inputs.ranks_text((rank,))} {end.text()}",
    )
    return dict.fromkeys(inputs.states, both)


def _left_validation(inputs: PreparedInput, ends: _RankEnds) -> _RankEnds:
    """Return the one rank that had left a validation in which the others still were.

    This applies to ranks whose collectives did not match in size. Back ends abort the rank that
    receives the wrong size, not the rank that sent it.
    """
    raised = {
        r: e.frame for r, e in ends.items() if e.kind is VerdictKind.RAISED and e.frame is not None
    }
    inside = {r: frame for r, frame in raised.items() if frame.function in _EVALUATION_STEPS}
    past = [r for r in raised if r not in inside]
    mismatch = any(e.kind is VerdictKind.MISMATCH for e in ends.values())
    if not mismatch or not inside or len(past) != 1:
        return {}
    end = _RankEnd(
        kind=VerdictKind.UNEVEN,
        predicate=f"left validation while {inputs.ranks_text(sorted(inside))} had batches left:"
        " validation batch counts differ (uneven), and the next collective's sizes did not match"
        " (size mismatch)",
        frame=next(iter(inside.values())),
        remedy=f"{EQUAL_BATCHES} limit_val_batches.",
        confidence=0.7,
    )
    return {past[0]: end}


def _left_training_early(inputs: PreparedInput, died: Sequence[int]) -> _RankEnds:
    """Return the ranks that left training before the others, whose collectives then failed."""
    if inputs.fold.program is not None:
        return {
            rank: _RankEnd(
                kind=VerdictKind.FINISHED_EARLY,
                predicate=f"ended its training at step {pulse.global_step} while the others went"
                " on: batch counts differ (uneven)",
                remedy=EQUAL_PROGRAM_BATCHES,
                confidence=0.7,
            )
            for rank, pulse in inputs.pulses_of(inputs.ended).items()
            if pulse.outcome is Outcome.FINISHED
        }
    ends = {}
    departures = uneven_batches.find_departures(inputs, inputs.ended)
    for rank, departure in departures.items():
        reason = uneven_batches.departure_reason(inputs, departure, died, None)
        ends[rank] = _RankEnd(
            kind=reason.kind,
            predicate=reason.text,
            remedy=reason.remedy,
            confidence=reason.confidence,
        )
    return ends


def _verdict(
    inputs: PreparedInput, ends: _RankEnds, affected: tuple[int, ...], consequences: _RankEnds
) -> Verdict:
    ranks = tuple(sorted(ends))
    first = next(iter(ends.values()))
    pulses = inputs.pulses_of(ranks)
    errors = {r: e for r, e in consequences.items() if e.consequence}
    others = {r: e for r, e in consequences.items() if not e.consequence}
    return Verdict(
        kind=first.kind,
        level=VerdictLevel.DEAD,
        culprits=ranks,
        waiting=tuple(r for r in affected if r not in ranks),
        place=place_text(next(iter(pulses.values()), None), frame_text(first.frame)),
        cause=f"{inputs.ranks_text(ranks)} {first.text(ranks)}"
        f"{consequences_text(sorted(errors), inputs.machines)}",
        remedy=_remedy(first.remedy, inputs.checkpoints),
        confidence=first.confidence,
        began=first_change_s(pulses),
        evidence={
            "reasons": _texts(ends),
            "consequences": _texts(errors),
            "ended_too": _texts(others),
            "ranks": position_facts(pulses),
            **frame_facts(first.frame),
            **({"worker": first.worker} if first.worker is not None else {}),
        },
    )


def _remedy(remedy: str | None, checkpoints: Sequence[CheckpointInfo]) -> str | None:
    """Return the remedy for a run that may have no checkpoint to resume from."""
    if remedy is None or last_good_checkpoint(checkpoints) is not None:
        return remedy
    return remedy.replace("resume the run", "start it again")


def _texts(ends: _RankEnds) -> dict[str, str]:
    return {str(r): e.text() for r, e in ends.items()}


def _end_of(inputs: PreparedInput, rank: int) -> _RankEnd:
    """Return how the rank ended: by its exception if it reported one, else by its process."""
    rank_fold = inputs.fold.ranks.get(rank)
    event = rank_fold.exception if rank_fold is not None else None
    if event is None:
        return _end_of_process(inputs.deaths.get(rank) or Death(), inputs.oom_kills_of(rank))
    t = event.fields.get("t")
    at_s = float(t) if isinstance(t, (int, float)) else event.t_ns / 1e9
    return replace(
        _end_by_exception(event.fields, event.text, inputs.oom_kills_of(rank)), at_s=at_s
    )


def _end_by_exception(
    fields: Mapping[str, Any], event_text: str, oom_kills: int | None
) -> _RankEnd:
    name, message = str(fields.get("type") or ""), str(fields.get("message") or "")
    libraries = fields.get("torch_dir")
    line = _innermost_user_line(str(fields.get("traceback") or ""), libraries)
    first_line = message.strip().split("\n", 1)[0][:300]
    error = f"{name}: {first_line}" if name and first_line else name or event_text or "an exception"
    if (worker := _WORKER_ENDED.search(message)) is not None:
        return _end_by_worker(worker, message, oom_kills)
    if _SHARED_MEMORY.search(message):
        return _RankEnd(
            kind=VerdictKind.SHARED_MEMORY,
            frame=line,
            predicate=f"ran out of shared memory (/dev/shm){at_frame(line)}: {first_line}",
            remedy="Give the container more (--shm-size), or use fewer workers.",
        )
    if is_out_of_memory(name, message):
        held = memory_text(message)
        memory = "GPU memory" if held else "memory"
        return _RankEnd(
            kind=VerdictKind.OUT_OF_MEMORY,
            frame=line,
            predicate=f"ran out of {memory}{at_frame(line)}: {held or error}",
            remedy=memory_remedy(message),
        )
    if _SIZE_MISMATCH.search(message) and not is_consequence(message):
        return _RankEnd(
            kind=VerdictKind.MISMATCH,
            frame=line,
            confidence=_UNSURE,
            predicate=f"raised {error}{at_frame(line)}: a collective's sizes differ between ranks"
            " (size mismatch)",
            remedy="Every rank must call collectives with equal sizes; check that line.",
        )
    return _RankEnd(
        kind=VerdictKind.RAISED,
        frame=line,
        predicate=f"raised {error}{at_frame(line)}",
        consequence=is_consequence(f"{name}: {message}"),
        remedy="Fix the error at that line, then resume the run." if line else _EXCEPTION_REMEDY,
    )


def _end_by_worker(error: re.Match[str], message: str, oom_kills: int | None) -> _RankEnd:
    pid = next((int(p) for p in re.findall(r"\d+", error["pids"])), None)
    worker = "DataLoader worker" if pid is None else f"DataLoader worker {pid}"
    signal_name = error["signal"]
    if signal_name in ("Killed", None) and oom_kills:
        text = "was killed by the kernel's out-of-memory killer"
        remedy = "Use fewer workers, smaller samples, or give the job more memory."
    elif _SHARED_MEMORY.search(message):
        text = "exited unexpectedly: out of shared memory (/dev/shm)"
        remedy = "Give the container more shared memory (--shm-size), or use fewer workers."
    else:
        how = f"killed by signal {signal_name}" if signal_name else error["reason"]
        text = f"exited unexpectedly ({how or 'no reason known'})"
        remedy = "Check the log of the rank; with num_workers=0 the error is raised there."
        if error["reason"]:
            remedy = "Put what trains below such a line, or use the start method fork."
    return _RankEnd(
        kind=VerdictKind.WORKER_DIED,
        predicate=f"lost a worker: {worker} {text}",
        remedy=remedy,
        worker=pid,
    )


def _end_of_process(death: Death, oom_kills: int | None) -> _RankEnd:
    """Return how a rank ended that reported no exception."""
    last_line = death.last_line or ""
    log_text = f" (last line of its log: {last_line})" if last_line else ""
    if oom_kills and death.signal in ("SIGKILL", None) and death.exit_code is None:
        return _RankEnd(
            kind=VerdictKind.OUT_OF_MEMORY,
            confidence=0.85,
            predicate="killed by the kernel's out-of-memory killer (SIGKILL)",
            passive=True,
            remedy="Use fewer workers or smaller batches, or give the job more memory.",
        )
    if death.signal is not None:
        return _end_by_signal(death, death.signal, log_text, oom_kills)
    consequence = is_consequence(last_line)
    remedy: str | None = _EXIT_REMEDY
    confidence = 0.95
    if death.exit_code is not None:
        predicate = f"exited with code {death.exit_code}"
    elif consequence:
        predicate, remedy = "ended", None
    else:
        predicate = "died without a Python error (killed by a signal, or it called exit)"
        confidence = 0.55
    return _RankEnd(
        kind=VerdictKind.EXITED,
        predicate=predicate + log_text,
        remedy=remedy,
        consequence=consequence,
        confidence=confidence,
    )


def _end_by_signal(
    death: Death, signal_name: str, log_text: str, oom_kills: int | None
) -> _RankEnd:
    last_line = death.last_line or ""
    killed = signal_name == "SIGKILL"
    aborted = signal_name == "SIGABRT"
    by_mismatch = aborted and bool(_SIZE_MISMATCH.search(last_line))
    no_oom = " (not the out-of-memory killer)" if killed and oom_kills == 0 else ""
    crashed = signal_name in _CRASH_SIGNALS
    return _RankEnd(
        kind=VerdictKind.MISMATCH if by_mismatch else VerdictKind.KILLED,
        frame=death.frame,
        predicate=f"killed by {signal_name}{no_oom}{at_frame(death.frame)}"
        f"{'' if killed else log_text}",
        passive=True,
        remedy=_CRASH_REMEDY if crashed else _SIGNAL_REMEDY.format(signal_name),
        by_sigterm=signal_name == "SIGTERM",
        confidence=_UNSURE if by_mismatch or signal_name == "SIGTERM" else 0.95,
        consequence=aborted and is_consequence(last_line),
    )


def _innermost_user_line(traceback: str, torch_dir: object) -> Frame | None:
    """Return the innermost frame of user code in a traceback, or else the innermost frame."""
    frames = [
        Frame(file=t["file"], line=int(t["line"]), function=t["function"])
        for t in _TRACEBACK_FRAME.finditer(traceback)
    ]
    user_frames = [f for f in frames if not is_library_file(f.file, torch_dir)]
    return user_frames[-1] if user_frames else frames[-1] if frames else None
