"""The colour and the sign of a run, which it keeps once it has been compared."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from ltui.app.compare.compared_run import ComparedRun
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import MOST_COLOURS, RunLabels
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import COLOURS, LINES, sign_of


def run_colours(kept: Mapping[str, int | None], leaders: Collection[str] = ()) -> dict[str, int]:
    """Return an index for each run, from which charts take the colour and the sign.

    ``kept`` has the index of each run that was compared before; None for the others. A run keeps
    its colour, and its sign unless another run here has it. Each of the others gets the index that
    its id gives, or the next one with a sign and a colour that few have. The ``leaders`` of groups
    choose first. Where there are more runs than signs, those with the same sign have different
    lines (``dash_of``). The order of the runs changes nothing.
    """
    colours: dict[str, int] = {}
    uses: Counter[object] = Counter()
    for run_id in sorted(kept, key=lambda one: (one not in leaders, kept[one] is None, one)):
        index = kept[run_id]
        if index is None:
            first = zlib.crc32(run_id.encode("utf-8", "replace"))
            candidates = [(first + n) % MOST_COLOURS for n in range(MOST_COLOURS)]
        else:
            candidates = [(index + n * COLOURS) % MOST_COLOURS for n in range(COLOURS)]
        chosen = min(candidates, key=lambda one: [uses[part] for part in _parts(one)])
        line = uses["sign", sign_of(chosen)] % LINES
        uses.update(_parts(chosen))
        colours[run_id] = chosen + line * MOST_COLOURS
    return {run_id: colours[run_id] for run_id in kept}


def _parts(index: int) -> tuple[object, ...]:
    """Return what runs should not share, the most important first: sign, all of it, colour."""
    return ("sign", sign_of(index)), index, ("colour", index % COLOURS)


def keep_colours(
    runs: Sequence[ComparedRun], run_dirs: Sequence[RunDir]
) -> tuple[ComparedRun, ...]:
    """Store the colours of runs that have none yet, and return the runs with them.

    A run whose directory cannot be written is returned as it is.
    """
    colours = run_colours({run.id: run.colour for run in runs})
    dirs = {run_dir.id: run_dir for run_dir in run_dirs}

    def kept(run: ComparedRun) -> ComparedRun:
        def with_colour(labels: RunLabels) -> RunLabels:
            # Another dashboard may have been faster.
            if labels.colour is not None:
                return labels
            return replace(labels, colour=colours[run.id] % MOST_COLOURS)

        if run.colour is None:
            with suppress(ProblemError):
                return replace(run, colour=change_labels(dirs[run.id], with_colour).colour)
        return run

    return tuple(kept(run) for run in runs)
