"""Curves read back from real stores: throughput per attempt, the end at full resolution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ltui.app.live.curve_arithmetic import curve_from_rows, smooth
from ltui.app.live.stored_curves import stored_curve, stored_rates, stored_segment
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.tensor_queue.record_types import StepField
from tests.store.histories import StepRow, begin, run_dir, step_row


def steps_of(rank: int, first: int, last: int) -> Batch:
    """Steps of half a second with 16 samples."""
    rows: list[StepRow] = []
    for step in range(first, last + 1):
        row = step_row(step, 1.0, 100.0 + step)
        row[StepField.FORWARD_S] = step / 1000
        row[StepField.SAMPLES] = 16
        rows.append((rank, step, row))
    return Batch(steps=rows, cursors={rank: Cursor(last + 1)})


def test_every_attempt_counts_with_its_own_ranks(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    for rank in range(2):
        store.commit(1, steps_of(rank, 1, 400))
    begin(store, 2, resumed_step=300)
    with RunStore(run) as history:
        before = stored_rates(history)
    for rank in range(12):
        store.commit(2, steps_of(rank, 301, 600))
    store.close()
    assert before[None].mean == pytest.approx(np.full(len(before[None]), 2 * 32.0))
    assert before[1].mean == pytest.approx(np.full(len(before[1]), 32.0))
    with RunStore(run) as history:
        after = stored_rates(history)[None]
    first, second = after.steps <= 300, after.steps > 300
    assert first.any()
    assert after.mean[first] == pytest.approx(np.full(first.sum(), 2 * 32.0))
    assert after.mean[second] == pytest.approx(np.full(second.sum(), 12 * 32.0))


def test_the_smoothed_loss_ends_the_same_however_long_the_history_is(tmp_path: Path) -> None:
    losses = 2.0 + np.random.default_rng(5).normal(0, 0.5, 30_000)
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    for first in range(0, 30_000, 5000):
        chunk = range(first, first + 5000)
        rows: list[StepRow] = [(0, s + 1, step_row(s + 1, losses[s])) for s in chunk]
        store.commit(1, Batch(steps=rows))
    store.close()
    with RunStore(run) as history:
        loaded = stored_curve(history, "train/loss")
        part = stored_segment(history, "train/loss", (4000, 4999))
    steps = np.arange(1.0, 30_001.0)
    whole = curve_from_rows(np.column_stack([steps, steps, steps, losses]))
    assert len(loaded) < 6000
    for weight in (0.6, 0.9, 0.99, 0.995):
        assert smooth(loaded, weight)[-1] == pytest.approx(smooth(whole, weight)[-1], rel=1e-4)
    # A part in view is read in the detail that the store has.
    assert part.steps.tolist() == list(range(4000, 5000))
    assert np.array_equal(part.mean, losses[3999:4999])


def test_a_part_of_the_throughput_is_read_in_detail(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    for first in range(1, 30_001, 5000):
        store.commit(1, steps_of(0, first, first + 4999))
    store.close()
    with RunStore(run) as history:
        coarse = stored_rates(history)[None]
        fine = stored_rates(history, (4000, 4999))[None]
    assert np.sum((coarse.steps >= 4000) & (coarse.steps <= 4999)) < 100
    assert len(fine) > 900
    assert fine.mean == pytest.approx(np.full(len(fine), 32.0))


def test_what_each_step_records_without_windows_is_a_curve_too(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    for first in range(1, 30_001, 5000):
        store.commit(1, steps_of(0, first, first + 4999))
    store.close()
    with RunStore(run) as history:
        whole = stored_curve(history, "step/forward_seconds")
        part = stored_segment(history, "step/forward_seconds", (10, 19))
        assert len(stored_curve(history, "step/memory_bytes").mean) > 0
    assert whole.mean == pytest.approx(whole.steps / 1000)
    assert whole.count.sum() > 29_000
    assert part.steps.tolist() == list(range(10, 20))
