"""View models of a run screen's header, notes, ranks and end. Pure.

A new column of the rank table is one more entry of ``RANK_METRICS``. Its value is a field of
``RankSnapshot`` or a ``StepField``, which the rank sends with every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from rich.text import Text

from ltui.app.live.frame import NOT_RECORDED, Frame, RankException, ShownMoment
from ltui.app.presentation.machines import machine_count, rank_labels
from ltui.app.presentation.snapshot_text import (
    done_fraction,
    newest_checkpoint_text,
    program_text,
    rank_counts,
    rank_word,
    shown_epoch,
    slow_ranks,
    stop_text,
    total_epochs,
)
from ltui.app.state_words import (
    FAILED,
    bad_loss_sentence,
    ended_detail,
    is_blocked,
    limit_sentence,
    open_verdicts,
    recovery_text,
    state_sign,
    state_word,
    verdict_banner_text,
    verdict_note,
    waiting_reason,
    warning_line,
)
from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import (
    LIVE,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.training.state.verdicts import most_severe_first
from ltui.training.store.history_place import INCIDENT_FILE
from ltui.widgets import formats
from ltui.widgets.columns import Column
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, HeaderViewModel, RankMetric, RankRow


class RankMetricColumn(Struct, frozen=True):
    """A column of the rank table that shows one metric."""

    column: Column
    text: Callable[[RankSnapshot, Sequence[float]], str]
    """Return the metric of a rank with its unit; ``n/a`` if it is unknown. The arguments are the
    snapshot of the rank and the values of ``StepField`` for its last batch."""
    tone: Tone = Tone.DIM


def cpu_text(rank: RankSnapshot) -> str:
    """Return the CPU utilisation of a rank's processes: ``104 %``."""
    return formats.NA if rank.cpu_percent is None else f"{rank.cpu_percent:.0f} %"


def memory_text(rank: RankSnapshot) -> str:
    """Return the resident memory of a rank's processes: ``2.10 GiB``."""
    return formats.size(rank.rss_bytes)


RANK_METRICS = (
    RankMetricColumn(
        Column(key="rate", title="samples/s", width=11, right=True, importance=5),
        lambda rank, _: formats.rate(rank.samples_per_s, ""),
        Tone.PLAIN,
    ),
    RankMetricColumn(
        Column(key="cpu", title="CPU", width=7, right=True, importance=6, optional=True),
        lambda rank, _: cpu_text(rank),
    ),
    RankMetricColumn(
        Column(key="memory", title="memory", width=10, right=True, importance=6, optional=True),
        lambda rank, _: memory_text(rank),
    ),
)
"""The metric columns, in the order in which they are shown."""


def rank_metrics(
    rank: RankSnapshot, last_step: Sequence[float] | None, *, live: bool
) -> tuple[RankMetric, ...]:
    """Return the metrics of a rank. ``last_step`` is None before its first batch.

    A metric is ``n/a`` once the run has ended, because it describes a running process.
    """
    step = last_step or (math.nan,) * len(StepField)
    return tuple(
        RankMetric(
            column=metric.column,
            cell=Cell(text=metric.text(rank, step) if live else formats.NA, tone=metric.tone),
        )
        for metric in RANK_METRICS
    )


RECOVERY_SHOWN_S = 10.0
"""Seconds for which a banner reports that a verdict has ended."""
SILENT_AFTER_S = 5.0
"""Seconds without new records after which the silence is shown with its age."""
PROCESS_ROWS = 16
"""Maximum number of ranks listed on a machine without GPU readings."""

_RANK_TONES: dict[RankState, Tone] = {
    RankState.STARTING: Tone.DIM,
    RankState.OK: Tone.PLAIN,
    RankState.RUNNING: Tone.PLAIN,
    RankState.WAITING: Tone.WARN,
    RankState.STALLED: Tone.BAD,
    RankState.PAUSED: Tone.WARN,
    RankState.DEAD: Tone.BAD,
    RankState.ENDED: Tone.DIM,
    RankState.UNKNOWN: Tone.DIM,
}
RANK_STATE_CELLS = {
    state: Cell(text=rank_word(state), tone=tone) for state, tone in _RANK_TONES.items()
}
"""The word for each state of a rank, in its tone."""
SLOW = Cell(text="slow", tone=Tone.WARN)
"""The state of a rank that moves but is slower than the others."""


def header(frame: Frame) -> HeaderViewModel:
    """Return the first lines of a run screen."""
    run = frame.snapshot
    sign, word, tone = state_sign(run)
    banner, banner_tone = verdict_banner(frame)
    moving = run.state in (RunState.RUNNING, RunState.PAUSING) and not is_blocked(run)
    kind = f"{run.program} · " if run.program else ""
    if frame.is_unknown:
        return HeaderViewModel(
            name=clean_name(run.name),
            preset=clean_name(f"{kind}{program_text(run)}"),
            state=NOT_RECORDED,
            state_sign="?",
            tone=Tone.WARN,
            epoch="",
            step="",
            share=None,
            eta="",
            elapsed="",
            attempt="",
            notes=note_lines(frame),
        )
    return HeaderViewModel(
        name=clean_name(run.name),
        preset=clean_name(f"{kind}{program_text(run)}"),
        state=word,
        state_sign=sign,
        tone=tone,
        epoch=_epoch_text(run),
        step=f"step {formats.step(run.global_step, run.max_steps)}",
        share=done_fraction(run),
        eta=f"{formats.duration(run.eta_s)} left" if moving and run.eta_s is not None else "",
        elapsed=_elapsed_text(run),
        attempt="" if run.attempt == 1 else f"attempt {run.attempt}",
        machines=machine_count(run),
        job=_job_left(run, frame.now),
        banner=banner,
        banner_tone=banner_tone,
        notes=note_lines(frame),
    )


def _elapsed_text(run: RunSnapshot) -> str:
    """Return ``4 m 10 s``, or behind the number of a later attempt ``for 4 m 10 s``."""
    if run.elapsed_s is None:
        return ""
    return f"{'for ' if run.attempt > 1 else ''}{formats.duration(run.elapsed_s)}"


def _job_left(run: RunSnapshot, now: float) -> str:
    """Return ``job ends in 3 h 10 m``; empty outside of a job, or if its limit is unknown."""
    if run.job is None or run.job.ends_at is None or run.state not in LIVE:
        return ""
    return f"job ends in {formats.duration(max(0.0, run.job.ends_at - now))}"


def _epoch_text(run: RunSnapshot) -> str:
    """Return ``epoch 3/30``; empty for a program that counts steps and no epochs."""
    shown, total = shown_epoch(run), total_epochs(run)
    if shown is None:
        return "" if run.global_step else f"epoch {formats.NA}"
    text = formats.count(shown) if total is None else formats.count_of(shown, total)
    return f"epoch {text}"


def verdict_banner(frame: Frame) -> tuple[str | None, Tone]:
    """Return the banner: the worst active verdict, else the verdict that ended last."""
    active = open_verdicts(frame.snapshot)
    if active and frame.snapshot.state in LIVE:
        worst, *others = most_severe_first(active)
        tone = Tone.BAD if worst.level in BLOCKING_LEVELS else Tone.WARN
        return verdict_banner_text(worst, frame.now, more=len(others)), tone
    recent = [c for c in frame.resolved_verdicts if frame.now - c.at < RECOVERY_SHOWN_S]
    # A rank that was slow until the run stopped has not recovered.
    if recent and frame.snapshot.state in LIVE and frame.snapshot.state is not RunState.STOPPING:
        return recovery_text(recent[-1].verdict, recent[-1].lasted_s), Tone.GOOD
    return None, Tone.BAD


def note_lines(frame: Frame) -> tuple[str, ...]:
    """Return the remarks that are needed to read the rest of the screen correctly."""
    run = frame.snapshot
    lines = [] if frame.moment is None else [moment_text(frame, frame.moment)]
    if frame.moment is not None and frame.moment.gap is not None:
        lines.append(clean_line(frame.moment.gap))
    if run.history_note:
        is_incident = run.history_note.startswith(INCIDENT_FILE)
        prefix = "" if is_incident else "history incomplete: "
        lines.append(prefix + clean_line(run.history_note))
    if run.detail and run.state in LIVE and run.state is not RunState.PAUSED:
        lines.append(clean_line(run.detail))
    if run.stops and run.state in LIVE:
        stops = (stop_text(stop, run.metrics) for stop in run.stops)
        lines.append(clean_line(f"stops {', or '.join(stops)}"))
    if run.state in LIVE and not frame.supervisor_answers:
        since = formats.age(frame.now - frame.snapshot_at)
        lines.append(f"the supervisor does not answer; figures are {since} old")
    if frame.error is not None:
        what = ""
        if frame.error_since is not None:
            age = formats.age(frame.now - frame.error_since)
            what = f"the run can't be read, for {age}: "
        lines.append(what + clean_line(frame.error))
    if run.limit is not None and run.state is RunState.RUNNING and run.limit.slows:
        lines.append(limit_sentence(run))
    if run.cautions and run.state in LIVE:
        more = f" ({len(run.cautions) - 1} more: ltui show)" if len(run.cautions) > 1 else ""
        lines.append(f"{warning_line(run.cautions[0])}{more}")
    return tuple(lines)


RECORDED_S = 2.0
"""Seconds between a moment and its snapshot from which on the screen says so."""


def moment_text(frame: Frame, moment: ShownMoment) -> str:
    """Return ``◀ 12 m 04 s ago: 03:12:04 · checkpoint of step 1200 · esc: now``."""
    sign = f"▶ {moment.speed}x" if moment.speed else "◀"
    since = "before the end" if moment.has_ended else "ago"
    at = formats.time_of_day(moment.at, moment.newest)
    if moment.at - frame.now >= RECORDED_S:
        at += f" (as recorded at {formats.time_of_day(frame.now, moment.at)})"
    parts = (f"{sign} {formats.age(moment.newest - moment.at)} {since}: {at}", moment.about)
    return clean_line(" · ".join([*filter(None, parts), "esc: now"]))


def silence_text(frame: Frame) -> str | None:
    """Return ``no data for 12 s`` if ranks should be writing records and are not."""
    if frame.snapshot.state is not RunState.RUNNING or frame.last_record_at is None:
        return None
    silent_s = frame.now - frame.last_record_at
    if silent_s < SILENT_AFTER_S:
        return None
    return f"no data for {formats.age(silent_s)}"


# -- ranks -----------------------------------------------------------------------------------------


class RankVerdicts(Struct, frozen=True):
    """The active verdicts by rank."""

    at_fault: Mapping[int, Verdict]
    """The most severe verdict on each culprit."""
    waiting: frozenset[int]
    """Ranks that wait for a culprit."""


def rank_verdicts(run: RunSnapshot) -> RankVerdicts:
    """Return the active verdicts of a run by rank."""
    active = most_severe_first(open_verdicts(run))
    waiting = {rank for v in active if v.level in BLOCKING_LEVELS for rank in v.waiting}
    return RankVerdicts(
        {rank: v for v in reversed(active) for rank in v.culprits}, frozenset(waiting)
    )


def rank_rows(frame: Frame) -> tuple[RankRow, ...]:
    """Return one row per rank in order of rank, so that rows keep their places."""
    verdicts = rank_verdicts(frame.snapshot)
    ordered = sorted(frame.snapshot.ranks, key=lambda r: r.rank)
    return tuple(rank_row(frame, rank, verdicts) for rank in ordered)


def rank_row(frame: Frame, rank: RankSnapshot, verdicts: RankVerdicts) -> RankRow:
    """Return the row of one rank."""
    live = frame.snapshot.state in LIVE
    verdict = verdicts.at_fault.get(rank.rank)
    note = rank.note or ""
    if not note and verdict is not None:
        note = verdict_note(verdict)
    if not note and rank.missed_records:
        note = f"{formats.count(rank.missed_records)} records missed"
    # A starting rank of a resumed run has not loaded its checkpoint yet.
    is_new = frame.snapshot.attempt > 1 and rank.state is RankState.STARTING
    return RankRow(
        rank=f"r{rank.rank}",
        pid=formats.NA if rank.pid is None else str(rank.pid),
        device=_device_text(rank.device),
        # A rank that has ended is in no phase, and its state says so.
        phase="" if rank.state is RankState.ENDED else clean_name(rank.phase or formats.NA),
        step=formats.step(None if is_new and not rank.global_step else rank.global_step),
        age=formats.age(rank.age_s) if live else "",
        strip=rank.recent_step_s,
        state=rank_state(rank, verdicts),
        note=clean_name(note),
        metrics=rank_metrics(rank, frame.last_steps.get(rank.rank), live=live),
    )


def rank_state(rank: RankSnapshot, verdicts: RankVerdicts) -> Cell:
    """Return the state of a rank. For a rank that moves, return what its verdict says."""
    state, verdict = rank.state, verdicts.at_fault.get(rank.rank)
    if state in (RankState.OK, RankState.RUNNING, RankState.STARTING):
        if verdict is not None and verdict.level in BLOCKING_LEVELS:
            state = RankState.DEAD if verdict.level == "dead" else RankState.STALLED
        elif rank.rank in verdicts.waiting:
            state = RankState.WAITING
        elif verdict is not None and verdict.level == "slow":
            return SLOW
    return RANK_STATE_CELLS[state]


def _device_text(device: str | None) -> str:
    if device is None:
        return formats.NA
    return clean_name(device).replace("cuda:", "gpu")


def ranks_title(frame: Frame) -> str:
    """Return ``4 ok`` or ``1 STALLED, 3 ok``."""
    run = frame.snapshot
    return rank_counts(run.ranks, slow_ranks(run)) or waiting_reason(run)


# -- without GPUs ----------------------------------------------------------------------------------


def processes_text(frame: Frame) -> Text:
    """Return the reason for missing GPU readings, with CPU and memory of each rank."""
    out = Text(clean_line(frame.snapshot.gpu_note or "no GPU readings yet"), "dim")
    live, labels = frame.snapshot.state in LIVE, rank_labels(frame.snapshot)
    for rank in sorted(frame.snapshot.ranks, key=lambda r: r.rank)[:PROCESS_ROWS]:
        pid = formats.NA if rank.pid is None else str(rank.pid)
        # Processes of a run that has ended are gone, so their last readings are not shown.
        cpu = cpu_text(rank) if live else formats.NA
        memory = memory_text(rank) if live else formats.NA
        label = labels.get(rank.rank) or f"r{rank.rank}"
        out.append(f"\n{label:<4} pid {pid:<9} CPU {cpu:>6}   memory {memory:>9}", "not dim")
    return out


def cells_text(cells: Sequence[Cell], hint: str = "") -> Text:
    """Return the cells as lines, with the important ones in bold. Plain ones share a line."""
    out = Text()
    for i, cell in enumerate(cells):
        joined = i and cell.tone is cells[i - 1].tone is Tone.PLAIN
        out.append(" · " if joined else "\n" if i else "")
        out.append(cell.text, "bold" if cell.tone is Tone.BAD else "")
    if hint:
        out.append(f"   {hint}", "bold")
    return out


# -- how it ended ----------------------------------------------------------------------------------


def end_cells(frame: Frame) -> tuple[Cell, ...]:
    """Return how the run ended, the root cause first; empty while it lives."""
    run = frame.snapshot
    if run.state in LIVE:
        return ()
    bad = run.state in FAILED
    lines = []
    detail = ended_detail(run) or state_word(run)
    # The line above already has the state and the step.
    if bad or not detail.startswith((f"{run.state.value} at step ", run.state.value + ",")):
        lines.append(Cell(text=detail, tone=Tone.BAD if bad else Tone.PLAIN))
    # The header has the step of a bad loss; the first rank is news only among several.
    if (run.world_size or 1) > 1 and (loss := bad_loss_sentence(run)):
        lines.append(Cell(text=loss, tone=Tone.WARN))
    # Leave the exception out if the first line repeats it.
    exceptions = [_exception_text(e) for e in frame.rank_exceptions[:1]]
    lines += [Cell(text=text, tone=Tone.BAD) for text in exceptions if not detail.startswith(text)]
    if len(frame.rank_exceptions) > 1:
        others = tuple(e.rank for e in frame.rank_exceptions[1:])
        lines.append(Cell(text=f"after it, rank {formats.ranks(others)} failed too", tone=Tone.DIM))
    elif bad and not frame.rank_exceptions:
        lines += [
            Cell(text=f"rank {r.rank}: {clean_line(r.note)}", tone=Tone.BAD)
            for r in run.ranks
            if r.note and (r.state is RankState.DEAD or r.exit_code)
        ][:2]
    checkpoint = newest_checkpoint_text(run)
    if not checkpoint:
        suffix = " by ltui; details list those of the script" if run.script_checkpoints else ""
        sentence = f"no checkpoint was saved{suffix}"
        # Leave it out if the first line says it.
        if not detail.endswith(sentence):
            lines.append(Cell(text=sentence, tone=Tone.DIM))
    else:
        lines.append(Cell(text=checkpoint))
    return tuple(lines)


def _exception_text(exception: RankException) -> str:
    message = clean_line(exception.message.strip().split("\n", 1)[0])
    return f"rank {exception.rank} raised {clean_name(exception.type)}: {message}"
