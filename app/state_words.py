"""Words for a run's state: one word for lists and headers, one sentence for reports. Pure.

Sentences about verdicts and freeze warnings are here, too.

Every user interface takes its words from here, so that they agree: the home screen, the run screen,
``ltui runs``, ``ltui show``, ``ltui diagnose`` and the lines of a run in the foreground.
"""

from __future__ import annotations

import re

from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.state.good_checkpoints import bad_loss
from ltui.training.state.run_snapshot import (
    LIVE,
    FreezeWarning,
    LimitKind,
    NodeState,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
    health_word,
)
from ltui.training.state.verdicts import VerdictKind, is_gpu_kind, most_severe_first
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line
from ltui.widgets.tone import Tone

SIMILAR_SPEED = 1.1
"""Ranks are equally fast if the slowest takes at most this many times as long as the fastest."""
FAILED = frozenset({RunState.FAILED, RunState.CRASHED, RunState.LOST})
"""States of a run that ended because of an error."""
STALLED, RANK_DEAD = "STALLED", "RANK DEAD"
_RANK_STATE_WORDS = {RankState.DEAD: RANK_DEAD, RankState.STALLED: STALLED}
STATE_SIGNS: dict[RunState, tuple[str, Tone]] = {
    RunState.QUEUED: ("○", Tone.DIM),
    RunState.STARTING: ("○", Tone.PLAIN),
    RunState.RUNNING: ("●", Tone.GOOD),
    RunState.PAUSING: ("‖", Tone.PLAIN),
    RunState.PAUSED: ("‖", Tone.WARN),
    RunState.STOPPING: ("■", Tone.PLAIN),
    RunState.STOPPED: ("■", Tone.PLAIN),
    RunState.FINISHED: ("✓", Tone.GOOD),
    RunState.FAILED: ("✗", Tone.BAD),
    RunState.CRASHED: ("✗", Tone.BAD),
    RunState.LOST: ("✗", Tone.BAD),
}
"""The sign and the tone of each state of a run."""
_MIN_CONFIDENCE = 0.6
"""A cause of death with less confidence does not replace the supervisor's own sentence."""


def state_word(snapshot: RunSnapshot) -> str:
    """Return the word for the state of a run: ``STALLED``, ``running, loss NaN since step 152``.

    It is in capitals if a rank is blocked.
    """
    word: str = snapshot.state.value
    if snapshot.state in LIVE:
        levels = {verdict.level for verdict in open_verdicts(snapshot)}
        for rank_state, blocked in _RANK_STATE_WORDS.items():
            if rank_state.value in levels or any(r.state is rank_state for r in snapshot.ranks):
                word = blocked
                break
    loss = bad_loss_words(snapshot)
    return f"{word}, {loss}" if loss else word


def machine_state_word(state: NodeState) -> str:
    """Return the word for the state of one machine of a run on several."""
    # Until its agent connects, it is not known whether anybody starts it.
    return "not joined" if state is NodeState.JOINING else state.value


def is_blocked(snapshot: RunSnapshot) -> bool:
    """Return whether a rank of a live run is stalled or dead."""
    return state_word(snapshot).startswith((STALLED, RANK_DEAD))


def needs_help(snapshot: RunSnapshot) -> bool:
    """Return whether the state's word calls for action by a person."""
    running_nan = snapshot.state is RunState.RUNNING and bool(bad_loss_words(snapshot))
    return running_nan or is_blocked(snapshot)


def waiting_reason(snapshot: RunSnapshot) -> str:
    """Return what a run waits for that does not train yet; empty if nothing is known."""
    if snapshot.state not in (RunState.QUEUED, RunState.STARTING):
        return ""
    # What to do about it follows: the command for other machines, for example.
    return clean_line((snapshot.detail or "").partition("; ")[0], 300)


def open_verdicts(snapshot: RunSnapshot) -> list[Verdict]:
    """Return the verdicts that are still active."""
    return [verdict for verdict in snapshot.verdicts if verdict.ended is None]


_LIMITS: dict[str, str] = {
    LimitKind.DATA: "data",
    LimitKind.HOST: "the host",
    LimitKind.DEVICE: "computing on the device, and nothing else",
    LimitKind.COMMUNICATION: "communication",
    LimitKind.RANK: "rank {rank}, which the others wait for",
    LimitKind.VALIDATION: "validation",
    LimitKind.CHECKPOINTS: "checkpoints",
    LimitKind.UNKNOWN: "not known",
}
"""What limits the speed, in words."""


def limit_text(snapshot: RunSnapshot) -> str:
    """Return what limits the speed, with its evidence; empty if too little was measured.

    ``data: the ranks wait 0.21 s of each step (0.5 s) for a batch``
    """
    limit = snapshot.limit
    if limit is None:
        return ""
    words = _LIMITS.get(limit.kind, _LIMITS[LimitKind.UNKNOWN]).format(rank=limit.rank)
    return clean_line(f"{words}: {'; '.join(limit.evidence)}" if limit.evidence else words, 400)


def limit_sentence(snapshot: RunSnapshot) -> str:
    """Return ``speed limited by data: ...``, also if it is not known; empty as ``limit_text``."""
    text = limit_text(snapshot)
    if text.startswith(_LIMITS[LimitKind.UNKNOWN]):
        return f"what limits the speed is {text}"
    return f"speed limited by {text}" if text else ""


def bad_loss_words(snapshot: RunSnapshot) -> str:
    """Return ``loss NaN since step 152``; empty if the loss is finite."""
    verdict = bad_loss(snapshot.verdicts)
    return "" if verdict is None else _bad_loss_words(verdict)


def _bad_loss_words(verdict: Verdict) -> str:
    step, value = verdict.evidence.get("step"), verdict.evidence.get("loss")
    since = "" if step is None else f" since step {step}"
    # Runs of an older version name an infinite loss so, or only in the cause.
    if "infinite" in (value, *verdict.cause.split()):
        value = "inf"
    return clean_line(f"loss {value or 'NaN'}{since}", 60)


def bad_loss_sentence(snapshot: RunSnapshot) -> str:
    """Return ``loss NaN since step 152, first on rank 0``; empty if the loss is finite."""
    verdict = bad_loss(snapshot.verdicts)
    if verdict is None:
        return ""
    rank = verdict.evidence.get("first_rank")
    return _bad_loss_words(verdict) + ("" if rank is None else f", first on rank {rank}")


def detail_words(snapshot: RunSnapshot) -> str | None:
    """Return the detail of the state: ``finished at step 160; loss NaN since step 41``."""
    parts = [part for part in (snapshot.detail, bad_loss_words(snapshot)) if part]
    return "; ".join(parts) or None


def verdict_note(verdict: Verdict) -> str:
    """Return the place of a verdict as the note at a rank; for a bad loss what it is."""
    if verdict.kind == VerdictKind.NAN_LOSS:
        return _bad_loss_words(verdict)
    return verdict.place or ""


def state_sentence(snapshot: RunSnapshot) -> str:
    """Return how a run without a verdict is doing, or how it ended."""
    if snapshot.state not in LIVE:
        return ended_sentence(snapshot)
    if snapshot.state is RunState.PAUSED:
        return "Healthy: the run is paused"
    if snapshot.state is not RunState.RUNNING:
        return f"No problem found: the run is {snapshot.state.value}"
    if not snapshot.ranks:
        return "No problem found, but no rank has reported yet"
    count = len(snapshot.ranks)
    subject = {1: "the rank is", 2: "both ranks are"}.get(count, f"all {count} ranks are")
    return f"{health_word(snapshot.limit)}: {subject} running{_pace(snapshot.ranks)}"


def _pace(ranks: tuple[RankSnapshot, ...]) -> str:
    step_times = [(r.step_s, r.rank) for r in ranks if r.step_s]
    if not step_times:
        return ""
    (slow_s, slow), (fast_s, _) = max(step_times), min(step_times)
    if slow_s < SIMILAR_SPEED * fast_s:
        return f", {formats.duration(slow_s)} per step"
    return (
        f"; rank {slow} is the slowest with {formats.duration(slow_s)} per step "
        f"(the fastest: {formats.duration(fast_s)})"
    )


def ended_sentence(snapshot: RunSnapshot) -> str:
    """Return the final state and its cause, as exactly as the diagnosis knows the cause."""
    word, detail = snapshot.state.value, ended_detail(snapshot)
    if _cause_of_death(snapshot) is not None and snapshot.global_step is not None:
        return f"{word} at {detail}"
    return detail if detail.lower().startswith(word) else f"{word}: {detail}" if detail else word


def ended_detail(snapshot: RunSnapshot) -> str:
    """Return the cause of the end without the state's word; empty if nothing is known."""
    if (verdict := _cause_of_death(snapshot)) is not None:
        at = "" if snapshot.global_step is None else f"step {snapshot.global_step}: "
        return f"{at}{clean_line(verdict.cause, 300)}"
    return clean_line(snapshot.detail or "", 300)


def _cause_of_death(snapshot: RunSnapshot) -> Verdict | None:
    """Return the verdict on the rank that failed first, if it says more than the detail does.

    The detail is written from exit codes alone; the verdict also knows the kernel's log, the rank's
    last lines and what the other ranks raised as a consequence.
    """
    if snapshot.state not in FAILED:
        return None
    detail = snapshot.detail or ""
    dead = [v for v in snapshot.verdicts if v.level == "dead"]
    dead.sort(key=lambda v: (v.began or float("inf"), len(v.culprits)))
    named = re.match(r"rank (\d+) (?!raised)", detail)
    if named is not None:
        signals = set(re.findall(r"SIG[A-Z]+", detail))
        certain = [
            v for v in dead if int(named[1]) in v.culprits and v.confidence >= _MIN_CONFIDENCE
        ]
        confirmed = [v for v in certain if all(name in v.cause for name in signals)]
        reasons = [(v.evidence.get("reasons") or {}).get(named[1]) for v in confirmed]
        return confirmed[0] if confirmed and not any(r and r in detail for r in reasons) else None
    return dead[0] if dead and not re.search(r"\brank", detail) else None


def reason_text(snapshot: RunSnapshot) -> str:
    """Return why a run needs help, or how it ended, if the state's word does not give it."""
    if snapshot.state in LIVE:
        grave = most_severe_first(open_verdicts(snapshot)) if needs_help(snapshot) else []
        return clean_line(grave[0].cause) if grave else waiting_reason(snapshot)
    sentence = ended_detail(snapshot) if snapshot.state in FAILED else ""
    if not sentence and (snapshot.detail or "").startswith("killed"):
        sentence = ended_detail(snapshot)
    return "; ".join(part for part in (sentence, bad_loss_sentence(snapshot)) if part)


def rank_note(snapshot: RunSnapshot, rank: RankSnapshot) -> str:
    """Return why a rank died, as the verdict knows it, else the rank's own note."""
    for verdict in snapshot.verdicts:
        reason = (verdict.evidence.get("reasons") or {}).get(str(rank.rank))
        if verdict.level == "dead" and reason and verdict.confidence >= _MIN_CONFIDENCE:
            return clean_line(str(reason), 120)
    return clean_line(rank.note or "", 120)


def state_sign(snapshot: RunSnapshot) -> tuple[str, str, Tone]:
    """Return the sign, the word and the tone of a run's state."""
    word = state_word(snapshot)
    if needs_help(snapshot):
        return "!", word, Tone.BAD
    sign, tone = STATE_SIGNS[snapshot.state]
    if tone is not Tone.BAD and bad_loss_words(snapshot):
        tone = Tone.WARN
    return sign, word, tone


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


def recovery_text(verdict: Verdict, lasted_s: float) -> str:
    """Return a sentence about a verdict that has ended."""
    lasted = formats.age(lasted_s)
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
