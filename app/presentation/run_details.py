"""The details of a run as text: metrics, configuration, checkpoints, events, paths. Pure.

The texts may contain anything that a run wrote, so they are never parsed as markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.text import Text

from ltui.app.live.frame import Frame
from ltui.app.presentation.machines import QUIET_STATES, clock_text, machine_names, rank_range
from ltui.app.presentation.metric_names import measured_by, ordered_metrics
from ltui.app.presentation.run_configuration import (
    frozen_lines,
    hyperparameters,
    settings,
    short_code_lines,
)
from ltui.app.presentation.snapshot_text import (
    checkpoint_text,
    job_text,
    program_text,
    saved_when,
    script_checkpoints_title,
)
from ltui.app.presentation.time_view import legend, time_bar
from ltui.app.state_words import limit_text, machine_state_word
from ltui.training.state.run_snapshot import LIVE, CheckpointInfo
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name

MAX_METRICS = 200
"""Maximum number of metrics that are listed."""
MAX_CHECKPOINTS = 30
"""Maximum number of checkpoints that are listed."""
MAX_MACHINES = 32
"""Maximum number of machines that are listed."""
MAX_ADVICE = 3
"""Maximum number of sentences about what would make the run faster."""
TIME_CELLS = 44
"""Columns of the bar of the time and of the lines below it."""
NAME_CELLS = 20
"""Columns of a metric's name."""
LEARNING_RATE = "step/lr"
"""Name of the curve of the learning rate in the step records."""


def metrics_and_configuration(frame: Frame) -> Text:
    """Return metrics and configuration."""
    out = Text()
    _append_metrics(out, frame)
    if text := limit_text(frame.snapshot):
        out.append("\nwhat limits the speed\n", "bold")
        out.append(f"{text}\n")
    _append_time(out, frame)
    _append_configuration(out, frame)
    out.rstrip()
    return out


def checkpoints_and_events(frame: Frame) -> Text:
    """Return checkpoints, events, and the facts about the run."""
    out = Text()
    _append_checkpoints(out, frame)
    _append_script_checkpoints(out, frame)
    _append_events(out, frame)
    _append_machines(out, frame)
    _append_run_facts(out, frame)
    out.rstrip()
    return out


def _append_metrics(out: Text, frame: Frame) -> None:
    titles = "".join(title.rjust(10) for title in ("last", "lowest", "highest"))
    out.append(f"{'metric'.ljust(NAME_CELLS)}{titles}\n", "bold")
    metrics = ordered_metrics(frame.snapshot)
    if not metrics:
        out.append("none logged yet\n", "dim")
    for name, value in metrics[:MAX_METRICS]:
        last, low, high = value.last, value.best_min, value.best_max
        numbers = "".join(formats.metric(number).rjust(10) for number in (last, low, high))
        out.append(f"{_fit_name(clean_name(name))}{numbers}")
        out.append(f"{measured_by(value)}\n", "dim")
    if len(metrics) > MAX_METRICS:
        out.append(f"and {len(metrics) - MAX_METRICS} more\n", "dim")
    rates = frame.curves.get(LEARNING_RATE)
    if rates is not None and len(rates):
        # A step whose learning rate is not known has NaN.
        rate = formats.significant(float(rates.mean[-1]), 4)
        out.append(f"{_fit_name('learning rate')}{rate.rjust(10)}\n")


def _append_time(out: Text, frame: Frame) -> None:
    """Append where the time of the run went, and what would be faster."""
    if frame.time is None or not frame.time.ledger.run.wall_us:
        return
    run = frame.time.ledger.run
    goodput = "" if run.goodput is None else f"  goodput {formats.percent(run.goodput)}"
    out.append(f"\ntime{goodput}\n", "bold")
    out.append(f"{time_bar(run, TIME_CELLS)}\n")
    for words, share, seconds in legend(run):
        out.append(f"{words.ljust(TIME_CELLS - 18)}{share.rjust(6)}{seconds.rjust(12)}\n")
    for one in frame.time.advice[:MAX_ADVICE]:
        out.append(f"{clean_line(one.text, 200)}\n", "dim")


def _fit_name(name: str) -> str:
    return (name if len(name) < NAME_CELLS else f"{name[: NAME_CELLS - 2]}…").ljust(NAME_CELLS)


def _append_configuration(out: Text, frame: Frame) -> None:
    spec = frame.spec
    if spec is not None and spec.start_from:
        out.append("\nstarted from\n", "bold")
        out.append(f"{clean_name(spec.start_from)}\n")
    code = short_code_lines(frame.code)
    if frame.frozen is not None:
        code += frozen_lines(frame.frozen, frame.code_changes)
    if code:
        out.append("\ncode\n", "bold")
        out.append("".join(f"{line}\n" for line in code))
    if spec is not None:
        _append_pairs(out, "configuration", settings(spec))
    if frame.snapshot.changes:
        out.append("\nchanged for this attempt\n", "bold")
        for change in frame.snapshot.changes:
            out.append(f"{clean_line(change, 300)}\n")
    if spec is None or spec.config is None:
        # The configuration would contain them already.
        _append_pairs(out, "hyperparameters", hyperparameters(frame.hyperparameters))


def _append_pairs(out: Text, title: str, pairs: Sequence[tuple[str, str]]) -> None:
    if not pairs:
        return
    out.append(f"\n{title}\n", "bold")
    for name, value in pairs:
        out.append(f"{clean_name(name)}  ", "dim")
        out.append(f"{clean_line(value, 300)}\n")


def _append_checkpoints(out: Text, frame: Frame) -> None:
    out.append("checkpoints\n", "bold")
    saved = frame.snapshot.checkpoints
    if not saved:
        none = "none by ltui yet" if frame.snapshot.script_checkpoints else "none yet"
        out.append(f"{none}\n", "dim")
    if seconds := frame.snapshot.checkpoint_seconds:
        out.append(f"the last ones took up to {formats.age(max(seconds))}\n", "dim")
    for checkpoint in _newest_first(saved):
        age = formats.ago(frame.now - checkpoint.saved_at) if checkpoint.saved_at else ""
        reason = saved_when(checkpoint.reason or "saved")
        out.append(f"{checkpoint_text(checkpoint)}, {reason} {age}\n")


def _newest_first(saved: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    ordered = sorted(saved, key=lambda c: (c.saved_at or 0.0, c.global_step), reverse=True)
    return ordered[:MAX_CHECKPOINTS]


def _append_script_checkpoints(out: Text, frame: Frame) -> None:
    """Append the checkpoints of the script's own ModelCheckpoint, which ltui does not resume
    from."""
    saved = frame.snapshot.script_checkpoints
    if not saved:
        return
    out.append(f"\n{script_checkpoints_title(frame.snapshot)}\n", "bold")
    for checkpoint in _newest_first(saved):
        parts = [f"step {checkpoint.global_step}"]
        parts += [clean_line(checkpoint.reason)] if checkpoint.reason else []
        parts += [] if checkpoint.size_bytes is None else [formats.size(checkpoint.size_bytes)]
        parts += [formats.ago(frame.now - checkpoint.saved_at)] if checkpoint.saved_at else []
        out.append(f"{', '.join(parts)}\n")
        out.append(f"  {clean_line(checkpoint.path)}\n", "dim")


def _append_events(out: Text, frame: Frame) -> None:
    out.append("\nevents, newest first\n", "bold")
    if not frame.events:
        out.append("none yet\n", "dim")
    for at, text in reversed(frame.events):
        # The time of day, because an age would be redrawn every second.
        out.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} ", "dim")
        out.append(f"{clean_line(text, 200)}\n")


def _append_machines(out: Text, frame: Frame) -> None:
    """Append the machines of a run on several: name, address, ranks, state, difference of clocks.

    Ages are left out, because they would be redrawn every second.
    """
    run = frame.snapshot
    if not run.nodes:
        return
    names = machine_names(run)
    out.append("\nmachines\n", "bold")
    for node in run.nodes[:MAX_MACHINES]:
        quiet = node.state in QUIET_STATES or run.state not in LIVE
        parts = [
            clean_name(node.address or node.host or ""),
            f"ranks {rank_range(node.ranks)}",
            "" if quiet else machine_state_word(node.state),
            clock_text(node.clock_skew_s),
        ]
        out.append(f"{names[node.node]}  ")
        out.append(f"{', '.join(part for part in parts if part)}\n", "" if not quiet else "dim")
    if len(run.nodes) > MAX_MACHINES:
        out.append(f"and {len(run.nodes) - MAX_MACHINES} more\n", "dim")


def _append_run_facts(out: Text, frame: Frame) -> None:
    run = frame.snapshot
    out.append("\nrun\n", "bold")
    hosts = sorted({clean_name(r.host) for r in run.ranks if r.host})
    python = "" if frame.spec is None else frame.spec.python
    for name, value in (
        ("id", run.id),
        ("preset" if run.preset else "command", program_text(run)),
        ("program", clean_name(run.program or "")),
        ("world size", formats.count(run.world_size)),
        ("hosts", "" if run.nodes else ", ".join(hosts)),
        ("Python", python),
        ("SLURM job", "" if run.job is None else job_text(run.job)),
        ("time limit", "" if run.job is None else _limit_text(run.job.ends_at)),
        ("supervisor", "" if run.supervisor_pid is None else f"pid {run.supervisor_pid}"),
        ("FLOP per batch", _flops_text(run.flops_per_batch)),
        ("model FLOP utilisation", formats.percent(run.model_flop_utilisation)),
        ("folder", run.run_dir or ""),
    ):
        if value:
            out.append(f"{name}: {clean_line(value)}\n")


def _limit_text(ends_at: float | None) -> str:
    # The time of day, because the remaining time would be redrawn every second.
    return "" if ends_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ends_at))


def _flops_text(count: float | None) -> str:
    return "" if count is None else f"{formats.quantity(count, 'FLOP')} per rank"
