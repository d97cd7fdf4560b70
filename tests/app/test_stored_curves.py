"""Curves, readings of GPUs and marks of a run, from a real store and from new snapshots, and the
arithmetic on curves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ltui.app.live import run_curves
from ltui.app.live.curve_arithmetic import (
    CurveRequest,
    LatestCurveRequest,
    concatenate,
    empty_curve,
    epoch_positions,
    select_points,
    smooth,
    splice,
)
from ltui.app.live.frame import MarkKind, RunMark, checkpoint_marks, stored_marks
from ltui.app.live.run_curves import (
    GPU_POINTS,
    GpuCurves,
    RunCurves,
    gpu_curve_names,
    is_gpu_curve,
    stored_curve,
    stored_segment,
)
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import NODE_GPU_STRIDE, CheckpointInfo, MetricValue, Verdict
from ltui.training.store.curve_reader import Curve, merge_points
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Cursor, Sample, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.app.frames import curve, gpu
from tests.store.histories import StepRow, begin, run_dir, snapshot, step_row, steps


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_dir(tmp_path)


@pytest.fixture
def store(run: RunDir) -> Iterator[StoreWriter]:
    """The writer of the history of ``run``, whose first attempt has begun."""
    writer = StoreWriter(run.db_path)
    begin(writer)
    yield writer
    writer.close()


def test_a_curve_of_any_length_is_that_of_its_values_and_its_parts_have_every_detail(
    run: RunDir, store: StoreWriter
) -> None:
    losses = 2.0 + np.random.default_rng(5).normal(0, 0.5, 30_000)
    for first in range(0, 30_000, 5000):
        rows: list[StepRow] = []
        for step in range(first, first + 5000):
            row = step_row(step + 1, losses[step], 100.0 + step)
            row[StepField.FORWARD_S] = (step + 1) / 1000
            rows.append((0, step + 1, row))
        store.commit(1, Batch(steps=rows))
    with RunStore(run) as history:
        loaded = stored_curve(history, "train/loss")
        part = stored_segment(history, "train/loss", (4000, 4999))
        # What each step records without windows is a curve too.
        forward = stored_curve(history, "step/forward_seconds")
        forward_part = stored_segment(history, "step/forward_seconds", (10, 19))
        assert len(stored_curve(history, "step/memory_bytes").mean) > 0
    steps = np.arange(1.0, 30_001.0)
    whole = Curve(steps, steps, steps, losses, losses, losses, np.ones(30_000))
    assert len(loaded) < 6000
    for weight in (0.6, 0.9, 0.99, 0.995):
        assert smooth(loaded, weight)[-1] == pytest.approx(smooth(whole, weight)[-1], rel=1e-4)
    assert part.steps.tolist() == list(range(4000, 5000))
    assert np.array_equal(part.mean, losses[3999:4999])
    assert forward.mean == pytest.approx(forward.steps / 1000)
    assert forward.count.sum() > 29_000
    assert forward_part.steps.tolist() == list(range(10, 20))


def watched(run: RunDir, attempt: int = 1, **metrics: int) -> tuple[RunCurves, Callable[[], Curve]]:
    """Return curves, and a function that reads them again and returns the loss."""
    curves = RunCurves(LatestCurveRequest())
    values = {name: MetricValue(last=0.0, step=step) for name, step in metrics.items()}
    curves.use_snapshot(snapshot(attempt=attempt, metrics={**values}))
    clock = itertools.count(0, 10)

    def read() -> Curve:
        with RunStore(run) as store:
            curves.read(store, next(clock))
        return curves.requested()[next(iter(metrics), "train/loss")]

    return curves, read


def test_new_points_follow_without_another_read_of_the_whole(
    run: RunDir, store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_restarted_rank_and_a_new_attempt_replace_the_steps_that_they_repeat(
    run: RunDir, store: StoreWriter
) -> None:
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


def test_a_metric_whose_steps_go_back_is_read_completely(run: RunDir, store: StoreWriter) -> None:
    def log(seq: int, *logged: int) -> None:
        rows = [(0, seq + n, "loss", step, 0, 1.0, float(seq + n)) for n, step in enumerate(logged)]
        store.commit(1, Batch(samples=[*rows], cursors={0: Cursor(seq + len(logged))}))

    log(1, 1, 2, 3)
    _, read = watched(run, loss=2)
    read()
    log(4, 1, 2)
    assert sorted(read().steps.tolist()) == [1, 1, 2, 2, 3]


def test_a_logged_loss_replaces_that_of_the_steps(run: RunDir, store: StoreWriter) -> None:
    """On a GPU the loss is sent once it has been copied; the row of its step says NaN."""
    rows: list[StepRow] = [(0, step, step_row(step)) for step in (1, 2, 3)]
    store.commit(1, Batch(steps=rows, cursors={0: Cursor(4)}))
    _, read = watched(run, **{"train/loss": 3})
    assert np.isnan(read().mean).all()
    samples: list[Sample] = [(0, 4, "train/loss", 2, None, 1.0, 0.5)]
    store.commit(1, Batch(samples=samples, cursors={0: Cursor(5)}))
    loss = read()
    assert (loss.steps.tolist(), loss.mean.tolist()) == ([2], [0.5])
    assert np.isnan(loss.epochs).all(), "a program without a Trainer has no epochs"


def test_a_long_curve_is_read_again_when_it_has_grown_by_many_points(
    run: RunDir, store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_curves, "MAX_POINTS", 3000)
    _, read = watched(run, **{"train/loss": 1})
    for first in range(1, 6001, 500):
        store.commit(1, steps(first, first + 499))
        loss = read()
    assert len(loss) < 5000
    assert loss.steps[-1] == 6000
    assert (np.diff(loss.steps) > 0).all()


POWER, MEMORY = "gpu/0/power_w", "gpu/0/memory_gib"


def store_readings(folder: Path, *, readings: int = 10) -> RunDir:
    """Write 100 steps, one a second, and readings that begin between steps 9 and 10."""
    run = run_dir(folder)
    writer = StoreWriter(run.db_path)
    begin(writer)
    steps: list[StepRow] = [(0, step, step_row(step, 1.0, 1000.0 + step)) for step in range(1, 101)]
    writer.commit(1, Batch(steps=steps))
    for number in range(readings):
        at = 1009.5 + number * 80 / readings
        writer.commit(1, Batch(gpus=[gpu(0, sampled_at=at, power_w=600.0 + number)]))
    writer.close()
    return run


def loaded(run: RunDir, *names: str) -> GpuCurves:
    curves = GpuCurves()
    with RunStore(run) as store:
        curves.read(store, names, stored_curve(store, "step/seconds"))
    return curves


def test_stored_readings_lie_at_the_steps_of_their_times(tmp_path: Path) -> None:
    curves = loaded(store_readings(tmp_path), POWER, MEMORY).curves()
    assert curves[POWER].steps.tolist() == [9.5 + 8 * n for n in range(10)]
    assert curves[POWER].mean.tolist() == [600.0 + n for n in range(10)]
    assert curves[POWER].times[0] == 1009.5
    assert set(curves[MEMORY].mean) == {61.0}


def test_many_readings_are_merged_and_none_is_lost(tmp_path: Path) -> None:
    curve = loaded(store_readings(tmp_path, readings=2 * GPU_POINTS), POWER).curves()[POWER]
    assert len(curve) == GPU_POINTS
    assert curve.count.sum() == 2 * GPU_POINTS
    assert (curve.low.min(), curve.high.max()) == (600.0, 600.0 + 2 * GPU_POINTS - 1)
    assert (np.diff(curve.steps) >= 0).all()


def test_new_readings_follow_once_each_and_missing_ones_leave_no_point(tmp_path: Path) -> None:
    curves = loaded(store_readings(tmp_path), POWER, MEMORY)
    version = curves.version
    fresh = gpu(0, sampled_at=2000.0, power_w=None)
    curves.add([gpu(0, sampled_at=1999.0, power_w=700.0), fresh], 101, 0)
    curves.add([fresh, gpu(0, sampled_at=2001.0, error="lost")], 102, 0)
    assert curves.version > version
    assert curves.curves()[POWER].mean[-2:].tolist() == [609.0, 700.0]
    assert curves.curves()[MEMORY].times[-3:].tolist()[1:] == [1999.0, 2000.0]


def test_a_curve_that_nobody_requested_collects_nothing(tmp_path: Path) -> None:
    curves = loaded(store_readings(tmp_path), POWER)
    curves.add([gpu(0, sampled_at=2000.0), gpu(1, sampled_at=2000.0)], 101, 0)
    assert curves.curves().keys() == {POWER}
    curves.forget([POWER])
    assert curves.curves() == {}


def test_a_gpu_without_readings_or_a_run_without_steps_has_an_empty_curve(tmp_path: Path) -> None:
    run = store_readings(tmp_path)
    assert len(loaded(run, "gpu/7/power_w").curves()["gpu/7/power_w"]) == 0
    curves = GpuCurves()
    with RunStore(run) as store:
        curves.read(store, [POWER, "no gpu"], stored_curve(store, "never/logged"))
    assert len(curves.curves()[POWER]) == 0
    assert "no gpu" not in curves.curves()


def test_gpus_of_other_machines_have_names_of_their_own() -> None:
    names = gpu_curve_names([gpu(0), gpu(0, node=1)])
    assert POWER in names
    assert f"gpu/{NODE_GPU_STRIDE}/power_w" in names
    assert len(names) == len(set(names)) == 8
    assert all(map(is_gpu_curve, names))
    assert not any(map(is_gpu_curve, ("gpu/0/loss", "gpu/x/power_w", "val/gpu/0/power_w")))


def test_a_screen_gets_the_curve_of_a_gpu_like_any_metric(tmp_path: Path) -> None:
    requests = LatestCurveRequest()
    curves = RunCurves(requests)
    now = snapshot(global_step=100, gpus=(gpu(0, sampled_at=5000.0, power_w=650.0),))
    curves.use_snapshot(now)
    with RunStore(store_readings(tmp_path)) as store:
        curves.read(store, 0.0)
        assert POWER in curves.available_names()
        assert POWER not in curves.requested(), "it is no metric of the default choice"
        requests.request = CurveRequest(names=frozenset({POWER}))
        assert not curves.is_complete()
        curves.read(store, 1.0)
    assert curves.is_complete()
    before = curves.requested()[POWER]
    gpus = (gpu(0, sampled_at=6000.0, power_w=651.0),)
    curves.use_snapshot(snapshot(global_step=101, gpus=gpus))
    assert curves.requested()[POWER].mean.tolist() == [*before.mean, 651.0]


def test_attempts_and_changed_settings_are_marks_at_the_step_of_the_resume(
    run: RunDir, store: StoreWriter
) -> None:
    store.begin_attempt(
        2, started_at=50.0, boot_id="b", resumed_path="/c", resumed_step=300,
        changes=["model.lr=1e-4", "data.batch_size=64"],
    )  # fmt: skip
    begin(store, 3)
    with RunStore(run) as history:
        assert stored_marks(history) == [
            RunMark(MarkKind.ATTEMPT, "attempt 2 from step 300", 300, 50.0),
            RunMark(MarkKind.CHANGE, "changed model.lr=1e-4, data.batch_size=64", 300, 50.0),
            RunMark(MarkKind.ATTEMPT, "attempt 3 from the start", 0, 1.0),
        ]


def test_only_verdicts_that_stop_the_run_are_marks_at_their_time(
    run: RunDir, store: StoreWriter
) -> None:
    for verdict in (
        Verdict(kind="a", level="stalled", cause="rank 1 waits", began=10.0, ended=22.4),
        Verdict(kind="b", level="dead", cause="rank 0 was killed", began=30.0),
        Verdict(kind="c", level="slow", cause="rank 1 is slow", began=11.0),
        Verdict(kind="d", level="warning", cause="memory", began=12.0),
        Verdict(kind="e", level="of a later version", cause="?", began=13.0),
        Verdict(kind="f", level="stalled", cause="never began"),
    ):
        store.write_verdict(1, verdict)
    with RunStore(run) as history:
        assert stored_marks(history) == [
            RunMark(MarkKind.STALL, "stalled for 12 s: rank 1 waits", None, 10.0),
            RunMark(MarkKind.STALL, "dead: rank 0 was killed", None, 30.0),
        ]


def test_each_checkpoint_is_a_mark_at_its_step() -> None:
    info = CheckpointInfo(path="/c", global_step=7, epoch=0, ok=True, saved_at=9.0)
    best = CheckpointInfo(path="/d", global_step=9, epoch=0, ok=True, reason="best")
    assert checkpoint_marks([info, best]) == [
        RunMark(MarkKind.CHECKPOINT, "checkpoint of step 7", 7.0, 9.0),
        RunMark(MarkKind.CHECKPOINT, "checkpoint of step 9, best", 9.0, None),
    ]


def test_smoothing_has_no_bias_at_its_start_and_keeps_gaps() -> None:
    values = curve([4.0, 4.0, np.nan, 4.0, np.inf, 4.0])
    found = smooth(values, 0.9)
    assert found[[0, 1, 3, 5]] == pytest.approx([4.0] * 4)
    assert np.isnan(found[[2, 4]]).all()
    assert smooth(values, 0.0) is values.mean


def test_smoothing_lags_behind_a_step_as_its_weight_says() -> None:
    assert smooth(curve([0.0] * 50 + [1.0]), 0.9)[-1] == pytest.approx(0.1, rel=0.02)


def test_a_merged_point_counts_as_many_values_in_the_smoothing() -> None:
    values = curve([0.0] * 64 + [1.0] * 16)
    first, rest = (select_points(values, part) for part in (slice(0, 64), slice(64, None)))
    merged = concatenate([merge_points(first, 16), rest])
    assert len(merged) == 32
    assert smooth(merged, 0.9)[-1] == pytest.approx(smooth(values, 0.9)[-1], rel=1e-6)


@pytest.mark.parametrize("weight", [0.3, 0.9, 0.995])
def test_smoothing_is_that_of_one_value_after_the_other(weight: float) -> None:
    random = np.random.default_rng(0)
    values = np.where(random.random(3000) < 0.1, np.nan, random.normal(5, 1, 3000))
    counts = np.repeat([4096.0, 64.0, 1.0], 1000)
    expected, average, norm = [], 0.0, 0.0
    for value, keep in zip(values, weight**counts, strict=True):
        if np.isfinite(value):
            average = keep * average + (1 - keep) * value
            norm = keep * norm + (1 - keep)
        expected.append(average / norm if np.isfinite(value) else np.nan)
    smoothed = smooth(replace(curve(values), count=counts), weight)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12)


def test_a_part_in_detail_replaces_only_what_is_coarser() -> None:
    coarse = merge_points(curve(np.arange(64.0)), 16)
    fine = select_points(curve(np.arange(64.0)), slice(16, 32))
    found = splice(coarse, fine)
    assert len(found) == 4 + 16 + 8
    assert found.count.sum() == 64
    assert splice(found, select_points(coarse, slice(4, 8))) is found
    assert splice(coarse, empty_curve()) is coarse


def test_places_on_an_axis_of_epochs() -> None:
    reference = curve(np.zeros(30), per_epoch=10)
    places = epoch_positions(np.array([5.0, 10.0, 20.0, 25.0, 30.0]), reference, None)
    assert places.tolist() == pytest.approx([0.5, 1.0, 2.0, 2.5, 3.0])
    one = curve(np.zeros(5), per_epoch=10)
    assert epoch_positions(np.array([5.0]), one, 10.0).tolist() == pytest.approx([0.5])
