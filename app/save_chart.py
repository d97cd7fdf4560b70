"""Save a chart as a picture in a folder."""

from __future__ import annotations

import re
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.widgets.charts.chart import ExportedChart
from ltui.widgets.charts.picture import Picture, png, svg

MAX_NAME = 80
"""Maximum characters of a file name without its number and suffix."""


def save_chart(chart: ExportedChart, form: str, folder: Path, source: str) -> Path:
    """Write the chart as it is shown into a new file, and return its path.

    ``form`` is ``svg`` or ``png``, ``source`` the name of the run. Raise ``ProblemError`` if Pillow
    is missing or the file cannot be written.
    """
    stem, content = drawn_chart(chart, form, source)
    for number in range(1, 1000):
        path = folder / f"{stem}{'' if number == 1 else f'-{number}'}.{form}"
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            continue
        except OSError as error:
            raise ProblemError.of(
                where=str(path),
                what=f"the chart cannot be saved ({error.strerror or error}).",
                remedy="Start ltui in a folder that you can write to.",
            ) from error
        return path
    raise ProblemError.of(
        where=str(folder),
        what=f"there are 999 pictures named {stem} already.",
        remedy="Delete some of them.",
    )


def drawn_chart(chart: ExportedChart, form: str, source: str) -> tuple[str, bytes]:
    """Return the name of a file for the chart without its suffix, and what the file holds.

    The arguments and errors are those of ``save_chart``.
    """
    title = chart.export_title
    drawn = chart.picture(f"{source}: {title}" if source else title)
    content = svg(drawn).encode() if form == "svg" else _png(drawn)
    words = "-".join(part for part in ("ltui", source, title) if part)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", words)[:MAX_NAME].strip("-."), content


def _png(drawn: Picture) -> bytes:
    try:
        return png(drawn)
    except ImportError as error:
        raise ProblemError.of(
            where="W",
            what="saving a chart as PNG needs Pillow, which is not installed.",
            remedy="Install it with `pip install pillow`, or save as SVG with w.",
        ) from error
