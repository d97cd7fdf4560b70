"""Results of the fault catalogue as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults import plain
from tests.faults.fault import Fault
from tests.faults.quiet import HealthyResult
from tests.faults.verdicts import Outcome, missing_words

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
        """Seconds until the right verdict of each right run; empty if none is expected."""
        if not self.fault.expected:
            return []
        return [o.cause_s for o in self.outcomes if o.cause_s is not None]


def line(row: Row) -> str:
    """Return the result of one fault, with its errors."""
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
        texts += [f"    falsely: {wrong[:300]}" for wrong in o.wrong]
        texts += [f"    error: {o.error}"] if o.error else []
        if o.cause_s is None or not o.held:
            texts += [f"    said: {_verdict_text(v, row.fault)}" for v in o.last] or [
                "    said nothing"
            ]
    return f"{row.fault.id:16} " + "\n".join(texts)


def _verdict_text(verdict: Any, fault: Fault) -> str:
    lacks = " / ".join(str(missing_words(e, verdict)) for e in fault.expected)
    return (
        f"{verdict.level} {verdict.kind} {list(verdict.culprits)} at {verdict.place}: "
        f"{verdict.cause} (lacks {lacks})"
    )[:500]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def fault_table(rows: Sequence[Row], without: Mapping[str, dict[str, Any]]) -> str:
    """Return the Markdown table of ``docs/stalls.md``."""
    text = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    text += [f"| {' | '.join(_cells(row, without))} |" for row in rows]
    return "\n".join(text)


def _cells(row: Row, without: Mapping[str, dict[str, Any]]) -> list[str]:
    plain_text = plain.result_text(without.get(row.fault.id)).replace("|", "/")
    return [row.fault.title, _result_text(row), plain_text]


def _result_text(row: Row) -> str:
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
    """Return the faults that were reported wrongly, not at all, or later than their bound."""
    late = {r.fault.id for r in rows if r.seconds and max(r.seconds) > r.fault.bound_s}
    wrong = {r.fault.id for r in rows if not r.skipped and not all(o.right for o in r.outcomes)}
    return [r.fault.id for r in rows if r.fault.id in late | wrong]


def summary(rows: Sequence[Row], results: Sequence[HealthyResult]) -> str:
    """Return the figures of all faults and all healthy runs."""
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
    if results:
        text.append(_quiet_summary(results))
    return "\n".join(text)


def quiet_line(result: HealthyResult) -> str:
    lines = result.verdicts or ([f"error: {result.error}"] if result.error else [])
    words = "quiet" if not lines else "\n    ".join(["SAID", *lines])
    return f"{result.quiet.id:20} {result.watched_s:4.0f} s {words}"


def _quiet_summary(results: Sequence[HealthyResult]) -> str:
    total = sum(s.watched_s for s in results)
    loud = [s.quiet.id for s in results if s.verdicts or s.error]
    return (
        f"Quiet zoo: {len(results)} runs, {total / 60:.1f} minutes of training; "
        f"{'no verdict' if not loud else 'NOT quiet: ' + ', '.join(loud)}."
    )
