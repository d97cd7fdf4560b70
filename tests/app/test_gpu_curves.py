"""Readings of GPUs as curves over the steps, from a real store and from new snapshots."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.run_curves import (
    GPU_POINTS,
    GpuCurves,
    RunCurves,
    gpu_curve_names,
    is_gpu_curve,
    stored_curve,
)
from ltui.training.state.run_snapshot import NODE_GPU_STRIDE
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.app.frames import gpu
from tests.store.histories import StepRow, begin, run_dir, snapshot, step_row

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
