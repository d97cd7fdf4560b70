"""The facts beside the panels: metrics, checkpoints, where things lie. Pure."""

from __future__ import annotations

import time

from rich.text import Text

from ltui.app.frame import Frame
from ltui.app.translate import checkpoint_text, what_runs
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name

METRICS = 24
CHECKPOINTS = 6
EVENTS = 8


def text(frame: Frame) -> Text:
    """Never parsed as markup: names and paths are what a run wrote."""
    out = Text()
    _metrics(out, frame)
    _checkpoints(out, frame)
    _events(out, frame)
    _facts(out, frame)
    return out


def _metrics(out: Text, frame: Frame) -> None:
    metrics = sorted(frame.snapshot.metrics.items())
    out.append("metric                last    lowest   highest\n", "bold")
    if not metrics:
        out.append("none logged yet\n", "dim")
    for name, value in metrics[:METRICS]:
        shown = clean_name(name)
        shown = shown if len(shown) <= 16 else f"{shown[:15]}…"
        figures = (value.last, value.best_min, value.best_max)
        out.append(shown.ljust(16) + "".join(formats.metric(f).rjust(10) for f in figures) + "\n")
    if len(metrics) > METRICS:
        out.append(f"and {len(metrics) - METRICS} more\n", "dim")


def _checkpoints(out: Text, frame: Frame) -> None:
    out.append("\ncheckpoints\n", "bold")
    saved = sorted(frame.snapshot.checkpoints, key=lambda c: c.saved_at or 0.0, reverse=True)
    if not saved:
        out.append("none yet\n", "dim")
    for checkpoint in saved[:CHECKPOINTS]:
        age = formats.ago(frame.now - checkpoint.saved_at) if checkpoint.saved_at else ""
        out.append(f"{checkpoint_text(checkpoint)}, {checkpoint.reason or 'saved'} {age}\n")


def _events(out: Text, frame: Frame) -> None:
    out.append("\nevents\n", "bold")
    if not frame.events:
        out.append("none yet\n", "dim")
    for at, text in frame.events[-EVENTS:]:
        # The hour, not the age, which would be drawn anew every second.
        out.append(f"{time.strftime('%H:%M:%S', time.localtime(at))} ", "dim")
        out.append(f"{clean_line(text, 200)}\n")


def _facts(out: Text, frame: Frame) -> None:
    run = frame.snapshot
    out.append("\nrun\n", "bold")
    hosts = sorted({clean_name(r.host) for r in run.ranks if r.host})
    for name, value in (
        ("id", run.id),
        ("runs", what_runs(run)),
        ("world size", formats.count(run.world_size)),
        ("hosts", ", ".join(hosts)),
        ("supervisor", "" if run.supervisor_pid is None else f"pid {run.supervisor_pid}"),
        ("a batch", _flops(run.flops_per_batch)),
        ("model FLOP utilisation", formats.percent(run.model_flop_utilisation)),
        ("folder", run.run_dir or ""),
    ):
        if value:
            out.append(f"{name}: {clean_line(value)}\n")


def _flops(count: float | None) -> str:
    return "" if count is None else f"{formats.quantity(count, 'FLOP')} a rank"
