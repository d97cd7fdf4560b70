"""Turn a diagnosis into the view model of its screen and report, with equal ranks merged. Pure.

All text that a run wrote (messages, paths, function names) is made safe here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ltui.app.diagnosis import collective_tables
from ltui.app.diagnosis.process_rows import (
    MAX_SINGLE_ROWS,
    machine_lines,
    process_rows,
    stack_lines,
    stack_title,
)
from ltui.app.presentation.snapshot_text import program_text
from ltui.app.state_words import DURATION, FAILED, level_word, limit_sentence, state_word
from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, RankEvidence
from ltui.training.diagnosis.sample_report import SampleReport, SampleRow
from ltui.training.diagnosis.verdict_words import rank_machines
from ltui.training.state.good_checkpoints import last_good_checkpoint, nan_since
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, Verdict
from ltui.training.state.verdicts import is_superseded, most_severe_first
from ltui.widgets import formats
from ltui.widgets.columns import shortened
from ltui.widgets.sanitise import clean_line, clean_lines, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import (
    Cell,
    DiagnosisViewModel,
    SamplesViewModel,
    StackViewModel,
    VerdictViewModel,
)

AT_THE_END_S = 1.0
"""A verdict that ended within this many seconds before the run's end counts as active at the
end."""
MAX_STACKS = 12
"""Maximum number of stacks on the screen; the report has all of them."""
MAX_MACHINES = 4
"""Maximum number of machines whose load and memory are shown."""
MAX_EARLIER = 6
"""Maximum number of ended verdicts that are shown."""
LAST_LINES = 8
"""Maximum number of lines of an exception or log."""
LAST_WORDS = 4
"""Maximum number of ranks with their exceptions or logs."""
MAX_PROGRAM_CHARS = 40
"""Maximum characters of a preset or command in the line below the headline."""
MAX_SENTENCE_CHARS = 600
"""Maximum characters of a sentence that a run wrote."""

LEVEL_TONES = {"dead": Tone.BAD, "stalled": Tone.BAD, "slow": Tone.WARN, "warning": Tone.WARN}
"""The tone of each verdict level."""
_LABELS = {
    "still_s": "no progress for",
    "budget_s": "limit",
    "reasons": "how it died",
    "stopped_pids": "stopped PIDs",
    "worker": "worker",
    "frame": "in",
    "moving": "moving",
    "collective": "collective",
    "at": "called",
}
"""Words for the names of evidence, in the order in which they are shown."""


class DiagnosisContext(Struct, frozen=True, kw_only=True):
    """The facts that are shown with a diagnosis."""

    snapshot: RunSnapshot
    now: float
    earlier: tuple[Verdict, ...] = ()
    """Verdicts that have ended, oldest first."""
    notes: tuple[str, ...] = ()
    """Remarks that are needed to read the rest correctly: ``the supervisor does not answer``."""
    full_paths: bool = False
    """Show complete paths, as in a report. On a screen the last two parts of a path are enough."""
    asking: bool = False
    """Evidence was requested and has not arrived yet."""


def diagnosis_view_model(diagnosis: Diagnosis, context: DiagnosisContext) -> DiagnosisViewModel:
    """Return the view model of a diagnosis, with active verdicts first."""
    evidence = diagnosis.evidence
    active = [
        v
        for v in most_severe_first(diagnosis.verdicts)
        if _is_active(v, context) and not is_superseded(v, diagnosis.verdicts)
    ]
    culprits = {rank for v in active for rank in v.culprits}
    waiting = {rank for v in active for rank in v.waiting}
    alarm = any(v.level in BLOCKING_LEVELS for v in active)
    grids = collective_tables.collective_tables(diagnosis, culprits, alarm=alarm)
    return DiagnosisViewModel(
        headline=_headline(diagnosis, active, context),
        about=_about_line(diagnosis, context),
        verdicts=tuple(_verdict_view_model(v, context) for v in active),
        verdicts_note=_no_verdicts_note(context.snapshot),
        limit=limit_sentence(context.snapshot),
        earlier=tuple(_earlier_line(v) for v in _ended_verdicts(diagnosis, context)[-MAX_EARLIER:]),
        collectives=grids,
        collectives_note="" if grids else _no_collectives_note(evidence, context),
        stacks=_stack_view_models(diagnosis, culprits, context),
        stacks_note=_no_stacks_note(evidence, context),
        samples=_samples_view_model(diagnosis.samples, context),
        processes=process_rows(evidence, culprits, waiting, rank_machines(context.snapshot.nodes))
        if evidence
        else (),
        machine=_machine_lines(evidence, culprits) if evidence else (),
        last_output=_exceptions_and_logs(evidence, culprits) if evidence else (),
        missing=_missing_lines(diagnosis, context),
    )


def _machine_lines(evidence: Evidence, culprits: set[int]) -> tuple[str, ...]:
    """Return a line about each machine of a culprit, or else about the first machines."""
    hosts = evidence.hosts or {0: evidence.host}
    at_fault = {evidence.ranks[r].node for r in culprits if r in evidence.ranks}
    shown = sorted(hosts.keys() & at_fault) or sorted(hosts)
    return tuple(line for node in shown[:MAX_MACHINES] for line in machine_lines(hosts[node]))


def _is_active(verdict: Verdict, context: DiagnosisContext) -> bool:
    """Return whether a verdict is active, or was active when the run ended."""
    ended_at = context.snapshot.ended_at
    if verdict.ended is None or context.snapshot.state in LIVE:
        return verdict.ended is None
    return ended_at is None or verdict.ended >= ended_at - AT_THE_END_S


# -- verdicts --------------------------------------------------------------------------------------


def level_and_age(verdict: Verdict, until: float) -> str:
    """Return ``STALLED for 12 s``: its whole duration, or its duration up to ``until`` if it is
    active."""
    word = level_word(verdict)
    # The cause may give its own duration, which begins a little earlier.
    if verdict.began is None or DURATION.search(verdict.cause):
        return word
    until = until if verdict.ended is None else verdict.ended
    return f"{word} for {formats.age(max(0.0, until - verdict.began))}"


def _end_time(context: DiagnosisContext) -> float:
    run = context.snapshot
    return context.now if run.state in LIVE or run.ended_at is None else run.ended_at


def _headline(diagnosis: Diagnosis, active: Sequence[Verdict], context: DiagnosisContext) -> Cell:
    if not active:
        return Cell(text=clean_line(diagnosis.headline, MAX_SENTENCE_CHARS))
    first = active[0]
    text = (
        f"{level_and_age(first, _end_time(context))}: {clean_line(first.cause, MAX_SENTENCE_CHARS)}"
    )
    if context.snapshot.state not in LIVE:
        text = clean_line(diagnosis.headline, MAX_SENTENCE_CHARS)
    more = f"  (+{len(active) - 1} more)" if len(active) > 1 else ""
    return Cell(text=f"! {text}{more}", tone=LEVEL_TONES.get(first.level, Tone.WARN))


def _about_line(diagnosis: Diagnosis, context: DiagnosisContext) -> str:
    run = context.snapshot
    program = shortened(clean_name(program_text(run)), MAX_PROGRAM_CHARS)
    parts = [
        clean_name(run.name), program, state_word(run), f"attempt {diagnosis.attempt}",
        f"step {formats.step(run.global_step, run.max_steps)}", _checked_text(diagnosis, context),
    ]  # fmt: skip
    notes = (clean_line(note) for note in context.notes if note != limit_sentence(run))
    return " · ".join([*filter(None, parts), *notes])


def _checked_text(diagnosis: Diagnosis, context: DiagnosisContext) -> str:
    if context.asking:
        return "checking ..."
    return f"checked {_age_text(diagnosis.taken_at, context)}"


def _age_text(taken_at: float, context: DiagnosisContext) -> str:
    """Return ``12 s ago``; of a run that has ended, how long before its end."""
    ended_at = context.snapshot.ended_at
    if context.snapshot.state in LIVE or ended_at is None:
        return formats.ago(max(0.0, context.now - taken_at))
    before_s = ended_at - taken_at
    return (
        "when it ended" if before_s <= AT_THE_END_S else f"{formats.age(before_s)} before it ended"
    )


def _verdict_view_model(verdict: Verdict, context: DiagnosisContext) -> VerdictViewModel:
    facts = []
    if verdict.culprits:
        facts.append(("who", f"{formats.rank_words(verdict.culprits)}"))
    if verdict.waiting:
        facts.append(("waiting", formats.rank_words(verdict.waiting)))
    if verdict.place:
        facts.append(("where", clean_line(verdict.place, MAX_SENTENCE_CHARS)))
    if verdict.remedy:
        facts.append(("to do", clean_line(verdict.remedy, MAX_SENTENCE_CHARS)))
    if verdict.level in BLOCKING_LEVELS and context.snapshot.state in LIVE:
        facts.append(("or", _kill_and_resume(context.snapshot)))
    facts.append(("certainty", certainty(verdict.confidence)))
    return VerdictViewModel(
        title=Cell(
            text=level_and_age(verdict, _end_time(context)),
            tone=LEVEL_TONES.get(verdict.level, Tone.WARN),
        ),
        sentence=clean_line(verdict.cause, MAX_SENTENCE_CHARS),
        facts=tuple(facts),
        evidence=tuple(_evidence_entries(verdict)),
    )


def certainty(confidence: float) -> str:
    """Return ``high (90 %)`` or ``low, a guess (30 %)``."""
    word = "high" if confidence >= 0.85 else "medium" if confidence >= 0.6 else "low, a guess"
    return f"{word} ({formats.percent(confidence)})"


def _no_verdicts_note(run: RunSnapshot) -> str:
    if run.state in FAILED:
        where = f", in {clean_line(run.log_dir)}" if run.log_dir else ""
        return f"Its log says how it ended: ltui logs {clean_name(run.id)}{where}"
    slows = run.limit is not None and run.limit.slows
    return "No rank stalls; what limits the speed stands above" if slows else ""


def _kill_and_resume(run: RunSnapshot) -> str:
    # The command line prints it, too.
    kill = "Press k to kill (ltui stop --kill)"
    last = last_good_checkpoint(run.checkpoints, nan_since(run.verdicts))
    if last is None:
        return f"{kill}; there is no checkpoint to resume from"
    text = f"{kill}, then r to resume (ltui resume) from step {formats.step(last.global_step)}"
    lost = (run.global_step or last.global_step) - last.global_step
    return f"{text} (repeats {formats.count(lost)} steps)" if lost > 0 else text


def _ended_verdicts(diagnosis: Diagnosis, context: DiagnosisContext) -> list[Verdict]:
    current = {(v.kind, v.began) for v in diagnosis.verdicts}
    earlier = [v for v in context.earlier if (v.kind, v.began) not in current]
    every = [*earlier, *diagnosis.verdicts]
    over = [v for v in every if not _is_active(v, context) and not is_superseded(v, every)]
    return sorted(over, key=lambda v: v.began or 0.0)


def _earlier_line(verdict: Verdict) -> str:
    ranks = f" ({formats.rank_words(verdict.culprits)})" if verdict.culprits else ""
    return (
        f"{level_and_age(verdict, verdict.ended or 0.0)}{ranks}: {clean_line(verdict.cause, 200)}"
    )


def _evidence_entries(verdict: Verdict) -> list[tuple[str, str]]:
    entries = []
    for name, value in sorted(verdict.evidence.items(), key=lambda item: _sort_position(item[0])):
        text = evidence_text(str(name), value)
        if text:
            entries.append((_LABELS.get(name, clean_name(str(name).replace("_", " "), 30)), text))
    return entries


def _sort_position(name: str) -> int:
    """Return the sort position of a piece of evidence: labelled names first, ``ranks`` last."""
    return list(_LABELS).index(name) if name in _LABELS else len(_LABELS) + (name == "ranks")


def evidence_text(name: str, value: Any) -> str:
    """Return one entry of a verdict's evidence as text. A value that several ranks share is
    given once."""
    if isinstance(value, Mapping) and value and all(str(k).isdecimal() for k in value):
        return _by_rank_text(name, {int(k): v for k, v in value.items()})
    if name == "collective" and isinstance(value, Mapping) and "seq" in value:
        return _collective_text(value)
    if isinstance(value, Mapping):
        parts = ((clean_name(str(k)), evidence_text(str(k), v)) for k, v in value.items())
        return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in parts if v)
    if isinstance(value, (list, tuple)):
        return ", ".join(t for t in (evidence_text(name, v) for v in value) if t)
    return _scalar_text(name, value)


def _collective_text(value: Mapping[str, Any]) -> str:
    """Return ``all_reduce #16 of group 0``."""
    op = clean_name(str(value.get("op") or ""), 40)
    group = clean_name(str(value.get("group", "")), 40)
    number = f"#{evidence_text('seq', value['seq'])}{f' of group {group}' if group else ''}"
    return f"{op} {number}".strip()


def _scalar_text(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if name.endswith("_s"):
            return formats.age(float(value))
        if name.endswith("_bytes"):
            return formats.size(value)
        if name.endswith("_share"):
            return formats.percent(float(value))
        if name == "epoch":
            return str(int(value) + 1)  # Epochs count from 1 wherever they are shown.
        # No thin spaces: the number may be a pid that is copied into a command.
        return str(value) if isinstance(value, int) else formats.significant(value)
    return clean_line(str(value), MAX_SENTENCE_CHARS)


def _by_rank_text(name: str, values: Mapping[int, Any]) -> str:
    numbers = {r: float(v) for r, v in values.items() if type(v) in (int, float)}
    if name.endswith("_s") and len(numbers) == len(values) and len(values) > 2:
        return _spread_text(numbers)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_by_text.setdefault(evidence_text(name, value), []).append(rank)
    shown = [
        f"{formats.rank_words(ranks)}: {text}" for text, ranks in ranks_by_text.items() if text
    ]
    hidden = len(shown) - MAX_SINGLE_ROWS
    return "; ".join(shown[:MAX_SINGLE_ROWS]) + (f"; and {hidden} more" if hidden > 0 else "")


def _spread_text(numbers: Mapping[int, float]) -> str:
    low, high = min(numbers.values()), max(numbers.values())
    if high - low < 1:
        return f"{formats.age(high)} ({formats.rank_words(list(numbers))})"
    longest = [r for r, v in numbers.items() if v == high]
    return f"{formats.age(low)} to {formats.age(high)} (longest {formats.rank_words(longest)})"


# -- stacks ----------------------------------------------------------------------------------------


def _stack_view_models(
    diagnosis: Diagnosis, culprits: set[int], context: DiagnosisContext
) -> tuple[StackViewModel, ...]:
    def order(group: Any) -> tuple[bool, int]:
        return not culprits & set(group.ranks), min(group.ranks, default=0)

    view_models = [
        StackViewModel(
            title=Cell(
                text=stack_title(group, culprits),
                tone=Tone.BAD if culprits & set(group.ranks) else Tone.PLAIN,
            ),
            lines=stack_lines(group.frames, full_paths=context.full_paths),
        )
        for group in sorted(diagnosis.stacks, key=order)
    ]
    if len(view_models) > MAX_STACKS and not context.full_paths:
        more = f"{len(view_models) - MAX_STACKS} more are in the report (w)"
        view_models = [*view_models[:MAX_STACKS], StackViewModel(title=Cell(text=more), lines=())]
    return tuple(view_models)


def _no_stacks_note(evidence: Evidence | None, context: DiagnosisContext) -> str:
    if context.asking:
        return "Reading the stacks of the ranks ..."
    if evidence is None:
        return "No stacks were recorded"
    return "No rank sent a stack"


def _no_collectives_note(evidence: Evidence | None, context: DiagnosisContext) -> str:
    if context.asking:
        return "Reading the collectives of the ranks ..."
    if evidence is None:
        return "No collectives were recorded"
    if len(evidence.ranks) < 2:
        return "A single rank runs no collectives"
    return (
        "No collectives are known: there is no process group yet, or this version of torch "
        "(before 2.11) does not record them"
    )


# -- samples ---------------------------------------------------------------------------------------


def _samples_view_model(
    report: SampleReport | None, context: DiagnosisContext
) -> SamplesViewModel | None:
    if report is None:
        return None
    return SamplesViewModel(
        about=f"sampled for {report.seconds:.0f} s, {_age_text(report.taken_at, context)}",
        sentence=clean_line(report.sentence, MAX_SENTENCE_CHARS),
        slow=f"rank {report.slow}",
        normal="" if report.normal is None else f"rank {report.normal}",
        rows=tuple(map(_sample_row, report.rows)),
        workers=tuple(map(_sample_row, report.workers)),
    )


def _sample_row(row: SampleRow) -> tuple[str, str, str]:
    normal = "" if row.normal_s is None else f"{row.normal_s:.1f} s"
    return f"{row.slow_s:.1f} s", normal, clean_line(row.where, MAX_SENTENCE_CHARS)


# -- exceptions, log lines, missing evidence -------------------------------------------------------


def _exceptions_and_logs(evidence: Evidence, culprits: set[int]) -> tuple[StackViewModel, ...]:
    """Return exceptions, the earliest first if times are known, then the last log lines of the
    culprits."""
    raised = [r for r in evidence.ranks.values() if r.exception]
    raised.sort(key=lambda r: (_raised_at(r), r.rank not in culprits, r.rank))
    view_models = []
    for rank in raised[:LAST_WORDS]:
        exception = rank.exception or {}
        lines = clean_lines(str(exception.get("traceback") or exception.get("message") or ""), 400)
        last_lines = [line for line in lines if line.strip()][-LAST_LINES:]
        kind = clean_name(str(exception.get("type") or "an exception"), 80)
        view_models.append(
            StackViewModel(
                title=Cell(text=f"rank {rank.rank} raised {kind}", tone=Tone.BAD),
                lines=tuple(Cell(text=line) for line in last_lines),
            )
        )
    if len(raised) > LAST_WORDS:
        others = formats.rank_words([r.rank for r in raised[LAST_WORDS:]])
        view_models.append(
            StackViewModel(title=Cell(text=f"{others} raised exceptions too"), lines=())
        )
    ranks_shown = {r.rank for r in raised}
    for rank in [evidence.ranks[n] for n in sorted(culprits) if n in evidence.ranks][:LAST_WORDS]:
        lines = [clean_line(line, 400) for line in rank.log_tail if line.strip()][-LAST_LINES:]
        if rank.rank not in ranks_shown and lines:
            view_models.append(
                StackViewModel(
                    title=Cell(text=f"last log lines of rank {rank.rank}"),
                    lines=tuple(Cell(text=line, tone=Tone.DIM) for line in lines),
                )
            )
    return tuple(view_models)


def _raised_at(rank: RankEvidence) -> float:
    t = (rank.exception or {}).get("t")
    return float(t) if isinstance(t, (int, float)) else float("inf")


def _missing_lines(diagnosis: Diagnosis, context: DiagnosisContext) -> tuple[str, ...]:
    """Return each piece of missing evidence once, with the ranks for which it is missing."""
    evidence = diagnosis.evidence
    if context.asking:
        return ()
    general = [*diagnosis.missing, *(evidence.missing if evidence else ())]
    general += diagnosis.samples.missing if diagnosis.samples else ()
    missing = list(dict.fromkeys(clean_line(text, MAX_SENTENCE_CHARS) for text in general))
    of_ranks: dict[str, list[int]] = {}
    for rank in sorted(evidence.ranks) if evidence else ():
        for text in evidence.ranks[rank].missing if evidence else ():
            of_ranks.setdefault(clean_line(text, MAX_SENTENCE_CHARS), []).append(rank)
    missing += [
        f"{formats.rank_words(ranks)}: {t}" for t, ranks in of_ranks.items() if t not in missing
    ]
    return tuple(missing)
