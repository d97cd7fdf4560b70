"""The record of past snapshots: what it costs the supervisor and the disk, and frames of the past
of a run of ten million steps with 64 ranks."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.past_frames import PastFrames
from ltui.app.live.run_poller import RunPoller
from ltui.training.store.history_writer import KEEP_ROWS
from ltui.training.store.past.snapshots import document_of, past_folder
from ltui.training.store.past.writer import PastWriter
from tests.bench.long_history import BEGAN, STEP_S, write_long_run
from tests.bench.row import Row, row
from tests.store.past_runs import snapshots

MINUTES = 4
STEPS, RANKS, RECORDED_S, JUMPS, TICKS = 10_000_000, 64, 1200, 10, 40


def _recorded(ranks: int) -> tuple[float, float]:
    """Return milliseconds of the writing thread for a snapshot, and bytes of one hour."""
    logs = {f"rank-{rank:05d}.log": rank * 1000 for rank in range(ranks)}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        writer = PastWriter(Path(folder))
        for number, snapshot in enumerate(snapshots(ranks, MINUTES * 60, period_s=1.0)):
            sizes = {name: size + 80 * number for name, size in logs.items()}
            began = time.thread_time()
            writer.append(snapshot.taken_at or 0.0, document_of(snapshot, sizes))
            times.append(time.thread_time() - began)
        writer.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return 1000 * statistics.median(times), size * 60 / MINUTES


def _frames() -> tuple[float, float]:
    """Return seconds from a key to the frame of a moment, and of a frame of a run that plays."""
    newest = BEGAN + STEPS * STEP_S
    with tempfile.TemporaryDirectory() as folder:
        run = write_long_run(Path(folder), "brave-owl-0001", metrics=1, steps=STEPS, rows=KEEP_ROWS)
        writer = PastWriter(past_folder(run))
        for number, snapshot in enumerate(snapshots(RANKS, RECORDED_S, period_s=1.0)):
            at = newest - RECORDED_S + number
            shown = replace(
                snapshot, taken_at=at, attempt=1, global_step=int((at - BEGAN) / STEP_S)
            )
            writer.append(at, document_of(shown, {}))
        writer.close()
        present = RunPoller(run).poll(newest, 0)
        frames, jumps = PastFrames(run, LatestCurveRequest()), []
        for chance in (random.Random(seed) for seed in range(JUMPS)):
            began = time.perf_counter()
            frames.frame(newest - chance.uniform(1, RECORDED_S), present)
            jumps.append(time.perf_counter() - began)
        began = time.perf_counter()
        for tick in range(TICKS):
            frames.frame(newest - RECORDED_S + 1 + tick * 0.25, present, playing=True)
        return statistics.median(jumps), (time.perf_counter() - began) / TICKS


def measure() -> list[Row]:
    rows = []
    for ranks, bound_ms in ((64, 5.0), (256, 20.0)):
        milliseconds, per_hour = _recorded(ranks)
        rows += [
            row(f"past snapshot, {ranks} ranks", milliseconds, "ms", bound_ms),
            row(f"record of an hour, {ranks} ranks, before thinning", per_hour / 1e6, "MB"),
        ]
    jump_s, tick_s = _frames()
    place = f"{STEPS:,} steps, {RANKS} ranks"
    return [
        *rows,
        row(f"a moment of the past, {place}, median of {JUMPS}", jump_s, "s", 0.3),
        row(f"a frame while it plays, {place}", tick_s, "s", 0.25),
    ]
