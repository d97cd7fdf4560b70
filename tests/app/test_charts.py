"""Charts from frames: which curves, on which axis, how smooth."""

from __future__ import annotations

import numpy as np
import pytest
from frames import NOW, curve, frame, snapshot

from ltui.app.charts import (
    AXES,
    ChartSettings,
    loss_chart,
    phases_line,
    throughput_chart,
    train_metric,
    waiting_line,
)
from ltui.training.run.snapshot import RunState, Throughput


def test_loss_has_raw_smoothed_and_validation() -> None:
    shape = loss_chart(frame(), ChartSettings())
    assert [s.name for s in shape.series] == ["train/loss raw", "train/loss smoothed", "val_loss"]
    assert [s.dim for s in shape.series] == [True, False, False]
    assert shape.note is None


def test_without_smoothing_there_is_one_training_curve() -> None:
    shape = loss_chart(frame(), ChartSettings(smoothing=0.0))
    assert [s.name for s in shape.series] == ["train/loss", "val_loss"]
    assert "raw" in shape.subtitle


def test_axis_by_epoch_is_fractional_and_by_time_in_seconds_since_the_run_was_created() -> None:
    by_epoch = loss_chart(frame(), ChartSettings(axis="epoch"))
    x = by_epoch.series[0].x
    assert x[0] == pytest.approx(0.01)
    assert x[-1] == pytest.approx(4.0)
    assert np.all(np.diff(x) > 0)
    by_time = loss_chart(frame(), ChartSettings(axis="time"))
    assert by_time.x_time
    assert by_time.series[0].x[0] == pytest.approx(0.1, abs=1e-3)


def test_axes_cycle_and_smoothing_stays_in_its_bounds() -> None:
    settings = ChartSettings()
    seen = [settings.axis]
    for _ in AXES:
        settings = ChartSettings(axis=settings.next_axis())
        seen.append(settings.axis)
    assert seen == [*AXES, AXES[0]]
    assert ChartSettings(smoothing=0.0).smoother(-1) == 0.0
    assert ChartSettings(smoothing=0.995).smoother(1) == 0.995
    assert ChartSettings(smoothing=0.9).smoother(1) > 0.9


def test_nothing_to_draw_says_why() -> None:
    empty = frame(curves={}, rates={})
    note = loss_chart(empty, ChartSettings()).note
    assert note == "no training step yet, 1 m 00 s after the start"
    quiet = frame(curves={}, rates={}, last_record_at=NOW - 60)
    assert loss_chart(quiet, ChartSettings()).note == "no data for 1 m 00 s"
    over = frame(curves={}, rates={}, snapshot=snapshot(state=RunState.FAILED))
    assert throughput_chart(over, ChartSettings()).note == "nothing was recorded"


def test_the_loss_of_every_step_wins_over_a_logged_one() -> None:
    curves = {"train/loss": curve([1.0]), "train_loss": curve([2.0])}
    assert train_metric(curves) == "train/loss"
    assert train_metric({"train_loss": curve([2.0]), "val_loss": curve([1.0])}) == "train_loss"
    assert train_metric({"val_acc": curve([1.0])}) is None


def test_ranks_get_lines_only_where_they_differ() -> None:
    total = curve(np.full(30, 200.0))
    alike = {None: total, 0: curve(np.full(30, 100.0)), 1: curve(np.full(30, 101.0))}
    assert [s.name for s in throughput_chart(frame(rates=alike), ChartSettings()).series] == [
        "total"
    ]
    differ = {**alike, 1: curve(np.full(30, 60.0))}
    names = [s.name for s in throughput_chart(frame(rates=differ), ChartSettings()).series]
    assert names == ["r0", "r1", "total"]


def test_figures_of_throughput() -> None:
    subtitle = throughput_chart(frame(), ChartSettings()).subtitle.replace("\u2009", " ")
    assert subtitle == "31.4 k samples/s · best 32.0 k"
    unknown = frame(snapshot=snapshot(throughput=Throughput()), rates={})
    assert throughput_chart(unknown, ChartSettings()).subtitle == "n/a"
    assert phases_line(frame()) == "fetch 4 % · forward 31 % · backward 58 % · optimizer 7 %"


def test_the_best_throughput_is_never_below_what_the_chart_shows() -> None:
    higher = {None: curve([30_000.0, 35_000.0, 30_000.0])}
    subtitle = throughput_chart(frame(rates=higher), ChartSettings()).subtitle
    assert subtitle.replace("\u2009", " ").endswith("best 35.0 k")


def test_much_waiting_for_data_says_what_to_do() -> None:
    assert waiting_line(frame()) == "waiting for data 4 %"
    slow = snapshot(throughput=Throughput(data_wait_share=0.42))
    assert "workers" in waiting_line(frame(snapshot=slow))
    assert waiting_line(frame(snapshot=snapshot(throughput=Throughput()))) == "waiting for data n/a"
