"""The screen of all metrics on a terminal: 12 charts of 500 metrics with a million steps each.

And the first picture of a run of ten million steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ltui.app.live.run_poller import FASTEST_S
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.store.history_writer import KEEP_ROWS, Batch, Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.control_requests import ControlServer
from tests.app import frames
from tests.bench.long_history import metric_name, write_long_run
from tests.bench.row import Row, cpu_s, row
from tests.bench.terminal_process import COLUMNS, LINES, on_terminal, read_painted
from tests.bench.terminal_screen import TerminalScreen
from tests.store.histories import step_row

METRICS, STEPS, LONG_STEPS = 500, 1_000_000, 10_000_000
CHARTS = 12
PER_S = round(1 / FASTEST_S)
WARM_S = 5.0
UPDATES = 60
"""Number of updates of all charts whose cost is measured; a busy machine needs longer for them."""
GOLDEN = 0.6180339887
"""Its multiples modulo 1 differ from each other by more than a legend rounds away."""
_RAW = re.compile(r"raw (\S+)")


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        long = write_long_run(home, "brave-owl-0001", metrics=1, steps=LONG_STEPS, rows=KEEP_ROWS)
        command = [*_module("first_picture", long), str(LONG_STEPS)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        picture_s, last_s, picture_mb = map(float, done.stdout.split())
        # With few rows, 500 metrics fit on a disk. A chart of a million steps shows windows.
        wide = write_long_run(home, "brave-owl-0002", metrics=METRICS, steps=STEPS, rows=3000)
        share, memory = watch(wide)
    grid = f"{CHARTS} of {METRICS} charts with {STEPS:,} steps, {PER_S} updates a second"
    picture = f"first picture of {LONG_STEPS:,} steps"
    return [
        row(grid, share, "% of a core", 15),
        row("memory meanwhile", memory, "MB", 150),
        row(f"{picture}, median of 5", picture_s, "s", 0.3),
        row("the curve of the last 20,000 of them", last_s, "s", 0.5),
        row(f"memory of the {picture}", picture_mb, "MB", 150),
    ]


def _module(name: str, run: RunDir) -> list[str]:
    return [sys.executable, "-m", f"tests.bench.{name}", str(run.path)]


def watch(run: RunDir) -> tuple[float, float]:
    """Return processor share (%) and memory (MB) of the screen, with new values for all charts."""
    screen = TerminalScreen(COLUMNS, LINES)
    command = _module("frequent_dashboard", run)
    with (
        _training(run),
        on_terminal(command, {"LTUI_HOME": str(run.home)}) as (process, terminal),
    ):
        assert read_painted(terminal, 60, screen, lambda s: "step 1" in s.text()), screen.text()
        os.write(terminal, b"M")
        assert read_painted(terminal, 60, screen, lambda s: len(_newest(s)) == CHARTS)
        shown: list[set[str]] = [set(), set()]

        def updated(screen: TerminalScreen) -> bool:
            """Note the newest values of the first and the last chart. True after enough of them."""
            for values, newest in zip(shown, _newest(screen)[:: CHARTS - 1], strict=True):
                values.add(newest)
            return min(map(len, shown)) > UPDATES

        read_painted(terminal, WARM_S, screen)
        watched = psutil.Process(process.pid)
        before_s = cpu_s(watched)
        assert read_painted(terminal, 120, screen, updated), shown
        used = cpu_s(watched) - before_s
        return used / UPDATES * PER_S * 100, watched.memory_info().rss / 1e6


def _newest(screen: TerminalScreen) -> list[str]:
    """Return the newest value of each chart, from its legend."""
    return _RAW.findall(screen.text())


@contextlib.contextmanager
def _training(run: RunDir) -> Iterator[None]:
    """Do what a supervisor does for a dashboard, in threads of this process."""
    snapshot = frames.snapshot(
        id=run.id, attempt=1, global_step=STEPS, max_steps=2 * STEPS, ranks=(frames.rank(0),),
        world_size=1, gpus=(), checkpoints=(),
        metrics={metric_name(n): MetricValue(last=n, step=STEPS) for n in range(1, METRICS + 1)},
    )  # fmt: skip
    ended = threading.Event()
    server = ControlServer(run.socket_path, run.socket_path, lambda _: {"ok": False})
    server.publish(snapshot)
    training = threading.Thread(target=_store_metrics, args=(run.db_path, ended))
    training.start()
    try:
        yield
    finally:
        ended.set()
        training.join()
        server.close()


def _store_metrics(path: Path, ended: threading.Event) -> None:
    """Store a value of every metric at each step, one step for each update."""
    with contextlib.closing(StoreWriter(path)) as writer:
        step = STEPS
        while not ended.wait(FASTEST_S):
            step, now = step + 1, time.time()
            value = 1 + step * GOLDEN % 1
            batch = Batch(cursors={0: Cursor(next_seq=step + 1, base=0, inode=0)})
            batch.steps.append((0, step, step_row(step, 0.5, now)))
            batch.samples += [
                (0, step, metric_name(number), step, 0, now, value)
                for number in range(1, METRICS + 1)
            ]
            writer.commit(1, batch)
