"""A run in words: how it ended, all of it for ``ltui show``, a line for ``ltui runs``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ltui.app.progress import (
    caution_line,
    open_verdicts,
    position,
    rank_line,
    ranks_text,
    title,
    verdict_line,
)
from ltui.training.run.snapshot import (
    LIVE,
    CheckpointInfo,
    GpuSnapshot,
    MetricValue,
    RunSnapshot,
    RunState,
)
from ltui.widgets.formats import (
    NA,
    ago,
    count,
    duration,
    metric,
    percent,
    power,
    quantity,
    size,
    size_of,
    temperature,
)
from ltui.widgets.sanitise import clean_line, clean_name

METRICS_SHOWN = 12
RANKS_SHOWN = 64


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Rows in aligned columns; those in ``right`` are right-aligned."""
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


def short(text: str, cells: int) -> str:
    """``text`` cut to so many cells, with a sign where it was."""
    return text if len(text) <= cells else f"{text[: cells - 1]}…"


def state_line(snapshot: RunSnapshot) -> str:
    """``stopped at step 1 204, checkpoint verified``."""
    if snapshot.detail:
        detail = clean_line(snapshot.detail, 300)
        state = snapshot.state.value
        return detail if detail.lower().startswith(state) else f"{state}: {detail}"
    return snapshot.state.value


def resumable(snapshot: RunSnapshot) -> bool:
    """Whether there is a checkpoint that a resume would start from."""
    return any(checkpoint.ok is not False for checkpoint in snapshot.checkpoints)


def last_checkpoint(snapshot: RunSnapshot) -> CheckpointInfo | None:
    """The one with the highest step of those that are not known to be bad."""
    good = [c for c in snapshot.checkpoints if c.ok is not False]
    return max(good, key=lambda c: (c.global_step, c.saved_at or 0.0)) if good else None


def checkpoint_text(checkpoint: CheckpointInfo) -> str:
    """``step 1 204, verified, 2.1 MiB: /path``."""
    sound = {True: "verified", False: "DAMAGED", None: "not verified"}[checkpoint.ok]
    parts = [f"step {count(checkpoint.global_step)}", sound]
    parts += [checkpoint.reason] if checkpoint.reason else []
    parts += [size(checkpoint.size_bytes)] if checkpoint.size_bytes is not None else []
    return f"{', '.join(parts)}: {clean_line(checkpoint.path)}"


def ending_lines(snapshot: RunSnapshot) -> list[str]:
    """What is left on the screen when a run in the foreground has ended."""
    rows = [("", f"{title(snapshot)}: {state_line(snapshot)}")]
    rows.append(("progress", position(snapshot)))
    if snapshot.elapsed_s is not None:
        attempt = f", attempt {snapshot.attempt}" if snapshot.attempt > 1 else ""
        rows.append(("time", f"{duration(snapshot.elapsed_s)}{attempt}"))
    rows += [
        (f"{clean_name(name, 60)}", f"{metric(value.last)}  at step {count(value.step)}")
        for name, value in ordered_metrics(snapshot)[:METRICS_SHOWN]
    ]
    if snapshot.throughput.best_samples_per_s is not None:
        best = snapshot.throughput.best_samples_per_s
        rows.append(("throughput", f"{quantity(best, 'samples/s')} at best"))
    checkpoint = last_checkpoint(snapshot)
    if checkpoint is not None or snapshot.state is not RunState.FINISHED:
        rows.append(("checkpoint", checkpoint_text(checkpoint) if checkpoint else "none"))
    if snapshot.history_note:
        rows.append(("history", clean_line(snapshot.history_note)))
    if snapshot.log_dir:
        rows.append(("logs", snapshot.log_dir))
    lines = _indented([(name, text) for name, text in rows[1:] if text])
    return [rows[0][1], *lines, *_next_steps(snapshot)]


def ordered_metrics(snapshot: RunSnapshot) -> list[tuple[str, MetricValue]]:
    """Losses and scores first, learning rates last, each by name."""
    return sorted(snapshot.metrics.items(), key=lambda pair: (pair[0].startswith("lr"), pair[0]))


def _next_steps(snapshot: RunSnapshot) -> list[str]:
    name = clean_name(snapshot.id)
    if snapshot.state in LIVE:
        return [f"  watch it: ltui attach {name}"]
    if snapshot.state is RunState.FINISHED:
        return []
    lines = []
    if resumable(snapshot):
        lines.append(f"  go on from there: ltui resume {name}")
    if snapshot.state is not RunState.STOPPED:
        lines.append(f"  what the ranks wrote: ltui logs {name}")
    return lines


def _indented(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {line}" for line in columns(list(rows))]


def show_lines(snapshot: RunSnapshot, now: float) -> list[str]:
    """Everything about a run that fits a page."""
    lines = [f"{title(snapshot)}  ({clean_name(snapshot.id)})", *_indented(_facts(snapshot, now))]
    lines += [f"  {verdict_line(verdict)}" for verdict in open_verdicts(snapshot)]
    lines += [f"  {caution_line(caution)}" for caution in snapshot.cautions]
    if snapshot.metrics:
        rows = [
            (clean_name(name, 60), metric(value.last), f"step {count(value.step)}")
            for name, value in ordered_metrics(snapshot)
        ]
        lines += ["", "metrics", *(f"  {line}" for line in columns(rows, frozenset({1, 2})))]
    if snapshot.ranks:
        lines += ["", "ranks", *(f"  {rank_line(r)}" for r in snapshot.ranks[:RANKS_SHOWN])]
        rest = snapshot.ranks[RANKS_SHOWN:]
        lines += [f"  and {ranks_text(rest)}"] if rest else []
    if snapshot.gpus:
        lines += ["", "GPUs", *(f"  {line}" for line in columns([_gpu(g) for g in snapshot.gpus]))]
    if snapshot.checkpoints:
        lines += ["", "checkpoints"]
        lines += [f"  {checkpoint_text(checkpoint)}" for checkpoint in snapshot.checkpoints]
    return lines


def _flop_use(snapshot: RunSnapshot) -> str:
    """Model FLOP utilisation; nothing where operations were not counted."""
    if snapshot.flops_per_batch is None:
        return ""
    share = percent(snapshot.model_flop_utilisation)
    return f"{share} ({quantity(snapshot.flops_per_batch, 'FLOP')} a batch and rank)"


def _facts(snapshot: RunSnapshot, now: float) -> list[tuple[str, str]]:
    started = snapshot.started_at or snapshot.created_at
    times = [f"started {ago(now - started)}"] if started is not None else []
    if snapshot.ended_at is not None:
        times.append(f"ended {ago(now - snapshot.ended_at)}")
    if snapshot.elapsed_s is not None:
        times.append(f"took {duration(snapshot.elapsed_s)}" if snapshot.ended_at else "")
    if snapshot.eta_s is not None:
        times.append(f"{duration(snapshot.eta_s)} left")
    supervisor = "none" if snapshot.supervisor_pid is None else f"process {snapshot.supervisor_pid}"
    speed = snapshot.throughput
    data_wait = ""
    if speed.data_wait_share is not None:
        data_wait = f", {percent(speed.data_wait_share)} waiting for data"
    pace = quantity(speed.samples_per_s, "samples/s")
    rows = [
        ("state", state_line(snapshot)),
        ("progress", position(snapshot) or NA),
        ("time", ", ".join(t for t in times if t) or NA),
        ("attempt", _attempt(snapshot)),
        ("stops", clean_line(", or ".join(snapshot.stops))),
        ("ranks", f"{count(snapshot.world_size)}  {ranks_text(snapshot.ranks)}".rstrip()),
        ("throughput", f"{pace}{data_wait}"),
        ("MFU", _flop_use(snapshot)),
        ("supervisor", supervisor),
        ("history", clean_line(snapshot.history_note) if snapshot.history_note else ""),
        ("GPUs", clean_line(snapshot.gpu_note) if snapshot.gpu_note else ""),
        ("logs", snapshot.log_dir or ""),
        ("directory", snapshot.run_dir or ""),
    ]
    return [(name, text) for name, text in rows if text]


def _attempt(snapshot: RunSnapshot) -> str:
    """``2, with optimizer.init_args.lr=0.01``"""
    parts = [str(snapshot.attempt)]
    if snapshot.changes:
        parts.append(f"with {', '.join(snapshot.changes)}")
    if snapshot.restarted_because:
        parts.append(snapshot.restarted_because)
    return clean_line(", ".join(parts), 300)


def _gpu(gpu: GpuSnapshot) -> tuple[str, ...]:
    if gpu.error:
        return (str(gpu.index), clean_name(gpu.name or NA), clean_line(gpu.error), "", "", "")
    busy = None if gpu.utilisation_percent is None else gpu.utilisation_percent / 100
    return (
        str(gpu.index),
        clean_name(gpu.name or NA),
        f"{percent(busy)} busy",
        size_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
        power(gpu.power_w, gpu.power_limit_w),
        temperature(gpu.temperature_c),
    )


def runs_lines(snapshots: Sequence[RunSnapshot], now: float) -> list[str]:
    """A line for each run."""
    rows = [("ID", "WHAT", "STATE", "PROGRESS", "STARTED")]
    for snapshot in snapshots:
        what = snapshot.preset or " ".join(snapshot.command or ())
        started = snapshot.started_at or snapshot.created_at
        rows.append(
            (
                clean_name(snapshot.id),
                short(clean_name(what), 30) or NA,
                snapshot.state.value,
                position(snapshot) or NA,
                NA if started is None else ago(now - started),
            )
        )
    return columns(rows)
