"""The GPU panel as pictures, from simulated GPUs: 1, 8 and 64, three widths, dark and light."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.app.gpu_frames import gpu_frame
from tests.app.one_run import OneRun, Script, settled, shown

# The GPUs of a count are read once for each worker.
pytestmark = pytest.mark.xdist_group("gpu pictures")
SIZES = {80: (80, 24), 120: (120, 24), 160: (160, 30)}
COUNTS = (1, 8, 64)


@pytest.mark.parametrize(
    ("count", "width", "theme"),
    [*product(COUNTS, SIZES, ["dark"]), *product(COUNTS, [120], ["light"])],
)
def test_panel(
    snap_compare: Callable[..., bool], library: Path, count: int, width: int, theme: str
) -> None:
    app = OneRun(Script(gpu_frame(count, library)))
    app.theme = f"ltui-{theme}"

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        await pilot.press("3", "z")
        await settled(pilot)

    assert snap_compare(app, terminal_size=SIZES[width], run_before=drawn)


def test_detail(snap_compare: Callable[..., bool], library: Path) -> None:
    app = OneRun(Script(gpu_frame(8, library)))

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        await pilot.press("3", "down", "down", "enter")
        await settled(pilot)

    assert snap_compare(app, terminal_size=(160, 50), run_before=drawn)
