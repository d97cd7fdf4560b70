"""A diagnosis as plain text: printed, copied, saved to attach to a bug report. Pure."""

from __future__ import annotations

from ltui.widgets import diagnosis as parts
from ltui.widgets.view_models import DiagnosisShape

WIDTH = 100


def report(shape: DiagnosisShape, width: int = WIDTH) -> str:
    """Return every part that is not empty, each under its title."""
    named: list[tuple[str, parts.Lines]] = []
    if shape.verdicts or shape.earlier:
        named.append(("problems and remedies", parts.verdicts_lines(shape, width)))
    if shape.fronts:
        named.append(("collectives", parts.fronts_lines(shape, width)))
    if shape.last_words:
        named.append(("last log lines", parts.last_words_lines(shape, width)))
    if shape.stacks:
        named.append(("stacks (innermost call first)", parts.stacks_lines(shape, width)))
    if shape.processes or shape.machine or shape.missing:
        named.append(("processes", parts.processes_lines(shape, width)))
    text = [parts.plain(parts.headline_lines(shape, width))]
    for title, lines in named:
        text.append(f"-- {title} {'-' * max(3, width - len(title) - 4)}\n{parts.plain(lines)}")
    return "\n\n".join(text) + "\n"


def file_name(run_id: str) -> str:
    """``ltui-brave-owl-3f2a-diagnosis``, without a suffix."""
    return f"ltui-{run_id}-diagnosis"
