"""Curves, windows and lineage of histories long and short."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import Event
from ltui.training.store import history_writer
from ltui.training.store.database_schema import STEP_COLUMNS
from ltui.training.store.export_files import WindowedPart
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_windows import WINDOW_SIZES
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.store.histories import StepRow, begin, run_dir, step_row, steps, stored_rows, written


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4096, 30_000])
def test_a_curve_is_whole_whatever_its_length(tmp_path: Path, count: int) -> None:
    run = written(tmp_path, (steps(s, min(s + 999, count)) for s in range(1, count + 1, 1000)))
    with RunStore(run) as history:
        curve = history.curve("train/loss", max_points=500)
        everything = history.curve("train/loss", max_points=10**9, rank=None)
    assert len(curve) <= 500
    assert np.all(np.diff(curve.steps) > 0)
    assert (curve.low.min(), curve.high.max()) == (1.0, float(count))
    assert np.all((curve.low <= curve.mean) & (curve.mean <= curve.high))
    # The loss is the step, so every mean lies where it is drawn.
    np.testing.assert_allclose(curve.mean, curve.steps, atol=0.51)
    np.testing.assert_allclose(everything.times, 100.0 + everything.steps, atol=0.51)


def test_rows_far_back_become_windows_and_nothing_falls_between(tmp_path: Path) -> None:
    batches = (steps(s, s + 999) for s in range(1, 40_001, 1000))
    run = written(tmp_path, batches, keep_rows=5000)
    with RunStore(run) as history:
        rows = list(history.export(["train/loss"]))
        full = [row.step for row in rows[-5000:]]
        curve = history.curve("train/loss", max_points=10**9)
        early = history.curve("train/loss", first_step=100, last_step=400)
    assert full == list(range(35_001, 40_001))
    assert len(rows) < 8000
    assert [row.step for row in rows] == sorted({row.step for row in rows})
    assert rows[0].step == WINDOW_SIZES[0] - 1
    assert rows[0].value == pytest.approx(32.0)
    assert (curve.low.min(), curve.high.max()) == (1.0, 40_000.0)
    assert early.low.min() <= 192 <= early.high.max() <= 400


def test_an_export_holds_every_step_once_at_the_best_resolution_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {0: 40_000, 1: 39_000}
    monkeypatch.setattr(history_writer, "KEEP_WINDOWS", 100)
    batches = [
        steps(s, s + 999, rank=rank) for rank, end in last.items() for s in range(1, end + 1, 1000)
    ]
    run = written(tmp_path, batches, keep_rows=1000)
    thinned = WindowedPart()
    with RunStore(run) as history:
        rows = list(thinned.watch(history.export(["train/loss"])))
    assert [(row.step, row.rank) for row in rows] == sorted((row.step, row.rank) for row in rows)
    for rank, end in last.items():
        mine = [row for row in rows if row.rank == rank]
        firsts = [row.step if row.first_step is None else row.first_step for row in mine]
        assert firsts == [1, *(row.step + 1 for row in mine[:-1])], "no gap, no overlap"
        assert mine[-1].step == end
        assert sum(row.count for row in mine) == end
        total = sum(row.value * row.count for row in mine if row.value is not None)
        assert total == pytest.approx(end * (end + 1) / 2)
        assert {row.step - row.first_step + 1 for row in mine if row.first_step} >= {64, 4096}
        assert all((row.low, row.high) == (row.first_step, row.step) for row in mine if row.low)
        assert sum(row.first_step is None for row in mine) >= 1000
    said = required(thinned.sentence())
    assert said.startswith("Steps 1 to 38")
    assert "of train/loss are stored as windows of up to 4096 steps" in said


def test_a_metric_that_was_logged_as_nan_is_in_the_export(tmp_path: Path) -> None:
    samples: list[Any] = [(0, n, "val/acc", n, 0, 1.0, v) for n, v in enumerate((0.5, math.nan))]
    run = written(tmp_path, [Batch(samples=samples)])
    thinned = WindowedPart()
    with RunStore(run) as history:
        rows = list(thinned.watch(history.export(["val/acc"])))
    assert [(row.step, row.value) for row in rows] == [(0, 0.5), (1, None)]
    assert thinned.sentence() is None


def test_an_unknown_epoch_is_stored_as_none(tmp_path: Path) -> None:
    row = step_row(1)
    row[StepField.EPOCH] = math.nan
    run = written(tmp_path, [Batch(steps=[(0, 1, row)])])
    with RunStore(run) as history:
        (exported,) = history.export(["step/seconds"])
        assert (exported.step, exported.epoch) == (1, None)
        assert np.isnan(history.curve("step/seconds").epochs).all()


WINDOW_COLUMNS = ("level", "win", "n", "loss_n", "loss_mean", "loss_low", "loss_high")


def test_windows_are_what_numpy_makes_of_the_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    losses = rng.normal(size=10_000)
    losses[rng.integers(0, 10_000, 500)] = math.nan
    rows: list[StepRow] = [(0, s, step_row(s, losses[s])) for s in range(10_000)]
    batches = (Batch(steps=rows[first : first + 777]) for first in range(0, 10_000, 777))
    found = stored_rows(written(tmp_path, batches), "step_windows")
    assert {row["level"] for row in found} == {64, 4096}
    for row in found:
        level, win, n, known, mean, low, high = (row[name] for name in WINDOW_COLUMNS)
        window = losses[win * level : (win + 1) * level]
        assert (n, known) == (level, np.isfinite(window).sum())
        assert mean == pytest.approx(np.nanmean(window))
        assert (low, high) == (np.nanmin(window), np.nanmax(window))


def test_a_restarted_writer_goes_on_with_the_windows(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    for first in range(1, 9001, 450):
        store = StoreWriter(run.db_path)
        begin(store)
        store.commit(1, steps(first, first + 449))
        store.commit(1, steps(first, first + 449))  # twice: as after a lost cursor
        store.close()
    with RunStore(run) as history:
        assert [row.step for row in history.export(["train/loss"])] == list(range(1, 9001))
        counts = history._connection.execute(
            "SELECT n, count(*) FROM step_windows WHERE level = 64 GROUP BY n ORDER BY n"
        ).fetchall()
    assert counts == [(63, 1), (64, 139)]


def test_a_resumed_attempt_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.commit(1, steps(1, 1000))
    begin(store, 2, resumed_step=600)
    with RunStore(run) as history:
        assert len(list(history.export(["train/loss"]))) == 1000, "nothing was redone yet"
    store.commit(2, steps(601, 700, factor=10.0))
    begin(store, 3, resumed_step=650)
    store.commit(3, steps(651, 660, factor=100.0))
    store.close()
    with RunStore(run) as history:
        rows = list(history.export(["train/loss"]))
        curve = history.curve("train/loss")
    assert [row.step for row in rows] == list(range(1, 661))
    assert [rows[i - 1].value for i in (600, 601, 650, 651)] == [600, 6010, 6500, 65100]
    np.testing.assert_array_equal(curve.mean, [row.value for row in rows])


def test_ranks_are_kept_apart_and_can_be_averaged(tmp_path: Path) -> None:
    run = written(tmp_path, [steps(1, 200, rank=rank, factor=float(rank)) for rank in range(3)])
    with RunStore(run) as history:
        assert history.curve("train/loss", rank=2).mean[-1] == 400.0
        together = history.curve("train/loss", rank=None)
        assert len(history.curve("train/loss", rank=7)) == 0
    assert (together.low[-1], together.mean[-1], together.high[-1]) == (0.0, 200.0, 400.0)


def test_the_users_metric_of_that_name_wins(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    store.commit(1, steps(1, 10))
    assert RunStore(run).metric_names() == ["train/loss"]
    logged = [(0, 100 + s, "train/loss", s, 0, 5.0, -1.0) for s in (2, 4)]
    store.commit(1, Batch(samples=[*logged, (0, 200, "val/acc", 4, 0, 5.0, 0.5)]))
    store.close()
    with RunStore(run) as history:
        assert history.metric_names() == ["train/loss", "val/acc"]
        assert [row.value for row in history.export(["train/loss"])] == [-1.0, -1.0]
        assert list(history.curve("step/loss").mean) == list(range(1, 11))
        assert len(history.curve("no/such/metric")) == 0


def test_a_loss_that_is_not_a_number_is_a_gap_and_infinity_is_kept(tmp_path: Path) -> None:
    values = enumerate((1.0, math.nan, math.inf, 2.0))
    run = written(tmp_path, [Batch(steps=[(0, s, step_row(s, v)) for s, v in values])])
    with RunStore(run) as history:
        curve = history.curve("train/loss")
        assert [row.step for row in history.export(["train/loss"])] == [0, 1, 2, 3]
    assert np.isnan(curve.mean[1])
    assert np.isinf(curve.mean[2])


def loss_history(folder: Path, logged: dict[str, list[float]], *, program: str = "") -> RunDir:
    """A history of ten steps with losses, and metrics that are logged at the same steps."""
    hello = Event(1.0, "hello", "", {"program": program or None}, rank=0, seq=0)
    samples: list[Any] = [
        (0, 100 * number + s, name, s, 0, 0.0, value)
        for number, (name, values) in enumerate(logged.items())
        for s, value in enumerate(values)
    ]
    rows: list[Any] = [(0, s, step_row(s, 1 / (s + 1))) for s in range(10)]
    return written(folder, [Batch(steps=rows, samples=samples, events=[hello])])


EQUAL = [1 / (s + 1) for s in range(10)]
MEANS = [2 / (s + 1) for s in range(10)]


@pytest.mark.parametrize(
    ("logged", "names", "exported"),
    [
        ({}, ["train/loss"], []),
        ({"train_loss": EQUAL}, ["train_loss"], []),
        ({"train_loss": [math.nan, *EQUAL[1:]]}, ["train_loss"], []),
        ({"train_loss": [EQUAL[0]]}, ["train_loss"], []),
        ({"train_loss": MEANS}, ["train/loss", "train_loss"], []),
        ({"loss_step": EQUAL, "loss_epoch": MEANS}, ["loss_epoch", "loss_step"], []),
        ({"val/loss": EQUAL}, ["train/loss", "val/loss"], []),
        ({"train/loss": EQUAL}, ["train/loss"], []),
        ({"train/loss": MEANS}, ["train/loss"], ["step/loss"]),
        ({"train/loss": EQUAL, "mean_loss": [math.nan]}, ["mean_loss", "train/loss"], []),
        ({"mean_loss": [math.nan]}, ["mean_loss", "train/loss"], []),
    ],
    ids=[
        *("none", "equal", "NaN", "first", "means", "both", "validation", "same name", "other"),
        *("logged beside a NaN", "measured beside a NaN"),
    ],
)
def test_the_loss_of_each_step_is_not_named_beside_a_logged_loss_of_the_same_value(
    tmp_path: Path, logged: dict[str, list[float]], names: list[str], exported: list[str]
) -> None:
    with RunStore(loss_history(tmp_path, logged)) as store:
        assert store.metric_names() == names
        assert store.exported_names() == [*names, *exported]
        # Who asks for it by its name still gets it.
        assert len(store.curve("train/loss")) == 10


@pytest.mark.parametrize(("program", "hidden"), [("", True), ("PyTorch", False)])
def test_what_a_gpu_sends_is_compared_too_but_a_program_may_log_both(
    tmp_path: Path, program: str, hidden: bool
) -> None:
    run = loss_history(tmp_path, {"train/loss": EQUAL, "train_loss": EQUAL}, program=program)
    with closing(sqlite3.connect(run.db_path)) as db, db:
        db.execute("UPDATE steps SET loss = NULL")
    with RunStore(run) as store:
        assert store.metric_names() == [*([] if hidden else ["train/loss"]), "train_loss"]


def test_every_value_of_a_step_has_a_column() -> None:
    """Whoever reads the newest step of a rank takes its place as a ``StepField``."""
    assert len(STEP_COLUMNS) == len(StepField)
