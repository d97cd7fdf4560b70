"""Curves read back from real stores: whole ones, their ends, and what was written since."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ltui.app.live import run_curves
from ltui.app.live.curve_arithmetic import LatestCurveRequest, smooth
from ltui.app.live.run_curves import RunCurves, stored_curve, stored_segment
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.store.curve_reader import Curve
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, Sample, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.store.histories import StepRow, begin, run_dir, snapshot, step_row, steps


def steps_of(rank: int, first: int, last: int) -> Batch:
    """Steps of half a second with 16 samples."""
    rows: list[StepRow] = []
    for step in range(first, last + 1):
        row = step_row(step, 1.0, 100.0 + step)
        row[StepField.FORWARD_S] = step / 1000
        row[StepField.SAMPLES] = 16
        rows.append((rank, step, row))
    return Batch(steps=rows, cursors={rank: Cursor(last + 1)})


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
    ones = np.ones(30_000)
    whole = Curve(steps, steps, steps, losses, losses, losses, ones)
    assert len(loaded) < 6000
    for weight in (0.6, 0.9, 0.99, 0.995):
        assert smooth(loaded, weight)[-1] == pytest.approx(smooth(whole, weight)[-1], rel=1e-4)
    # A part in view is read in the detail that the store has.
    assert part.steps.tolist() == list(range(4000, 5000))
    assert np.array_equal(part.mean, losses[3999:4999])


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


def watched(run: RunDir, attempt: int = 1, **metrics: int) -> tuple[RunCurves, Callable[[], Curve]]:
    """Return curves, and a function that reads them again and returns the loss."""
    curves = RunCurves(LatestCurveRequest())
    values = {name: MetricValue(last=0.0, step=step) for name, step in metrics.items()}
    curves.use_snapshot(snapshot(attempt=attempt, metrics={**values}))
    clock = itertools.count(0, 10)

    def read() -> Curve:
        with RunStore(run) as store:
            curves.read(store, next(clock))
        return curves.requested()["train/loss"]

    return curves, read


def test_new_points_follow_without_another_read_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.commit(1, steps(1, 10))
    curves, read = watched(run)
    assert read().steps.tolist() == [*range(1, 11)]
    version = curves.version
    read()
    assert curves.version == version, "nothing is drawn again while nothing is new"
    monkeypatch.setattr(run_curves, "stored_curve", None)
    # Two batches of one optimizer step are two rows of the same step.
    store.commit(1, Batch(steps=[(0, 11, step_row(10, 5.0))], cursors={0: Cursor(12)}))
    assert read().mean[-2:].tolist() == [10.0, 5.0]
    store.commit(1, steps(11, 14))
    assert read().steps[-4:].tolist() == [11, 12, 13, 14]
    assert curves.version > version
    store.close()


def test_a_restarted_rank_and_a_new_attempt_replace_the_steps_that_they_repeat(
    tmp_path: Path,
) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.commit(1, steps(1, 20))
    begin(store, 2, resumed_step=12)
    _, read = watched(run, attempt=2)
    assert read().steps[-1] == 20, "the attempt has not trained yet"
    store.commit(2, steps(13, 14, factor=2))
    assert read().mean.tolist() == [*range(1, 13), 26.0, 28.0]
    # Torch elastic starts the rank again within the attempt: it has another queue.
    again: list[StepRow] = [(0, 20 + step, step_row(step, 0.5)) for step in (13, 14, 15)]
    store.commit(2, Batch(steps=again, cursors={0: Cursor(36, base=15)}))
    assert sorted(set(read().steps.tolist())) == [*range(1, 16)]
    store.close()


def test_a_metric_whose_steps_go_back_is_read_completely(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)

    def log(seq: int, *logged: int) -> None:
        rows = [(0, seq + n, "loss", step, 0, 1.0, float(seq + n)) for n, step in enumerate(logged)]
        store.commit(1, Batch(samples=[*rows], cursors={0: Cursor(seq + len(logged))}))

    log(1, 1, 2, 3)
    curves = RunCurves(LatestCurveRequest())
    curves.use_snapshot(snapshot(metrics={"loss": MetricValue(last=0.0, step=2)}))
    for now in (0.0, 10.0):
        with RunStore(run) as history:
            curves.read(history, now)
        log(4, 1, 2)
    assert sorted(curves.requested()["loss"].steps.tolist()) == [1, 1, 2, 2, 3]
    store.close()


def test_a_logged_loss_replaces_that_of_the_steps(tmp_path: Path) -> None:
    """On a GPU the loss is sent once it has been copied; the row of its step says NaN."""
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    rows: list[StepRow] = [(0, step, step_row(step)) for step in (1, 2, 3)]
    store.commit(1, Batch(steps=rows, cursors={0: Cursor(4)}))
    _, read = watched(run, **{"train/loss": 3})
    assert np.isnan(read().mean).all()
    samples: list[Sample] = [(0, 4, "train/loss", 2, None, 1.0, 0.5)]
    store.commit(1, Batch(samples=samples, cursors={0: Cursor(5)}))
    loss = read()
    assert (loss.steps.tolist(), loss.mean.tolist()) == ([2], [0.5])
    assert np.isnan(loss.epochs).all(), "a program without a Trainer has no epochs"
    store.close()


def test_a_long_curve_is_read_again_when_it_has_grown_by_many_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_curves, "MAX_POINTS", 3000)
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    _, read = watched(run, **{"train/loss": 1})
    for first in range(1, 6001, 500):
        store.commit(1, steps(first, first + 499))
        loss = read()
    assert len(loss) < 5000
    assert loss.steps[-1] == 6000
    assert (np.diff(loss.steps) > 0).all()
    store.close()
