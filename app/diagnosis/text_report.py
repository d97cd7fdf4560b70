"""A diagnosis as plain text to print, copy, or attach to a bug report. Pure."""

from __future__ import annotations

from ltui.widgets import diagnosis_lines as parts
from ltui.widgets.view_models import DiagnosisViewModel

WIDTH = 100
"""Columns of a report that is not printed on a terminal."""


def report(view_model: DiagnosisViewModel, width: int = WIDTH) -> str:
    """Return every part that is not empty, each under its title."""
    named: list[tuple[str, parts.Lines]] = []
    if view_model.verdicts or view_model.earlier:
        named.append(("problems and remedies", parts.verdicts_lines(view_model, width)))
    if view_model.collectives:
        named.append(("collectives", parts.collectives_lines(view_model, width)))
    if view_model.last_output:
        named.append(("last log lines", parts.last_output_lines(view_model, width)))
    if view_model.stacks:
        named.append(("stacks (innermost call first)", parts.stacks_lines(view_model, width)))
    if view_model.processes or view_model.machine or view_model.missing:
        named.append(("processes", parts.processes_lines(view_model, width)))
    text = [parts.plain(parts.headline_lines(view_model, width))]
    for title, lines in named:
        text.append(f"-- {title} {'-' * max(3, width - len(title) - 4)}\n{parts.plain(lines)}")
    return "\n\n".join(text) + "\n"


def file_name(run_id: str) -> str:
    """Return ``ltui-brave-owl-3f2a-diagnosis``, without a suffix."""
    return f"ltui-{run_id}-diagnosis"
