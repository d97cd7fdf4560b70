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

_HEAD = ("fault", "culprit", "cause", "median s", "max s", "plain Lightning")


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
        if o.cause_s is None:
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
    """Markdown, then the figures over all faults."""
    text = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    text += [f"| {' | '.join(_cells(row, without))} |" for row in rows]
    ran = [row for row in rows if not row.skipped]
    runs = [o for row in ran for o in row.outcomes]
    culprit = sum(o.culprit_s is not None and not o.wrong for o in runs)
    cause = sum(o.cause_s is not None and not o.wrong for o in runs)
    text.append(f"\n{len(ran)} faults, {len(runs)} runs; culprit right {culprit}, cause {cause}.")
    seconds = [s for row in ran for s in row.seconds]
    if seconds:
        text.append(
            f"Seconds to the right verdict: median {statistics.median(seconds):.1f}, "
            f"max {max(seconds):.1f}."
        )
    late = [r.fault.id for r in ran if r.seconds and max(r.seconds) > r.fault.bound_s]
    text.append(f"Later than their bound: {', '.join(late) or 'none'}.")
    return "\n".join(text)


def _cells(row: Row, without: Mapping[str, dict[str, Any]]) -> list[str]:
    beside = plain.in_words(without.get(row.fault.id)).replace("|", "/")
    if row.skipped:
        return [row.fault.title, "skipped", row.skipped.replace("|", "/"), "", "", beside]
    runs = row.outcomes
    seconds = row.seconds
    if row.fault.ends:
        word = f"no fault: {row.fault.ends}"
        return [row.fault.title, word, _share([o.right for o in runs]), "", "", beside]
    return [
        row.fault.title,
        _share([o.culprit_s is not None and not o.wrong for o in runs]),
        _share([o.cause_s is not None and o.held and not o.wrong for o in runs]),
        f"{statistics.median(seconds):.1f}" if seconds else "never",
        f"{max(seconds):.1f}" if seconds else "never",
        beside,
    ]


def _share(right: list[bool]) -> str:
    if len(right) == 1:
        return "yes" if right[0] else "NO"
    return f"{sum(right)} of {len(right)}"


def quiet_line(silence: Silence) -> str:
    said = silence.said or ([f"error: {silence.error}"] if silence.error else [])
    words = "quiet" if not said else "\n    ".join(["SAID", *said])
    return f"{silence.quiet.id:20} {silence.watched_s:4.0f} s {words}"


def quiet_verdict(silences: Sequence[Silence]) -> str:
    total = sum(s.watched_s for s in silences)
    loud = [s.quiet.id for s in silences if s.said or s.error]
    return (
        f"Quiet zoo: {len(silences)} runs, {total / 60:.1f} minutes of training; "
        f"{'no verdict' if not loud else 'NOT quiet: ' + ', '.join(loud)}."
    )
