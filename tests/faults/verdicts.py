"""Is what ltui says of a fault right, and when was it first said? Also: what was said wrongly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, Verdict
from tests.faults.fault import GRAVE, Expected, Fault, line_of
from tests.faults.run import LOOK_S, ZooRun, started


@dataclass(slots=True)
class Outcome:
    """What became of one fault."""

    fault: Fault
    culprit_s: float | None = None
    """Seconds from the injection until culprit and level were right."""
    cause_s: float | None = None
    """And until the cause and the place were right too."""
    wrong: list[str] = field(default_factory=list)
    """Grave verdicts on others that were in force at some time, in words."""
    held: bool = True
    """Whether the right verdict, once said, stood."""
    last: tuple[Verdict, ...] = ()
    """As it was at the end."""
    shown: dict[str, Any] | None = None
    """What ``ltui show --json`` printed at the end."""
    skipped: str | None = None
    error: str | None = None

    @property
    def right(self) -> bool:
        return self.cause_s is not None and self.held and not self.wrong and self.error is None


def examine(fault: Fault, *, deprived: bool = False, keep: Path | None = None) -> Outcome:
    """Run ``fault`` and follow what is said of it."""
    outcome = Outcome(fault)
    try:
        with started(fault, deprived=deprived, keep=keep) as run:
            if fault.expected:
                _follow(fault, run, outcome)
            else:
                _watch_it_end(fault, run, outcome)
    except AssertionError as error:
        outcome.error = str(error)[:2000]
    return outcome


def _follow(fault: Fault, run: ZooRun, outcome: Outcome) -> None:
    struck = run.wait_for_injection()
    until = struck + fault.patience_s
    while time.monotonic() < until:
        seen = run.snapshot()
        now = time.monotonic()
        if seen is not None:
            verdicts = in_force(seen)
            outcome.last = verdicts or outcome.last
            _judge_the_judge(fault, verdicts, outcome, now - struck)
            if outcome.cause_s is not None and until > now + fault.hold_s + 0.5:
                until = now + fault.hold_s
            if seen.state not in LIVE:
                break
        time.sleep(LOOK_S)
    outcome.shown = json.loads(run.ltui("show", "last", "--json"))


def _judge_the_judge(
    fault: Fault, verdicts: Sequence[Verdict], outcome: Outcome, seconds: float
) -> None:
    culprit = all(any(culprit_right(e, v) for v in verdicts) for e in fault.expected)
    cause = all(any(right(e, v) for v in verdicts) for e in fault.expected)
    if culprit and outcome.culprit_s is None:
        outcome.culprit_s = round(seconds, 2)
    if cause and outcome.cause_s is None:
        outcome.cause_s = round(seconds, 2)
    if outcome.cause_s is not None:
        outcome.held = cause
    for verdict in verdicts:
        if verdict.level in GRAVE and not any(_about(e, verdict) for e in fault.expected):
            said = f"{verdict.kind} {list(verdict.culprits)}: {verdict.cause}"
            said = re.sub(r"\d+ s\b", "N s", said)
            if said not in outcome.wrong:
                outcome.wrong.append(said)


def _watch_it_end(fault: Fault, run: ZooRun, outcome: Outcome) -> None:
    """The run must end as it should, and nothing grave may be said."""
    struck = run.wait_for_injection()
    deadline = time.monotonic() + fault.patience_s
    while time.monotonic() < deadline:
        seen = run.snapshot()
        if seen is not None:
            outcome.last = in_force(seen)
            outcome.wrong += [v.cause for v in outcome.last if v.level in GRAVE]
            if seen.state not in LIVE:
                if seen.state.value == fault.ends:
                    outcome.culprit_s = outcome.cause_s = round(time.monotonic() - struck, 2)
                else:
                    outcome.error = f"it ended as {seen.state.value}: {seen.detail}"
                return
        time.sleep(LOOK_S)
    outcome.error = f"it did not end as {fault.ends}"


def in_force(snapshot: RunSnapshot) -> tuple[Verdict, ...]:
    """Verdicts not over; of a run that ended, all that are kept."""
    if snapshot.state not in LIVE:
        return snapshot.verdicts
    return tuple(v for v in snapshot.verdicts if v.ended is None)


def culprit_right(expected: Expected, verdict: Verdict) -> bool:
    return verdict.level in expected.levels and _about(expected, verdict)


def _about(expected: Expected, verdict: Verdict) -> bool:
    return tuple(sorted(verdict.culprits)) in (expected.culprits, *expected.also)


def right(expected: Expected, verdict: Verdict) -> bool:
    """Culprit, level, words and place."""
    said = f"{verdict.kind} | {verdict.place} | {verdict.cause}"
    return (
        culprit_right(expected, verdict)
        and all(re.search(word, said, re.IGNORECASE) for word in expected.words)
        and (expected.line is None or line_of(expected.line) in said)
    )


def missing(expected: Expected, verdict: Verdict) -> list[str]:
    """What a verdict on the right culprit does not say."""
    said = f"{verdict.kind} | {verdict.place} | {verdict.cause}"
    absent = [w for w in expected.words if not re.search(w, said, re.IGNORECASE)]
    if expected.line is not None and line_of(expected.line) not in said:
        absent.append(line_of(expected.line))
    return absent
