"""Get the diagnosis of a run: from its supervisor while it lives, from stored evidence after its
end.

The functions block for some seconds. A command or a worker thread of a screen calls them.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.live.run_requests import require_live, send_request
from ltui.app.state_words import state_sentence
from ltui.training.diagnosis.evidence import Diagnosis
from ltui.training.json_codec import parse_json
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import SAMPLE_S
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, Verdict
from ltui.training.state.verdicts import most_severe_first
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir

ANSWER_TIMEOUT_S = 20.0
"""Seconds to wait for a diagnosis. The supervisor queries every rank and waits some seconds for
one that cannot answer."""
SAMPLE_TIMEOUT_S = SAMPLE_S + 15.0
"""Seconds to wait until the ranks have been sampled. One in which no Python runs is waited for."""
PING_TIMEOUT_S = 1.0
"""Seconds to wait for the answer to a ping."""
NOT_BEFORE_S = 1.0
"""A verdict may begin with a pulse of up to this many seconds before its attempt began."""


class DiagnosisResult(Struct, frozen=True):
    """A diagnosis, with the snapshot and the verdicts that were read with it."""

    diagnosis: Diagnosis
    snapshot: RunSnapshot
    earlier: tuple[Verdict, ...]
    """Verdicts of the attempt that have ended, oldest first."""


def request_diagnosis(run_dir: RunDir, *, sample: bool = False) -> DiagnosisResult:
    """Return the best diagnosis that is available now.

    ``sample``: sample the stacks of a slow and a normal rank before, for ``SAMPLE_S``. Raises
    ``ProblemError`` if the run cannot be read or sampled.
    """
    if sample:
        require_live(run_dir)
        send_request(run_dir, {"cmd": "sample"}, SAMPLE_TIMEOUT_S)
    snapshot = resolve_snapshot(run_dir)
    verdicts = _stored_verdicts(run_dir, snapshot)
    if snapshot.state in LIVE:
        diagnosis = _request_evidence(run_dir, snapshot)
        # The request takes seconds, during which the run may have continued or ended.
        snapshot = resolve_snapshot(run_dir)
        if snapshot.state in LIVE:
            earlier = tuple(v for v in verdicts if v.ended is not None)
            return DiagnosisResult(diagnosis, snapshot, earlier)
        verdicts = _stored_verdicts(run_dir, snapshot)
    return DiagnosisResult(
        post_mortem(snapshot, verdicts, stored_diagnoses(run_dir, snapshot.attempt)), snapshot, ()
    )


def _request_evidence(run_dir: RunDir, snapshot: RunSnapshot) -> Diagnosis:
    try:
        # A supervisor that hangs is detected sooner by a ping than by a diagnosis.
        send_request(run_dir, {"cmd": "ping"}, PING_TIMEOUT_S)
        answer = send_request(run_dir, {"cmd": "diagnose"}, ANSWER_TIMEOUT_S)
        return Diagnosis.from_document(answer["diagnosis"])
    except ProblemError as error:
        reason = "; ".join(p.what for p in error.problems)
    except (KeyError, ValueError) as error:
        reason = str(error)
    stored = stored_diagnoses(run_dir, snapshot.attempt)
    return from_snapshot(
        snapshot,
        missing=(f"the supervisor gave no evidence: {reason}",),
        base=stored[-1] if stored else None,
    )


def from_snapshot(
    snapshot: RunSnapshot, *, missing: Iterable[str] = (), base: Diagnosis | None = None
) -> Diagnosis:
    """Return a diagnosis of the snapshot's verdicts, with the evidence of ``base`` if it is
    given."""
    verdicts = tuple(most_severe_first(snapshot.verdicts))
    standing = [v for v in verdicts if v.ended is None]
    headline = standing[0].cause if standing else state_sentence(snapshot)
    if base is not None:
        return replace(
            base, headline=headline, verdicts=verdicts, missing=(*base.missing, *missing)
        )
    return Diagnosis(
        run=snapshot.id,
        attempt=snapshot.attempt,
        taken_at=snapshot.taken_at or time.time(),
        headline=headline,
        verdicts=verdicts,
        missing=tuple(missing),
    )


def post_mortem(
    snapshot: RunSnapshot, stored_verdicts: Iterable[Verdict], diagnoses: list[Diagnosis]
) -> Diagnosis:
    """Return the diagnosis of an ended run: how it ended, the verdicts of its last attempt, the
    last evidence."""
    # Each verdict once, in its latest version.
    latest = {(v.kind, v.began): v for v in (*stored_verdicts, *snapshot.verdicts)}
    verdicts = most_severe_first(list(latest.values()))
    diagnosis = (
        diagnoses[-1]
        if diagnoses
        else Diagnosis(
            run=snapshot.id,
            attempt=snapshot.attempt,
            # A queued run that was taken out has never run.
            taken_at=snapshot.ended_at or time.time(),
            headline="",
        )
    )
    return replace(
        diagnosis,
        # The sentence that every user interface shows, with the verdicts of the store.
        headline=state_sentence(replace(snapshot, verdicts=tuple(verdicts))),
        verdicts=tuple(verdicts),
    )


def _stored_verdicts(run_dir: RunDir, snapshot: RunSnapshot) -> tuple[Verdict, ...]:
    """Return the verdicts of the current attempt, oldest first; none if the history cannot be
    read."""
    since = (snapshot.started_at or 0.0) - NOT_BEFORE_S
    try:
        with RunStore(run_dir) as store:
            return tuple(v for v in store.verdicts() if (v.began or since) >= since)
    except (ProblemError, sqlite3.Error):
        return ()


def stored_diagnoses(run_dir: RunDir, attempt: int) -> list[Diagnosis]:
    """Return the stored diagnoses of ``attempt``, oldest first. Unreadable files are left out."""
    diagnoses = []
    for path in sorted((run_dir.path / "evidence" / str(attempt)).glob("[0-9]*.json")):
        try:
            diagnoses.append(Diagnosis.from_document(parse_json(read_regular(path))))
        except (OSError, ValueError):
            continue
    return diagnoses
