"""Check whether and when ltui reports the right verdict on a fault, and record wrong verdicts."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, Verdict
from tests.faults.fault import GRAVE, Expected, Fault, line_of
from tests.faults.run import POLL_S, FaultRun, started_run
from tests.ltui_command import answer


@dataclass(slots=True)
class Outcome:
    """The result of one run of a fault."""

    fault: Fault
    culprit_s: float | None = None
    """Seconds from the injection until culprit and level were right."""
    cause_s: float | None = None
    """Seconds until the cause and the place were right too."""
    wrong: list[str] = field(default_factory=list)
    """Texts of dead or stalled verdicts on other ranks that were active at some time."""
    held: bool = True
    """True if the right verdict stayed active."""
    last: tuple[Verdict, ...] = ()
    """Verdicts at the end."""
    shown: dict[str, Any] | None = None
    """Document that ``ltui show --json`` printed at the end."""
    skipped: str | None = None
    error: str | None = None

    @property
    def right(self) -> bool:
        return self.cause_s is not None and self.held and not self.wrong and self.error is None


def run_fault(fault: Fault, *, deprived: bool = False, keep: Path | None = None) -> Outcome:
    """Run ``fault`` and check its verdicts."""
    return check_verdicts(fault, started_run(fault, deprived=deprived, keep=keep))


def check_verdicts(fault: Fault, started: AbstractContextManager[FaultRun]) -> Outcome:
    """Check the verdicts on ``fault`` in a run that ``started`` starts and ends."""
    outcome = Outcome(fault)
    try:
        with started as run:
            if fault.expected:
                _watch_verdicts(fault, run, outcome)
            else:
                _watch_end(fault, run, outcome)
    except AssertionError as error:
        outcome.error = str(error)[:2000]
    return outcome


def _watch_verdicts(fault: Fault, run: FaultRun, outcome: Outcome) -> None:
    struck = run.wait_for_injection()
    until = struck + fault.patience_s
    while time.monotonic() < until:
        seen = run.snapshot()
        now = time.monotonic()
        if seen is not None:
            verdicts = active_verdicts(seen)
            outcome.last = verdicts or outcome.last
            _record_correctness(fault, verdicts, outcome, now - struck)
            if outcome.cause_s is not None and until > now + fault.hold_s + 0.5:
                until = now + fault.hold_s
            if seen.state not in LIVE:
                break
        time.sleep(POLL_S)
    outcome.shown = answer(run.ltui("show", "last", "--json"))


def _record_correctness(
    fault: Fault, verdicts: Sequence[Verdict], outcome: Outcome, seconds: float
) -> None:
    culprit = all(any(is_culprit_right(e, v) for v in verdicts) for e in fault.expected)
    cause = all(any(is_right(e, v) for v in verdicts) for e in fault.expected)
    if culprit and outcome.culprit_s is None:
        outcome.culprit_s = round(seconds, 2)
    if cause and outcome.cause_s is None:
        outcome.cause_s = round(seconds, 2)
    if outcome.cause_s is not None:
        outcome.held = cause
    for verdict in verdicts:
        if verdict.level in GRAVE and not any(_about(e, verdict) for e in fault.expected):
            text = f"{verdict.kind} {list(verdict.culprits)}: {verdict.cause}"
            text = re.sub(r"\d+ s\b", "N s", text)
            if text not in outcome.wrong:
                outcome.wrong.append(text)


def _watch_end(fault: Fault, run: FaultRun, outcome: Outcome) -> None:
    """Check that the run ends as expected, without a dead or stalled verdict."""
    struck = run.wait_for_injection()
    deadline = time.monotonic() + fault.patience_s
    while time.monotonic() < deadline:
        seen = run.snapshot()
        if seen is not None:
            outcome.last = active_verdicts(seen)
            outcome.wrong += [v.cause for v in outcome.last if v.level in GRAVE]
            if seen.state not in LIVE:
                if seen.state.value == fault.ends:
                    outcome.culprit_s = outcome.cause_s = round(time.monotonic() - struck, 2)
                else:
                    outcome.error = f"it ended as {seen.state.value}: {seen.detail}"
                return
        time.sleep(POLL_S)
    outcome.error = f"it did not end as {fault.ends}"


def active_verdicts(snapshot: RunSnapshot) -> tuple[Verdict, ...]:
    """Return the active verdicts; for a run that ended, all stored verdicts."""
    if snapshot.state not in LIVE:
        return snapshot.verdicts
    return tuple(v for v in snapshot.verdicts if v.ended is None)


def is_culprit_right(expected: Expected, verdict: Verdict) -> bool:
    return verdict.level in expected.levels and _about(expected, verdict)


def _about(expected: Expected, verdict: Verdict) -> bool:
    return tuple(sorted(verdict.culprits)) in (expected.culprits, *expected.also)


def is_right(expected: Expected, verdict: Verdict) -> bool:
    """Return True if culprit, level, words and place are right."""
    text = f"{verdict.kind} | {verdict.place} | {verdict.cause}"
    return (
        is_culprit_right(expected, verdict)
        and all(re.search(word, text, re.IGNORECASE) for word in expected.words)
        and (expected.line is None or line_of(expected.line) in text)
    )


def missing_words(expected: Expected, verdict: Verdict) -> list[str]:
    """Return the expected words that a verdict on the right culprit does not contain."""
    text = f"{verdict.kind} | {verdict.place} | {verdict.cause}"
    absent = [w for w in expected.words if not re.search(w, text, re.IGNORECASE)]
    if expected.line is not None and line_of(expected.line) not in text:
        absent.append(line_of(expected.line))
    return absent
