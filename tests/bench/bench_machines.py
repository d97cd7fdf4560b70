"""One repaint of the screen of a run on many machines: every panel, with new values of all ranks.

Processor time of the thread that draws. Every line of the screen is drawn again, which is more than
the dashboard does: it repaints only what changed.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from ltui.app.live.frame import Frame
from ltui.app.machines_demo import MachinesDemoApp, SimulatedMachines
from ltui.app.panels.ranks_panel import MachineTable, RanksPanel
from ltui.app.presentation.machine_rows import RowSelection
from ltui.app.screens.run import RunScreen
from ltui.app.scripted_machines import CUT_S, STALL_S, Cluster
from tests.bench.row import Row, row

CLUSTER = Cluster(nodes=128, gpus_per_node=8)
SIZES = ((80, 24), (160, 50))
UNFOLDED = RowSelection(unfolded=dict.fromkeys(range(CLUSTER.nodes), True))
ROUNDS = 9
BOUND_MS = 50.0


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    machines = SimulatedMachines(CLUSTER, lambda: 0.0)
    frames = [machines.poll(second, 0) for second in _seconds()]
    rows = []
    for size in SIZES:
        app = MachinesDemoApp(CLUSTER)
        async with app.run_test(size=size) as pilot:
            screen = app.screen_stack[0]
            assert isinstance(screen, RunScreen)
            while screen.frame is None or not screen.query(MachineTable):
                await pilot.press("4")
                await pilot.pause(0.1)
            name = f"repaint of {CLUSTER.world_size:,} ranks, {size[0]}x{size[1]}"
            rows.append(_row(name, screen, frames))
            screen.query_one(RanksPanel)._selection = UNFOLDED
            name = f"{name}, all machines unfolded"
            rows.append(_row(name, screen, frames))
    return rows


def _seconds() -> list[float]:
    """Return seconds of the script in normal training, in a stall and with a cut link."""
    return [second + n for second in (2, STALL_S[0] + 8, CUT_S[0] + 20) for n in range(ROUNDS)]


def _repaint_ms(screen: RunScreen, frame: Frame) -> float:
    began = time.thread_time()
    screen.panels.use_frame(frame)
    screen._draw(frame)
    screen._compositor.render_strips()
    return (time.thread_time() - began) * 1e3


def _row(what: str, screen: RunScreen, frames: list[Frame]) -> Row:
    value = statistics.median(_repaint_ms(screen, frame) for frame in frames)
    return row(f"{what}, median", value, "ms", BOUND_MS)
