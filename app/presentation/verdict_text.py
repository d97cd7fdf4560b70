"""Sentences about verdicts and freeze warnings. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.state.run_snapshot import FreezeWarning, Verdict
from ltui.training.state.verdict_kinds import VerdictKind, is_gpu_kind
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line

if TYPE_CHECKING:
    from ltui.app.live.frame import ResolvedVerdict

MACHINE_RECOVERIES: dict[str, str] = {
    VerdictKind.NODE_UNREACHABLE: "did not answer",
    VerdictKind.AGENT_KILLED: "had no agent",
    VerdictKind.AGENT_FROZEN: "had an agent that did not run",
}
"""What had happened to a machine, by kind of the verdict that is over."""
DURATION = re.compile(r"\bfor \d[\d.]* ?(s|m|h)\b")
"""A duration in a sentence: ``is stopped (SIGSTOP) in backward for 9 s``."""
_NO_REPORTS = frozenset(
    {VerdictKind.NODE_UNREACHABLE, VerdictKind.AGENT_KILLED, VerdictKind.AGENT_FROZEN}
)
"""Kinds of a machine that does not report."""


def verdict_line(verdict: Verdict) -> str:
    """Return ``STALLED: rank 2 waits for its DataLoader``, with the remedy if there is one."""
    remedy = f"  {clean_line(verdict.remedy, 200)}" if verdict.remedy else ""
    return f"{level_word(verdict)}: {clean_line(verdict.cause, 300)}{remedy}"


def level_word(verdict: Verdict) -> str:
    """Return the level of a verdict. Only levels that block a run are in capitals."""
    level: str = verdict.level
    return level.upper() if level in BLOCKING_LEVELS else level.capitalize()


def verdict_banner_text(verdict: Verdict, now: float, *, more: int = 0) -> str:
    """Return the banner of a verdict: level, duration, cause and remedy.

    ``more`` is the number of other active verdicts.
    """
    cause = clean_line(verdict.cause)
    # The text of a GPU finding contains its age, and so do some causes.
    aged = verdict.began is not None and not is_gpu_kind(verdict.kind)
    lasting = ""
    if aged and verdict.began is not None and not DURATION.search(cause):
        lasting = f" for {formats.age(now - verdict.began)}"
    others = f" (+{more} more, d)" if more else ""
    text = f"{level_word(verdict)}{lasting}{others}: "
    if not verdict.remedy:
        return text + cause
    return f"{text}{_with_full_stop(cause)} {clean_line(verdict.remedy)}"


def recovery_text(resolved: ResolvedVerdict) -> str:
    """Return a sentence about a verdict that has ended."""
    verdict = resolved.verdict
    lasted = formats.age(resolved.lasted_s)
    if is_gpu_kind(verdict.kind):
        return f"Recovered after {lasted}: {clean_line(verdict.cause)}"
    if verdict.kind in _NO_REPORTS:
        return (
            f"Recovered after {lasted}: {clean_line(verdict.place or 'the machine')} reports again"
        )
    if verdict.kind in MACHINE_RECOVERIES and verdict.place:
        return f"Recovered after {lasted}: {verdict.place} {MACHINE_RECOVERIES[verdict.kind]}"
    if not verdict.culprits:
        return f"Recovered after {lasted}: the run was {verdict.level}"
    ranks = formats.rank_words(verdict.culprits)
    were = "was" if len(verdict.culprits) == 1 else "were"
    return f"Recovered after {lasted}: {ranks} {were} {verdict.level}"


def warning_line(warning: FreezeWarning) -> str:
    """Return ``WARNING: ranks have different batch counts ... Give every rank as many.``"""
    remedy = f" {clean_line(warning.remedy, 300)}" if warning.remedy else ""
    return f"WARNING: {clean_line(warning.what, 500)}{remedy}"


def _with_full_stop(text: str) -> str:
    """Return ``text`` with a full stop, unless it ends with a punctuation mark."""
    return text if not text or text[-1] in ".!?…" else f"{text}."
