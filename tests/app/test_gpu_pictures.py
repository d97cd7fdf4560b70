"""The GPU panel as pictures, from simulated GPUs: 1, 8 and 64, three widths, dark and light."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.app.gpu_frames import gpu_frame
from tests.app.one_run import OneRun, Script, settled, shown
from tests.gpu.standin import nvml_stand_in

needs_compiler = pytest.mark.skipif(
    nvml_stand_in.compiler() is None, reason="no C compiler to build the stand-in driver with"
)
SIZES = {80: (80, 24), 120: (120, 24), 160: (160, 30)}


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver")


@needs_compiler
@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("width", sorted(SIZES))
@pytest.mark.parametrize("count", [1, 8, 64])
def test_panel(
    snap_compare: Callable[..., bool], driver: Path, count: int, width: int, theme: str
) -> None:
    app = OneRun(Script(gpu_frame(count, driver)))
    app.theme = f"ltui-{theme}"

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        await pilot.press("3", "z")
        await settled(pilot)

    assert snap_compare(app, terminal_size=SIZES[width], run_before=drawn)


@needs_compiler
def test_detail(snap_compare: Callable[..., bool], driver: Path) -> None:
    app = OneRun(Script(gpu_frame(8, driver)))

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        await pilot.press("3", "down", "down", "enter")
        await settled(pilot)

    assert snap_compare(app, terminal_size=(160, 50), run_before=drawn)
