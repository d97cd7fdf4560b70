"""Judge one attempt, and write diagnoses into its run directory while a severe verdict is active.

A diagnosis is built from verdicts and evidence. How the process of a rank ended is read from its
wait status, the crash report of faulthandler, the summary of the elastic agent and its log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import BLOCKING_LEVELS, VerdictLevel
from ltui.training.diagnosis.collective_positions import collective_positions
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, Frame, StackGroup
from ltui.training.diagnosis.judge import Judgement, judge
from ltui.training.diagnosis.judge_input import Death, HealthHistory, JudgeInput, verdict_key
from ltui.training.diagnosis.sample_report import SampleReport
from ltui.training.diagnosis.stack_frames import is_library_file
from ltui.training.diagnosis.verdict_words import NO_MACHINES, rank_machines, ranks_text, verb
from ltui.training.lifecycle.elastic_log import WorkerFailure, last_error_line, log_tail
from ltui.training.process.stack_dumps import parse_stacks
from ltui.training.state.run_snapshot import (
    RankSnapshot,
    RankState,
    RunSnapshot,
    Verdict,
    health_word,
)
from ltui.training.store.run_directory import RunDir


class HealthMonitor:
    """Judges one attempt, and keeps the history that the next judgement needs."""

    def __init__(self) -> None:
        self.history = HealthHistory()
        """The history of the last judgement, which is part of the next input."""
        self._last_error: str | None = None
        """The last exception of the judge, so that each is logged once."""
        self._dead_before_end: set[int] = set()
        """Ranks that were dead before the run was asked to end."""

    def judge(self, inputs: JudgeInput, *, end_requested: bool) -> Judgement:
        """Judge the ranks.

        ``end_requested`` means that the run was asked to end: ranks that die now are not reported.
        """
        judgement = self._judge_safely(inputs)
        self.history = judgement.history
        return self._without_requested_deaths(judgement, end_requested)

    def _judge_safely(self, inputs: JudgeInput) -> Judgement:
        """Judge again without evidence if the judge fails.

        Evidence takes very many forms. An error while judging it must not end the supervisor, and
        pulses alone still show which ranks make no progress.
        """
        try:
            return judge(inputs)
        except Exception:
            if inputs.evidence is None:
                raise
            text = traceback.format_exc()
            if text != self._last_error:
                self._last_error = text
                print(text, file=sys.stderr, flush=True)
            return judge(replace(inputs, evidence=None, evidence_expected=False))

    def _without_requested_deaths(self, judgement: Judgement, end_requested: bool) -> Judgement:
        """Remove verdicts on ranks that died because the run was asked to end."""
        if not end_requested:
            verdicts = judgement.verdicts
            dead = {r for v in verdicts if v.level == VerdictLevel.DEAD for r in v.culprits}
            self._dead_before_end = dead
            return judgement
        active, ended = map(self._not_requested, (judgement.verdicts, judgement.ended))
        return replace(judgement, verdicts=active, ended=ended)

    def _not_requested(self, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
        return tuple(
            v
            for v in verdicts
            if v.level != VerdictLevel.DEAD or self._dead_before_end >= {*v.culprits}
        )


_MAXIMUM_FILES = 200
"""Maximum number of stored diagnoses in one attempt."""
_MAXIMUM_WRITES = 6
"""Maximum number of times a stored diagnosis is written while its verdict is active."""
_STORED_COLLECTIVES = 24
"""Number of last collectives of each rank that are stored."""


class _StoredDiagnosis(Struct):
    """The file of the diagnosis of one active verdict."""

    path: Path | None
    evidence: Evidence | None
    writes: int = 1


class DiagnosisWriter:
    """Stores a diagnosis for each severe verdict, and renews it with new evidence."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._stored: dict[str, _StoredDiagnosis] = {}

    def update(
        self,
        judgement: Judgement,
        evidence: Evidence | None,
        diagnose: Callable[[Verdict], Diagnosis],
    ) -> None:
        """Write diagnoses of new and ended verdicts, and of verdicts with new evidence.

        ``diagnose`` makes the diagnosis of a verdict with this evidence.
        """
        ended = {verdict_key(v) for v in judgement.ended}
        for verdict in (*judgement.verdicts, *judgement.ended):
            if verdict.level not in BLOCKING_LEVELS:
                continue
            key = verdict_key(verdict)
            stored = self._stored.get(key)
            if stored is None:
                path = write_diagnosis(self._run_dir, diagnose(verdict))
                self._stored[key] = _StoredDiagnosis(path, evidence)
                continue
            is_new = stored.evidence is not evidence and stored.writes < _MAXIMUM_WRITES
            if (is_new or key in ended) and stored.path is not None:
                stored.evidence = evidence
                stored.writes += 1
                write_diagnosis(self._run_dir, diagnose(verdict), stored.path)
            if key in ended:
                del self._stored[key]


def evidence_dir(run_dir: RunDir, attempt: int) -> Path:
    """Return the folder of the evidence and the diagnoses of an attempt."""
    return run_dir.path / "evidence" / str(attempt)


def write_diagnosis(run_dir: RunDir, diagnosis: Diagnosis, path: Path | None = None) -> Path | None:
    """Write a diagnosis to ``path`` or to a new file, and return its path; None on failure."""
    folder = evidence_dir(run_dir, diagnosis.attempt)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path is None:
            numbers = [int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit()]
            number = max(numbers, default=0) + 1
            if number > _MAXIMUM_FILES:
                return None
            path = folder / f"{number:03d}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(diagnosis.to_document()), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        return None
    return path


def shortened(evidence: Evidence | None) -> Evidence | None:
    """Remove old collectives, which the judge needs but a reader does not."""
    if evidence is None:
        return None
    ranks = {
        r: replace(e, collectives=e.collectives[-_STORED_COLLECTIVES:])
        for r, e in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


_FATAL_ERROR = re.compile(r"^Fatal Python error: (.+)$", re.M)
_SIGNAL_NAMES = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""Error text of faulthandler -> name of the signal."""
_ERROR_WORDS = re.compile(
    r"error|exception|abort|terminate|fault|killed|fatal|enforce", re.IGNORECASE
)


def describe_death(
    run_dir: RunDir,
    attempt: int,
    rank: int,
    pid: int,
    status: int | None,
    failures: Mapping[int, WorkerFailure],
) -> Death:
    """Return how the process ``pid`` of ``rank`` ended.

    ``status`` is its wait status if it was observed. ``failures`` are the failures by rank that the
    elastic agent reported.
    """
    code: int | None = None
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
    elif rank in failures:
        code = failures[rank].exit_code
    killed_by = _signal_name(-code) if code is not None and code < 0 else None
    crash_signal, frame = _read_crash_report(evidence_dir(run_dir, attempt) / f"stacks-{pid}.txt")
    line = last_error_line(log_tail(run_dir.rank_log_path(attempt, rank)))
    if line is not None and not _ERROR_WORDS.search(line):
        line = None
    return Death(
        signal=killed_by or crash_signal,
        exit_code=code if code is not None and code >= 0 else None,
        frame=frame,
        last_line=line,
    )


def _read_crash_report(path: Path) -> tuple[str | None, Frame | None]:
    """Return the signal and the line of user code of the last crash that faulthandler reported."""
    text = log_tail(path)
    crashes = list(_FATAL_ERROR.finditer(text))
    if not crashes:
        return None, None
    stacks = parse_stacks(text[crashes[-1].end() :])
    frames = next((s.frames for s in stacks if s.main), ())
    user_frame = next((f for f in frames if not is_library_file(f.file)), None)
    signal_name = _SIGNAL_NAMES.get(crashes[-1][1].strip())
    return signal_name, user_frame or (frames[0] if frames else None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_COMPARED_FRAMES = 40
"""Innermost frames by which stacks are compared and which are kept."""


def build_diagnosis(
    run: RunSnapshot,
    taken_at: float,
    verdicts: Sequence[Verdict],
    evidence: Evidence | None,
    samples: SampleReport | None = None,
) -> Diagnosis:
    """Return the diagnosis of a run, with these of its verdicts."""
    missing: tuple[str, ...] = ()
    machines = rank_machines(run.nodes)
    if evidence is not None:
        by_rank = [
            f"{ranks_text((r,), machines)}: {reason}"
            for r, e in sorted(evidence.ranks.items())
            for reason in e.missing
        ]
        missing = (*evidence.missing, *by_rank)
    slowest = None if run.limit is None else run.limit.rank
    if samples is not None and samples.differs:
        slowest = samples.slow
    return Diagnosis(
        run=run.id,
        attempt=run.attempt,
        taken_at=taken_at,
        headline=diagnosis_headline(verdicts, run.ranks, machines, slowest, health_word(run.limit)),
        verdicts=tuple(verdicts),
        evidence=evidence,
        wavefront=collective_positions(evidence.ranks) if evidence is not None else (),
        stacks=group_stacks(evidence, machines) if evidence is not None else (),
        samples=samples,
        missing=missing,
    )


def diagnosis_headline(
    verdicts: Sequence[Verdict],
    ranks: Sequence[RankSnapshot],
    machines: Mapping[int, str] = NO_MACHINES,
    slowest: int | None = None,
    health: str = health_word(None),
) -> str:
    """Return the cause of the most severe verdict, or a sentence about the ranks' health.

    ``slowest``: the rank that is known to be the slowest by other means than the times of steps.
    """
    if verdicts:
        first = verdicts[0]
        more = f" (and {len(verdicts) - 1} more)" if len(verdicts) > 1 else ""
        return f"{first.level}: {first.cause}{more}"
    timed = [r for r in ranks if r.step_s is not None]
    silent = [r.rank for r in ranks if r.state in (RankState.RUNNING, RankState.UNKNOWN)]
    if not timed and silent:
        return (
            f"Unknown: {ranks_text(silent, machines)} {verb(silent, 'sends', 'send')} no telemetry,"
            " so only the state of the processes can be checked; none of them is stopped"
        )
    if not timed:
        return "No rank has started to train yet"
    last = max(timed, key=lambda r: ((r.data_wait_share or 0.0), r.step_s or 0.0))
    last = next((r for r in timed if r.rank == slowest), last)
    wait = last.data_wait_share
    share = f", {100 * wait:.0f} % of it waiting for data" if wait is not None else ""
    if len(ranks) == 1:
        return f"{health}: rank {last.rank} is running, {last.step_s:.3g} s per step{share}"
    running = [r.rank for r in ranks]
    return (
        f"{health}: {ranks_text(running, machines)} {verb(running, 'is', 'are')} running; the"
        f" slowest is {ranks_text((last.rank,), machines)}"
        f" ({last.step_s:.3g} s per step{share})"
    )


def group_stacks(
    evidence: Evidence, machines: Mapping[int, str] = NO_MACHINES
) -> tuple[StackGroup, ...]:
    """Group the main threads of ranks and workers by equal stacks, the smallest group first.

    A thread that differs from the others is usually the one to look for.
    """
    groups: dict[tuple[Frame, ...], list[tuple[str, int]]] = {}
    for rank, rank_evidence in sorted(evidence.ranks.items()):
        if rank_evidence.main_stack is not None:
            frames = rank_evidence.main_stack.frames[:_COMPARED_FRAMES]
            groups.setdefault(frames, []).append((ranks_text((rank,), machines), rank))
        for worker in rank_evidence.workers:
            main = next((s for s in worker.stacks if s.main), None)
            if main is not None:
                name = f"worker {worker.process.pid} of {ranks_text((rank,), machines)}"
                groups.setdefault(main.frames[:_COMPARED_FRAMES], []).append((name, rank))
    return tuple(
        StackGroup(
            who=tuple(name for name, _ in members),
            ranks=tuple(sorted({rank for _, rank in members})),
            frames=frames,
        )
        for frames, members in sorted(groups.items(), key=lambda item: len(item[1]))
    )
