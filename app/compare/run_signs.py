"""The colour and the sign of a run, which it keeps on every screen. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from ltui.widgets.palette import DARK_SERIES

HUES = len(DARK_SERIES)


def run_colours(run_ids: Collection[str]) -> dict[str, int]:
    """Return an index for each run, from which charts take the colour and the sign.

    A run has the index that its id gives. If two runs of a screen have the same one, the run whose
    id comes later gets the next free colour, so the order of the runs changes nothing. From nine
    runs on colours repeat, with other signs.
    """
    taken: dict[str, int] = {}
    used: set[int] = set()
    for run_id in sorted(set(run_ids)):
        first = zlib.crc32(run_id.encode("utf-8", "replace"))
        row = len(used) // HUES
        free = (row * HUES + (first + n) % HUES for n in range(HUES))
        taken[run_id] = next(index for index in free if index not in used)
        used.add(taken[run_id])
    return taken
