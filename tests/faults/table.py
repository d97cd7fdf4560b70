"""The zoo's results as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults import plain
from tests.faults.fault import Fault
from tests.faults.quiet import Silence
from tests.faults.verdicts import Outcome, missing

_HEAD = ("fault", "seconds to the right verdict", "plain Lightning")
_ENDS = {"stopped": "stops with a checkpoint"}


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, run once or more."""

    fault: Fault
    outcomes: Sequence[Outcome]

    @property
    def skipped(self) -> str | None:
        return self.outcomes[0].skipped

    @property
    def seconds(self) -> list[float]:
        """Of the runs that were right; none where no verdict is due."""
        if not self.fault.expected:
            return []
        return [o.cause_s for o in self.outcomes if o.cause_s is not None]


def line(row: Row) -> str:
    """One fault as it comes, with what is wrong about it."""
    if row.skipped:
        return f"{row.fault.id:16} skipped: {row.skipped}"
    texts = []
    for o in row.outcomes:
        if o.right:
            texts.append(f"right after {o.cause_s:.1f} s")
            continue
        texts.append(
            f"WRONG culprit {_seconds(o.culprit_s)} cause {_seconds(o.cause_s)} held {o.held}"
        )
        texts += [f"    falsely: {said[:300]}" for said in o.wrong]
        texts += [f"    error: {o.error}"] if o.error else []
        if o.cause_s is None or not o.held:
            texts += [f"    said: {_said(v, row.fault)}" for v in o.last] or ["    said nothing"]
    return f"{row.fault.id:16} " + "\n".join(texts)


def _said(verdict: Any, fault: Fault) -> str:
    lacks = " / ".join(str(missing(e, verdict)) for e in fault.expected)
    return (
        f"{verdict.level} {verdict.kind} {list(verdict.culprits)} at {verdict.place}: "
        f"{verdict.cause} (lacks {lacks})"
    )[:500]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def fault_table(rows: Sequence[Row], without: Mapping[str, dict[str, Any]]) -> str:
    """Markdown, as in ``docs/stalls.md``."""
    text = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    text += [f"| {' | '.join(_cells(row, without))} |" for row in rows]
    return "\n".join(text)


def _cells(row: Row, without: Mapping[str, dict[str, Any]]) -> list[str]:
    beside = plain.in_words(without.get(row.fault.id)).replace("|", "/")
    return [row.fault.title, _told(row), beside]


def _told(row: Row) -> str:
    if row.skipped:
        return f"skipped: {row.skipped.replace('|', '/')}"
    wrong = sum(not o.right for o in row.outcomes)
    if wrong:
        return "MISSED" if len(row.outcomes) == 1 else f"MISSED {wrong} of {len(row.outcomes)}"
    if row.fault.ends:
        return f"no fault: {_ENDS.get(row.fault.ends, row.fault.ends)}"
    middle = f"{statistics.median(row.seconds):.1f}"
    return middle if len(row.seconds) == 1 else f"{middle} (most {max(row.seconds):.1f})"


def misses(rows: Sequence[Row]) -> list[str]:
    """Faults that were told wrongly, not at all, or later than their bound."""
    late = {r.fault.id for r in rows if r.seconds and max(r.seconds) > r.fault.bound_s}
    wrong = {r.fault.id for r in rows if not r.skipped and not all(o.right for o in r.outcomes)}
    return [r.fault.id for r in rows if r.fault.id in late | wrong]


def summary(rows: Sequence[Row], silences: Sequence[Silence]) -> str:
    """The figures over all faults and all quiet runs."""
    text = []
    ran = [row for row in rows if not row.skipped]
    runs = [o for row in ran for o in row.outcomes]
    if runs:
        culprit = sum(o.culprit_s is not None and not o.wrong for o in runs)
        cause = sum(o.right for o in runs)
        text.append(
            f"Faults: {len(ran)}, runs of them: {len(runs)}; right culprit {culprit}, right cause"
            f" {cause}; skipped {len(rows) - len(ran)}."
        )
    if seconds := [s for row in ran for s in row.seconds]:
        text.append(
            f"Seconds to the right verdict: median {statistics.median(seconds):.1f}, most"
            f" {max(seconds):.1f}."
        )
    if rows:
        text.append(f"Missed, or later than their bound: {', '.join(misses(rows)) or 'none'}.")
    if silences:
        text.append(_quiet_summary(silences))
    return "\n".join(text)


def quiet_line(silence: Silence) -> str:
    said = silence.said or ([f"error: {silence.error}"] if silence.error else [])
    words = "quiet" if not said else "\n    ".join(["SAID", *said])
    return f"{silence.quiet.id:20} {silence.watched_s:4.0f} s {words}"


def _quiet_summary(silences: Sequence[Silence]) -> str:
    total = sum(s.watched_s for s in silences)
    loud = [s.quiet.id for s in silences if s.said or s.error]
    return (
        f"Quiet zoo: {len(silences)} runs, {total / 60:.1f} minutes of training; "
        f"{'no verdict' if not loud else 'NOT quiet: ' + ', '.join(loud)}."
    )
