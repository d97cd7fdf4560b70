"""Lines of frameworks that a log shows as one: start-up, and reports of what was not freed.

Pure. Warnings, errors and what the program itself prints are never folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ltui.widgets.view_models import LogLine, Tone

MAX_FOLDED = 500
"""Maximum number of lines that one line stands for."""
_KINDS = {
    "lines of start-up": re.compile(
        r"(\[rank: \d+\] )?(Global seed set|Seed set to)"
        r"|(GPU|TPU|HPU|IPU) available: |💡 Tip: |Adding \d+ callbacks from entry point"
        r"|Initializing distributed: |distributed_backend=|All distributed processes registered"
        r"|(Restoring states|Restored all states) from the checkpoint"
        r"|Loading `\w+_dataloader` to estimate|LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES"
        r"|Using (\d+bit|bfloat16|\w+ Automatic Mixed) |You are using a CUDA device"
    ),
    "lines about objects that were not freed": re.compile(
        r"nanobind: | - (leaked (instance|type|function) |\.\.\. skipped remainder)"
        r"|See https://nanobind\.readthedocs\.io"
    ),
}
_BETWEEN = re.compile(r"\s*|-{20,}")
"""Lines that belong to the ones around them."""


def folded(last: LogLine | None, line: LogLine) -> LogLine | None:
    """Return the line that stands for ``last`` and ``line``; None if both are shown."""
    if last is None or not last.folded or line.tone is not Tone.PLAIN or line.in_traceback:
        return None
    kind = _kind(last.folded[0])
    if len(last.folded) >= MAX_FOLDED or kind is None:
        return None
    if _kind(line.text) != kind and not _BETWEEN.fullmatch(line.text):
        return None
    lines = (*last.folded, line.text)
    return replace(last, text=f"{len(lines)} {kind} (u: show)", tone=Tone.DIM, folded=lines)


def first_of_fold(line: LogLine) -> LogLine:
    """Return a line that further lines of its kind are folded into, or the line itself."""
    if line.tone is not Tone.PLAIN or line.in_traceback or _kind(line.text) is None:
        return line
    return replace(line, folded=(line.text,))


def unfolded(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield every line that was folded as it was written."""
    for line in lines:
        if not line.folded:
            yield line
        for text in line.folded:
            yield replace(line, text=text, tone=Tone.PLAIN, folded=())


def _kind(text: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(text)), None)
