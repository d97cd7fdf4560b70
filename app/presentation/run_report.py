"""A run as text: its end, all of it for ``ltui show``, one line for ``ltui runs``. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ltui.app.presentation.machines import (
    all_ranks_text,
    listed_ranks,
    machine_count,
    machine_names,
    machine_table,
    padded_labels,
)
from ltui.app.presentation.metric_names import measured_by, ordered_metrics
from ltui.app.presentation.snapshot_text import (
    checkpoint_text,
    current_rate,
    data_wait_text,
    gpu_label,
    gpu_name,
    job_text,
    percent_of_time,
    position,
    rank_line,
    rank_word,
    ranks_text,
    rate,
    script_checkpoints_title,
    slow_ranks,
    stop_text,
    title,
)
from ltui.app.state_words import (
    bad_loss_sentence,
    ended_sentence,
    limit_text,
    needs_help,
    open_verdicts,
    state_word,
    verdict_line,
    warning_line,
)
from ltui.training.state.good_checkpoints import (
    advice_before_nan,
    badness,
    is_resumable,
    nan_since,
    newest_checkpoint,
)
from ltui.training.state.run_labels import NO_LABELS, RunLabels
from ltui.training.state.run_snapshot import LIVE, GpuSnapshot, RankState, RunSnapshot, RunState
from ltui.widgets.formats import (
    NA,
    ago,
    count,
    duration,
    metric,
    percent,
    power,
    quantity,
    size_of,
    temperature,
)
from ltui.widgets.sanitise import clean_line, clean_name

METRICS_SHOWN = 12
"""Maximum number of metrics in the report about an ended run."""
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
SETTINGS_WIDTH = 100
"""Maximum characters of a line with several settings."""
RANKS_SHOWN = 64
"""Maximum number of ranks in ``ltui show``."""


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Return the rows in aligned columns. The columns in ``right`` are right-aligned."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def truncated(text: str, cells: int) -> str:
    """Return ``text`` cut to ``cells`` columns, with an ellipsis if it was longer."""
    return text if len(text) <= cells else f"{text[: cells - 1]}…"


def state_line(snapshot: RunSnapshot) -> str:
    """Return ``stopped at step 1204, checkpoint verified``."""
    bad = bad_loss_sentence(snapshot)
    if snapshot.state not in LIVE:
        return f"{ended_sentence(snapshot)}; {bad}" if bad else ended_sentence(snapshot)
    detail = clean_line(snapshot.detail or "", 300)
    word = state_word(snapshot)
    if detail.lower().startswith(snapshot.state.value):
        return f"{detail}; {bad}" if bad else detail
    return f"{word}: {detail}" if detail else word


def end_report(snapshot: RunSnapshot, time: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return the lines that are printed when a run in the foreground has ended.

    ``time``: rows about where its time went.
    """
    rows = [("", f"{title(snapshot)}: {state_line(snapshot)}")]
    rows.append(("progress", position(snapshot)))
    if snapshot.elapsed_s is not None:
        attempt = f", attempt {snapshot.attempt}" if snapshot.attempt > 1 else ""
        rows.append(("time", f"{duration(snapshot.elapsed_s)}{attempt}"))
    rows += time
    rows.append(("limited by", limit_text(snapshot)))
    rows += metric_rows(snapshot, METRICS_SHOWN)
    if snapshot.throughput.best_samples_per_s is not None:
        best = snapshot.throughput.best_samples_per_s
        rows.append(("throughput", f"best {rate(best)}"))
    rows += checkpoint_rows(snapshot)
    if snapshot.history_note:
        rows.append(("history", clean_line(snapshot.history_note)))
    if snapshot.log_dir:
        rows.append(("logs", clean_line(snapshot.log_dir)))
    lines = _indented([(name, text) for name, text in rows[1:] if text])
    return [rows[0][1], *lines, *_next_steps(snapshot)]


def metric_rows(snapshot: RunSnapshot, most: int | None = None) -> list[tuple[str, str]]:
    """Return the metrics, the main one first; beyond ``most``, how many more there are."""
    metrics = ordered_metrics(snapshot)
    rows = [
        (clean_name(name, 60), f"{metric(value.last)}  at step {value.step}{measured_by(value)}")
        for name, value in metrics[:most]
    ]
    if more := len(metrics) - len(rows):
        rows.append(("", f"+{more} more: ltui show {clean_name(snapshot.id)}"))
    return rows


def checkpoint_rows(snapshot: RunSnapshot) -> list[tuple[str, str]]:
    """Return the newest checkpoint, and what else to know if it is not a good one."""
    newest, since = newest_checkpoint(snapshot.checkpoints), nan_since(snapshot.verdicts)
    if newest is None:
        return [] if snapshot.state is RunState.FINISHED else [("checkpoint", "none")]
    rows = [("newest checkpoint", checkpoint_text(newest, with_path=True))]
    if badness(newest, since) is not None:
        rows.append(("", advice_before_nan(snapshot.checkpoints, since)))
    return rows


def _next_steps(snapshot: RunSnapshot) -> list[str]:
    name = clean_name(snapshot.id)
    if snapshot.state in LIVE:
        return [f"  To watch it: ltui attach {name}"]
    lines = []
    if snapshot.state is not RunState.FINISHED and is_resumable(snapshot):
        lines.append(f"  To resume: ltui resume {name}")
    if snapshot.state not in (RunState.STOPPED, RunState.FINISHED):
        lines.append(f"  Logs: ltui logs {name}")
    return [*lines, f"  Charts and logs: ltui attach {name}"]


def _indented(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {line}" for line in columns(list(rows))]


def show_lines(
    snapshot: RunSnapshot,
    now: float,
    labels: RunLabels = NO_LABELS,
    settings: Mapping[str, str] = NO_SETTINGS,
) -> list[str]:
    """Return everything about a run that fits on a page."""
    facts = [*_facts(snapshot, now), *_label_facts(labels)]
    lines = [f"{title(snapshot)}  ({clean_name(snapshot.id)})", *_indented(facts)]
    state = state_line(snapshot)
    verdicts = [v for v in open_verdicts(snapshot) if clean_line(v.cause, 300) not in state]
    lines += [f"  {verdict_line(verdict)}" for verdict in verdicts]
    lines += [f"  {warning_line(caution)}" for caution in snapshot.cautions]
    if snapshot.metrics:
        rows = [
            (clean_name(name, 60), metric(value.last), f"step {value.step}", measured_by(value))
            for name, value in ordered_metrics(snapshot)
        ]
        lines += ["", "metrics", *(f"  {line}" for line in columns(rows, frozenset({1, 2})))]
    lines += _settings_lines(settings)
    if snapshot.nodes:
        lines += ["", "machines", *(f"  {line}" for line in columns(machine_table(snapshot)))]
    if snapshot.ranks:
        shown, hidden = listed_ranks(snapshot, RANKS_SHOWN)
        names_of_ranks = padded_labels(snapshot)
        lines += ["", "ranks"]
        lines += [f"  {rank_line(snapshot, r, names_of_ranks.get(r.rank))}" for r in shown]
        lines += [f"  and {ranks_text(hidden)}"] if hidden else []
    if snapshot.gpus:
        names = machine_names(snapshot)
        gpus = sorted(snapshot.gpus, key=lambda gpu: gpu.node)
        lines += [
            "",
            "GPUs",
            *(f"  {line}" for line in columns([_gpu_columns(g, names) for g in gpus])),
        ]
    if snapshot.checkpoints:
        lines += ["", "checkpoints"]
        lines += [
            f"  {checkpoint_text(checkpoint, with_path=True)}"
            for checkpoint in snapshot.checkpoints
        ]
    if snapshot.script_checkpoints:
        lines += ["", script_checkpoints_title(snapshot)]
        lines += [f"  {checkpoint_text(c, with_path=True)}" for c in snapshot.script_checkpoints]
    return lines


def _label_facts(labels: RunLabels) -> list[tuple[str, str]]:
    """Return what users wrote about the run."""
    rows = [
        ("star", "★" if labels.star else ""),
        ("tags", " ".join(labels.tags)),
        ("group", labels.group),
        ("note", labels.note),
    ]
    return [(name, clean_line(text, 500)) for name, text in rows if text]


def _settings_lines(settings: Mapping[str, str]) -> list[str]:
    """Return the settings, several in a line. The command has a line of its own above."""
    pairs = [
        f"{clean_name(name, 60)} {clean_line(value, 60)}"
        for name, value in settings.items()
        if name != "command"
    ]
    if not pairs:
        return []
    lines, line = ["", "settings"], ""
    for pair in pairs:
        if line and len(line) + len(pair) > SETTINGS_WIDTH:
            lines.append(f"  {line}")
            line = ""
        line = f"{line}   {pair}" if line else pair
    return [*lines, f"  {line}"]


def _flop_utilisation(snapshot: RunSnapshot) -> str:
    """Return the model FLOP utilisation; empty if the operations were not counted."""
    if snapshot.flops_per_batch is None:
        return ""
    share = percent(snapshot.model_flop_utilisation)
    return f"{share} ({quantity(snapshot.flops_per_batch, 'FLOP')} per batch on each rank)"


def _facts(snapshot: RunSnapshot, now: float) -> list[tuple[str, str]]:
    pid = snapshot.supervisor_pid
    supervisor = "" if pid is None or snapshot.state not in LIVE else f"process {pid}"
    command = "" if snapshot.preset else shlex.join(snapshot.command or ())
    rows = [
        ("state", state_line(snapshot)),
        ("progress", position(snapshot) or NA),
        ("time", _times_text(snapshot, now) or NA),
        ("command", clean_line(command, 500)),
        ("program", clean_line(snapshot.program or "")),
        ("attempt", _attempt_text(snapshot)),
        ("stops", clean_line(" or ".join(stop_text(s, snapshot.metrics) for s in snapshot.stops))),
        ("machines", machine_count(snapshot)),
        ("ranks", _ranks_fact(snapshot)),
        ("throughput", _throughput_fact(snapshot)),
        ("limited by", limit_text(snapshot)),
        ("MFU", _flop_utilisation(snapshot)),
        ("job", _job_text(snapshot, now)),
        ("supervisor", supervisor),
        ("history", clean_line(snapshot.history_note) if snapshot.history_note else ""),
        ("combined", _combined_text(snapshot)),
        ("GPUs", clean_line(snapshot.gpu_note) if snapshot.gpu_note else ""),
        ("logs", clean_line(snapshot.log_dir or "")),
        ("directory", clean_line(snapshot.run_dir or "")),
    ]
    return [(name, text) for name, text in rows if text]


def _ranks_fact(snapshot: RunSnapshot) -> str:
    """Return ``2, both ended``, or the number and the counts of each state."""
    states, number = {rank.state for rank in snapshot.ranks}, len(snapshot.ranks)
    complete = number == snapshot.world_size and not snapshot.nodes
    if len(states) == 1 and complete and not slow_ranks(snapshot):
        word = rank_word(states.pop())
        every = {1: "", 2: "both "}.get(number, "all ")
        if word != RankState.UNKNOWN.value:
            return f"{count(number)}, {every}{word}"
    return f"{count(snapshot.world_size)}  {all_ranks_text(snapshot)}".rstrip()


def _throughput_fact(snapshot: RunSnapshot) -> str:
    """Return ``1 104 samples/s, best 1 131``; of an ended run only the best."""
    speed, live = snapshot.throughput, snapshot.state in LIVE
    parts = [current_rate(snapshot)] if live and current_rate(snapshot) else []
    if speed.best_samples_per_s is not None:
        parts.append(f"best {rate(speed.best_samples_per_s)}")
    if speed.data_wait_share is not None and live:
        parts.append(data_wait_text(speed.data_wait_share))
    return ", ".join(parts)


def _combined_text(snapshot: RunSnapshot) -> str:
    if not snapshot.combined_values:
        return ""
    return f"{snapshot.combined_values:,} logged values are kept as windows (mean, min, max, last)"


def _times_text(snapshot: RunSnapshot, now: float) -> str:
    """Return ``started 2 h ago, attempt 2 started 4 m ago, 12 m 08 s left``.

    A run that has not started was only queued: ``queued 2 h ago``.
    """
    started, created = snapshot.started_at, snapshot.created_at
    first = created if started is None or (snapshot.attempt > 1 and created) else started
    times = []
    if first is not None:
        imported = snapshot.global_step is not None
        times.append(f"{'started' if started or imported else 'queued'} {ago(now - first)}")
    if snapshot.attempt > 1 and started is not None:
        times.append(f"attempt {snapshot.attempt} started {ago(now - started)}")
    if snapshot.ended_at is not None:
        times.append(f"ended {ago(now - snapshot.ended_at)}")
        if snapshot.elapsed_s is not None:
            attempt = f"attempt {snapshot.attempt} " if snapshot.attempt > 1 else ""
            times.append(f"{attempt}took {duration(snapshot.elapsed_s)}")
    elif snapshot.eta_s is not None and not needs_help(snapshot):
        times.append(f"{duration(snapshot.eta_s)} left")
    return ", ".join(times)


def _job_text(snapshot: RunSnapshot, now: float) -> str:
    """Return ``12 on n[07-08], partition gpu, time limit in 3 h 10 m``."""
    job = snapshot.job
    if job is None or snapshot.state not in LIVE:
        return ""
    limit = (
        "" if job.ends_at is None else f", time limit in {duration(max(0.0, job.ends_at - now))}"
    )
    return f"{job_text(job)}{limit}"


def _attempt_text(snapshot: RunSnapshot) -> str:
    """Return ``2, with optimizer.init_args.lr=0.01``."""
    parts = [str(snapshot.attempt)]
    if snapshot.changes:
        parts.append(f"with {', '.join(snapshot.changes)}")
    if snapshot.restarted_because:
        parts.append(snapshot.restarted_because)
    return clean_line(", ".join(parts), 300)


def _gpu_columns(gpu: GpuSnapshot, names: Mapping[int, str]) -> tuple[str, ...]:
    if gpu.error:
        return (gpu_label(gpu, names), gpu_name(gpu.name), clean_line(gpu.error), "", "", "")
    return (
        gpu_label(gpu, names),
        gpu_name(gpu.name),
        f"{percent_of_time(gpu.utilisation_percent)} busy",
        size_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
        power(gpu.power_w, gpu.power_limit_w),
        temperature(gpu.temperature_c),
    )


def started_text(first: float | None, started: float | None, attempt: int, now: float) -> str:
    """Return ``2 h ago``, or after a resume ``2 h ago (attempt 2: 4 m ago)``.

    ``first``: unix time of the launch. ``started``: that of the attempt; None before it starts.
    """
    if started is None:
        return NA
    if attempt == 1 or first is None:
        return ago(now - started)
    return f"{ago(now - first)} (attempt {attempt}: {ago(now - started)})"
