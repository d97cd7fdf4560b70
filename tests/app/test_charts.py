"""Charts from frames: which curves, on which axis, how smooth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import STEP_SECONDS, default_choice
from ltui.app.live.frame import Frame, MarkKind, RunMark
from ltui.app.presentation.chart_axis import AXES, EPOCH_SIGN, Axis, marks_legend
from ltui.app.presentation.metric_charts import (
    ChartSettings,
    data_wait_text,
    falls_over_decades,
    metric_charts,
    metrics_subtitle,
    step_phases_text,
    throughput_chart,
)
from ltui.app.presentation.metric_names import matching, preference_key
from ltui.app.presentation.metric_pages import MetricPages
from ltui.app.presentation.run_report import show_lines
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import RankState, RunState, Throughput, Verdict
from ltui.widgets.charts.annotations import value_text
from ltui.widgets.view_models import ChartViewModel, LogLine
from tests.app.frames import NOW, curve, frame, rank, snapshot
from tests.required import required


def names_of(chart: ChartViewModel) -> list[str]:
    return [series.name for series in chart.series]


def first(shown: Frame | None = None, **settings: Any) -> ChartViewModel:
    """Return the first chart of a frame, with these settings."""
    return metric_charts(shown or frame(), ChartSettings(**settings))[0]


def rates(**changes: Any) -> ChartViewModel:
    """Return the chart of the throughput of a frame."""
    return throughput_chart(frame(**changes), ChartSettings())


def test_loss_has_raw_smoothed_and_validation() -> None:
    view_model = first()
    assert names_of(view_model) == ["train/loss raw", "train/loss smoothed", "val_loss"]
    assert [s.dim for s in view_model.series] == [True, False, False]
    assert view_model.note is None
    # Without smoothing there is one training curve.
    assert names_of(first(smoothing=0.0)) == ["train/loss", "val_loss"]
    assert "raw" in metrics_subtitle(frame(), ChartSettings(smoothing=0.0))


def test_axis_by_epoch_is_fractional_and_by_time_in_seconds_since_the_run_was_created() -> None:
    x = first(axis="epoch").series[0].x
    assert x[0] == pytest.approx(0.01)
    assert x[-1] == pytest.approx(4.0)
    assert np.all(np.diff(x) > 0)
    by_time = first(axis="time")
    assert by_time.x_time
    assert by_time.series[0].x[0] == pytest.approx(0.1, abs=1e-3)


def test_axes_cycle_and_smoothing_stays_in_its_bounds() -> None:
    settings = ChartSettings()
    seen = [settings.axis]
    for _ in AXES:
        settings = ChartSettings(axis=settings.next_axis())
        seen.append(settings.axis)
    assert seen == [*AXES, "step"]
    assert ChartSettings(smoothing=0.0).next_smoothing(-1) == 0.0
    assert ChartSettings(smoothing=0.995).next_smoothing(1) == 0.995
    assert ChartSettings(smoothing=0.9).next_smoothing(1) > 0.9


def test_nothing_to_draw_says_why() -> None:
    empty = frame(curves={}, rates={})
    assert first(empty).note == "no training step yet, 1 m 00 s after the start"
    silent = snapshot(ranks=(rank(0, state=RankState.RUNNING, phase=None, global_step=None),))
    foreign = frame(curves={}, rates={}, snapshot=silent)
    for view_model in (first(foreign), throughput_chart(foreign, ChartSettings())):
        assert view_model.note == "no steps seen, 1 m 00 s after the start"
    assert first(replace(empty, last_record_at=NOW - 60)).note == "no data for 1 m 00 s"
    over = rates(curves={}, rates={}, snapshot=snapshot(state=RunState.FAILED))
    assert over.note == "nothing was recorded"


def test_a_program_of_which_only_the_steps_are_known_shows_steps_per_second() -> None:
    run = snapshot(
        program="PyTorch", metrics={}, throughput=Throughput(steps_per_s=4.0, samples_per_s=None)
    )
    seconds = curve(np.full(50, 0.25), step_s=0.25)
    shown = frame(snapshot=run, rates={}, curves={STEP_SECONDS: seconds})
    chart = throughput_chart(shown, ChartSettings())
    assert (chart.title, chart.subtitle.replace("\u2009", " ")) == ("steps/s", "4 steps/s")
    assert chart.series[0].y.tolist() == pytest.approx([4.0] * 50)
    known = replace(shown, last_steps={0: [32.0] * len(StepField)})
    assert throughput_chart(known, ChartSettings()).title == "throughput, samples/s"


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("step 220 loss 0.5155", "It prints loss 0.5155: ltui exec --metrics-pattern pairs -- ..."),
        ('{"val_acc": 0.9}', "It prints val_acc 0.9: ltui exec --metrics-pattern json -- ..."),
        ("epoch 3 of 9", "ltui_rank.log(loss=loss) in the program shows its values."),
    ],
)
def test_a_program_without_metrics_is_told_how_its_log_can_be_read(line: str, note: str) -> None:
    run = snapshot(program="PyTorch DDP", metrics={}, state=RunState.FINISHED)
    log = (LogLine(rank=0, text="begins"), *[LogLine(rank=0, text=line)] * 3)
    shown = frame(snapshot=run, curves={}, curve_names=(), log=log)
    (chart,) = metric_charts(shown, ChartSettings())
    assert str(chart.note).startswith(f"ltui sees no metrics of this program. {note}")


def test_without_a_choice_the_loss_is_shown_or_what_the_script_improves() -> None:
    for names, chosen in (
        (
            ["train/loss", "train_loss", "val_loss", "val_acc", "step/lr"],
            ("train/loss", "val_loss"),
        ),
        (["train_loss", "train_loss_epoch", "val_loss"], ("train_loss", "val_loss")),
        (["train/loss", "reward", "kl", "entropy", "reward_model_loss"], ("reward",)),
        (["train_acc", "val_acc", "lr"], ("train_acc", "val_acc")),
        (["foo", "step/lr"], ("foo",)),
        ([], ()),
    ):
        assert default_choice(names) == chosen


def test_chosen_metrics_get_a_chart_for_each_quantity() -> None:
    curves = {
        "train/loss": curve(np.linspace(2, 1, 50)),
        "val/loss": curve([2.0, 1.0]),
        "step/lr": curve(np.full(50, 1e-3)),
    }
    chosen = ChartSettings(metrics=("step/lr", "train/loss", "val/loss", "gone"))
    view_models = metric_charts(frame(curves=curves, curve_names=tuple(curves)), chosen)
    assert [view_model.title for view_model in view_models] == ["step/lr", "loss"]
    # What is set, and what is a mean already, is not smoothed.
    assert names_of(view_models[0]) == ["step/lr"]
    assert names_of(view_models[1]) == ["train/loss raw", "train/loss smoothed", "val/loss"]
    assert len({s.colour for view_model in view_models for s in view_model.series}) == 3
    assert "smoothing 0.9" in metrics_subtitle(frame(curves=curves), chosen)


def test_charts_side_by_side_have_the_same_axis() -> None:
    shown = frame(rates={None: curve(np.full(50, 1e4), first=17)})
    for kind in AXES:
        settings = ChartSettings(axis=kind)
        axes = [*metric_charts(shown, settings), throughput_chart(shown, settings)]
        assert len({(chart.x_ends) for chart in axes}) == 1
    assert throughput_chart(shown, ChartSettings()).x_ends == (1.0, 400.0)


def test_a_part_of_any_axis_is_a_part_of_the_steps() -> None:
    shown = frame()
    assert Axis("step", shown).steps_between(9.5, 20.2) == (9, 21)
    by_epoch = required(Axis("epoch", shown).steps_between(1.0, 2.0))
    assert by_epoch[0] in (99, 100)
    assert by_epoch[1] in (200, 201)
    assert Axis("time", frame(curves={})).steps_between(0, 1) is None


def test_names_are_filtered_by_part_or_pattern_and_choices_kept_by_preset_or_script() -> None:
    names = ("train/loss", "val/loss", "val/acc")
    assert matching(names, "VAL") == ("val/loss", "val/acc")
    assert matching(names, "*/loss") == ("train/loss", "val/loss")
    assert matching(names, "") == names
    assert matching(names, "/^val/") == ("val/loss", "val/acc")
    assert matching(names, "/LOSS$") == ("train/loss", "val/loss")
    assert preference_key("quickstart", None) == "quickstart"
    assert preference_key(None, ("python", "-u", "train.py", "--lr", "1")) == "train.py"
    assert preference_key(None, ("./go",)) == "./go"
    assert preference_key(None, None) == ""


def test_ranks_get_lines_only_where_they_differ() -> None:
    total = curve(np.full(30, 200.0))
    alike = {None: total, 0: curve(np.full(30, 100.0)), 1: curve(np.full(30, 101.0))}
    assert names_of(rates(rates=alike)) == ["total"]
    differ = {**alike, 1: curve(np.full(30, 60.0))}
    assert names_of(rates(rates=differ)) == ["r0", "r1", "total"]


def test_figures_of_throughput() -> None:
    subtitle = rates().subtitle.replace("\u2009", " ")
    assert subtitle == "31.4 k samples/s · best 32.0 k"
    unknown = rates(snapshot=snapshot(throughput=Throughput()), rates={})
    assert unknown.subtitle == "n/a"
    shares = "data 4 · forward 31 · backward 58 · optimizer 7 %"
    assert step_phases_text(frame()) == f"step time: {shares}"
    parts = Throughput(fetch_share=0.02, forward_share=0.22, backward_share=0.55)
    text = step_phases_text(frame(snapshot=snapshot(throughput=parts)))
    assert text == "step time: data 2 · forward 22 · backward 55 · other 21 %"
    alone = frame(snapshot=snapshot(throughput=Throughput(optimizer_share=0.003)))
    assert step_phases_text(alone) == "step time: optimizer 0 · other 100 %"


def test_a_run_at_rest_has_no_rate_but_says_why() -> None:
    stall = Verdict(kind="stall", level="stalled", culprits=(2,), cause="rank 2 waits")
    for run, word in (
        (snapshot(state=RunState.PAUSED), "paused"),
        (snapshot(verdicts=(stall,)), "stalled"),
    ):
        assert rates(snapshot=run).subtitle.replace("\u2009", " ") == f"{word} · best 32.0 k"


def test_every_place_shows_one_best_throughput_in_one_form() -> None:
    # The chart and the supervisor measure at other moments; what is stored counts.
    stored = snapshot(state=RunState.FINISHED, throughput=Throughput(best_samples_per_s=843.4))
    chart = rates(snapshot=stored, rates={None: curve([840.0, 845.2, 839.5])})
    assert chart.subtitle == "best 843"
    assert value_text(chart.series[-1], None, chart.is_rate) == "840"
    assert "best 843 samples/s" in "\n".join(show_lines(stored, NOW))


def test_much_waiting_for_data_says_what_to_do() -> None:
    assert data_wait_text(frame()) == ""
    slow = snapshot(throughput=Throughput(data_wait_share=0.42))
    assert "workers" in data_wait_text(frame(snapshot=slow))
    assert data_wait_text(frame(snapshot=snapshot(throughput=Throughput()))) == ""


def test_samples_count_for_all_ranks_of_each_attempt() -> None:
    samples = curve(np.full(100, 32.0))
    resumed = frame(
        curves={"step/samples": samples, "train/loss": curve(np.ones(100))},
        attempt_ranks=((0, 2), (60, 4)),
    )
    axis = Axis("samples", resumed)
    assert axis.ends == (64.0, 60 * 64.0 + 40 * 128.0)
    assert axis.positions(resumed.curves["train/loss"])[59] == 60 * 64.0


def test_marks_are_placed_on_every_axis_by_step_or_by_time() -> None:
    marks = (
        RunMark(MarkKind.ATTEMPT, "attempt 2 from step 200", 200, NOW + 500),
        RunMark(MarkKind.STALL, "stalled for 8 s", None, NOW - 60 + 12.0),
        RunMark(MarkKind.CHECKPOINT, "checkpoint of step 50", 50, None),
    )
    run = frame(curves={"train/loss": curve(np.ones(300))}, rates={}, marks=marks)
    by_step = {mark.sign: mark.at for mark in Axis("step", run).marks if mark.sign != EPOCH_SIGN}
    assert by_step == {"◆": 50.0, "!": pytest.approx(120.0), "»": 200.0}
    # Checkpoints are many, so only the others have a line over the whole height.
    assert {mark.sign for mark in Axis("step", run).marks if mark.line} == {"!", "»"}
    legend = marks_legend([mark for mark in Axis("step", run).marks if mark.sign != EPOCH_SIGN])
    assert sorted(legend.split("  ")) == ["! stall", "» attempt", "◆ checkpoint"]
    by_time = {mark.sign: mark.at for mark in Axis("time", run).marks if mark.sign != EPOCH_SIGN}
    assert by_time == {"◆": pytest.approx(5.0), "!": pytest.approx(12.0), "»": 560.0}
    epochs = [mark for mark in Axis("step", run).marks if mark.sign == EPOCH_SIGN]
    assert [(mark.at, mark.text) for mark in epochs] == [
        (101.0, "epoch 2 begins"),
        (201.0, "epoch 3 begins"),
    ]


def test_only_a_positive_curve_that_falls_over_decades_chooses_a_logarithmic_axis() -> None:
    falling = 10.0 ** np.linspace(0, -4, 200)
    assert falls_over_decades([curve(falling)])
    assert not falls_over_decades([curve(falling), curve(np.array([1.0, 0.0, 1.0]))])
    assert not falls_over_decades([curve(falling[::-1])])
    assert not falls_over_decades([curve(np.linspace(2.0, 0.5, 200))])
    assert not falls_over_decades([curve(np.full(200, np.nan))])


def test_a_wrong_expression_names_its_place() -> None:
    with pytest.raises(ValueError, match=r"wrong at character 5: unterminated character set"):
        matching(("val/loss",), "/val[a-/")


def test_the_metrics_that_matter_come_first_on_the_pages() -> None:
    names = (
        "layer_1/activation", "step/lr", "lr", "train/loss", "val_loss",
        "throughput/samples_per_s",
    )  # fmt: skip
    ordered = MetricPages().ordered(names, {})
    assert ordered[:3] == ("val_loss", "train/loss", "layer_1/activation")
    assert ordered.index("lr") < ordered.index("step/lr")
    assert MetricPages(order="name").ordered(names, {}) == tuple(sorted(names))
