"""Getting a run's diagnosis: of its supervisor while it lives, of what was kept once it has ended.

Blocks for some seconds: called by a command, or by a screen's worker thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ltui.app.live.run_requests import send_request
from ltui.app.state_words import state_sentence
from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, Verdict
from ltui.training.state.verdict_tracker import most_severe_first
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir

ANSWER_TIMEOUT_S = 20.0
"""A supervisor asks every rank, and waits some seconds for one that can't answer."""
PING_TIMEOUT_S = 1.0
NOT_BEFORE_S = 1.0
"""A verdict may begin with a pulse from a moment before the attempt's own beginning."""


@dataclass(frozen=True, slots=True)
class DiagnosisResult:
    """A diagnosis and what was read with it."""

    diagnosis: Diagnosis
    snapshot: RunSnapshot
    earlier: tuple[Verdict, ...]
    """Verdicts of the attempt that are over, oldest first."""


def request_diagnosis(run_dir: RunDir) -> DiagnosisResult:
    """The best diagnosis that can be had now. ``ProblemError`` where the run can't be read."""
    snapshot = resolve_snapshot(run_dir)
    told = _stored_verdicts(run_dir, snapshot)
    if snapshot.state in LIVE:
        diagnosis = _request_evidence(run_dir, snapshot)
        # The question takes seconds, in which the run may have moved on, or ended.
        snapshot = resolve_snapshot(run_dir)
        if snapshot.state in LIVE:
            earlier = tuple(v for v in told if v.ended is not None)
            return DiagnosisResult(diagnosis, snapshot, earlier)
        told = _stored_verdicts(run_dir, snapshot)
    return DiagnosisResult(
        post_mortem(snapshot, told, stored_diagnoses(run_dir, snapshot.attempt)), snapshot, ()
    )


def _request_evidence(run_dir: RunDir, snapshot: RunSnapshot) -> Diagnosis:
    try:
        # One that hangs is not waited for as long as one that gathers evidence.
        send_request(run_dir, {"cmd": "ping"}, PING_TIMEOUT_S)
        answer = send_request(run_dir, {"cmd": "diagnose"}, ANSWER_TIMEOUT_S)
        return Diagnosis.from_document(answer["diagnosis"])
    except (ProblemError, KeyError, ValueError) as error:
        why = "; ".join(p.what for p in error.problems) if isinstance(error, ProblemError) else ""
        lack = f"the supervisor gave no evidence: {why or error}"
        return from_snapshot(snapshot, missing=(lack,))


def from_snapshot(
    snapshot: RunSnapshot, *, missing: Iterable[str] = (), base: Diagnosis | None = None
) -> Diagnosis:
    """The snapshot's verdicts, with the evidence of ``base`` where there is one."""
    verdicts = tuple(most_severe_first(snapshot.verdicts))
    standing = [v for v in verdicts if v.ended is None]
    headline = standing[0].cause if standing else state_sentence(snapshot)
    if base is not None:
        return replace(base, headline=headline, verdicts=verdicts)
    return Diagnosis(
        run=snapshot.id,
        attempt=snapshot.attempt,
        taken_at=snapshot.taken_at or 0.0,
        headline=headline,
        verdicts=verdicts,
        missing=tuple(missing),
    )


def post_mortem(
    snapshot: RunSnapshot, told: Iterable[Verdict], kept_then: list[Diagnosis]
) -> Diagnosis:
    """Of an ended run: how it ended, every verdict of its last attempt, the last evidence."""
    last = kept_then[-1] if kept_then else None
    verdicts = most_severe_first(_without_duplicates([*told, *snapshot.verdicts]))
    missing = () if last is not None else ("no evidence was kept: nothing was suspicious then",)
    diagnosis = last or Diagnosis(
        run=snapshot.id, attempt=snapshot.attempt, taken_at=snapshot.ended_at or 0.0, headline=""
    )
    return replace(
        diagnosis,
        headline=_how_it_ended(snapshot, verdicts),
        verdicts=tuple(verdicts),
        missing=(*diagnosis.missing, *missing),
    )


def _how_it_ended(snapshot: RunSnapshot, verdicts: Iterable[Verdict]) -> str:
    """Return the sentence that every front end shows, with the verdicts that the store holds."""
    return state_sentence(replace(snapshot, verdicts=tuple(verdicts)))


def _without_duplicates(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Each verdict once, as it was told last."""
    return list({(v.kind, v.began): v for v in verdicts}.values())


def _stored_verdicts(run_dir: RunDir, snapshot: RunSnapshot) -> tuple[Verdict, ...]:
    """Those of the present attempt, oldest first; none where the history can't be read."""
    since = (snapshot.started_at or 0.0) - NOT_BEFORE_S
    try:
        with RunStore(run_dir) as store:
            return tuple(v for v in store.verdicts() if (v.began or since) >= since)
    except (ProblemError, sqlite3.Error):
        return ()


def stored_diagnoses(run_dir: RunDir, attempt: int) -> list[Diagnosis]:
    """What was kept of ``attempt``, oldest first; a file that can't be read is left out."""
    found = []
    for path in sorted((run_dir.path / "evidence" / str(attempt)).glob("[0-9]*.json")):
        try:
            found.append(Diagnosis.from_document(json.loads(path.read_bytes())))
        except (OSError, ValueError):
            continue
    return found
