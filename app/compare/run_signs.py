"""The colour and the sign of a run, which it keeps once it has been compared."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ltui.app.compare.compared_run import ComparedRun
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import MOST_COLOURS, RunLabels
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import COLOURS, sign_of


def run_colours(kept: Mapping[str, int | None]) -> dict[str, int]:
    """Return an index for each run, from which charts take the colour and the sign.

    ``kept`` has the index of each run that was compared before; None for the others. Each of those
    gets the index that its id gives, or the next one that no other run has, with a colour and a
    sign that few have. The order of the runs changes nothing.
    """
    colours = {run_id: index for run_id, index in kept.items() if index is not None}
    uses: Counter[object] = Counter()
    for index in colours.values():
        uses.update(_parts(index))
    for run_id in sorted(kept.keys() - colours.keys()):
        first = zlib.crc32(run_id.encode("utf-8", "replace"))
        candidates = [(first + n) % MOST_COLOURS for n in range(MOST_COLOURS)]
        index = min(candidates, key=lambda one: [uses[part] for part in _parts(one)])
        colours[run_id] = index
        uses.update(_parts(index))
    return {run_id: colours[run_id] for run_id in kept}


def _parts(index: int) -> tuple[object, ...]:
    """Return what runs should not share, the most important first: all of it, colour, sign."""
    return index, ("colour", index % COLOURS), ("sign", sign_of(index))


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
            return labels if labels.colour is not None else replace(labels, colour=colours[run.id])

        if run.colour is None:
            with suppress(ProblemError):
                return replace(run, colour=change_labels(dirs[run.id], with_colour).colour)
        return run

    return tuple(kept(run) for run in runs)
