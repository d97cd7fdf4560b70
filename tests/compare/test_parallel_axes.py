"""Settings and metrics as parallel coordinates: places, kinds of axes, missing values."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.app.compare.comparison import Comparison
from ltui.app.compare.comparison_charts import (
    MISSING_SHARE,
    ViewSettings,
    parallel_view,
    scaled_axis,
)
from ltui.app.compare.comparison_report import comparison_json
from ltui.app.compare.read_run import read_runs
from ltui.app.presentation.run_configuration import number_of
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.store.run_directory import RunDir
from tests.compare.stored_runs import config, losses, write_run

RUN_IDS = st.text("abcdef", min_size=1, max_size=3)
NUMBERS = st.one_of(st.floats(width=64), st.integers(-9, 9).map(float))


@given(st.dictionaries(RUN_IDS, st.one_of(NUMBERS, st.none()), min_size=1))
def test_numbers_keep_their_order_and_missing_ones_are_below(
    values: dict[str, float | None],
) -> None:
    axis, places = scaled_axis("lr", values)
    known = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
    assert set(places) == set(values)
    assert all(0 <= place <= 1 for place in places.values())
    assert all(0 <= place <= 1 for place, _ in axis.ticks)
    ordered = sorted(known, key=lambda run_id: known[run_id])
    assert all(places[a] <= places[b] for a, b in pairwise(ordered))
    if len(known) < len(values):
        assert {places[run_id] for run_id in values.keys() - known.keys()} == {0.0}
        assert all(places[run_id] >= MISSING_SHARE for run_id in known)
        assert (0.0, "n/a") in axis.ticks
    if known and max(known.values()) / 2 - min(known.values()) / 2 > 0:
        assert places[ordered[-1]] == pytest.approx(1)


@given(st.dictionaries(RUN_IDS, st.sampled_from(["adam", "sgd", "true", "1e-3", "\x1b[31m", ""])))
def test_each_text_has_its_own_place_and_label(values: dict[str, str]) -> None:
    axis, places = scaled_axis("optimizer", values)
    of_text: dict[object, set[float]] = {}
    numeric = all(number_of(text) is not None for text in values.values())
    for run_id, text in values.items():
        of_text.setdefault(number_of(text) if numeric else text, set()).add(places[run_id])
    assert all(len(one) == 1 for one in of_text.values())
    assert len({place for one in of_text.values() for place in one}) == len(of_text)
    assert not any("\x1b" in label for _, label in axis.ticks)


@pytest.mark.parametrize(
    ("texts", "logarithmic"),
    [
        (["0.1", "0.01", "0.001"], True),
        (["32", "64", "128", "256", "512"], True),
        (["1", "2", "3", "4", "5", "6", "7", "8", "9", "10"], False),
        (["0.0", "0.001", "0.1"], False),
        (["0.1", "0.3"], False),
        (["1e-3", "1"], False),
    ],
)
def test_an_axis_is_logarithmic_if_that_spreads_the_values_more_evenly(
    texts: list[str], logarithmic: bool
) -> None:
    values: dict[str, float | str | None] = {str(n): text for n, text in enumerate(texts)}
    axis, places = scaled_axis("lr", values)
    assert axis.title == ("log lr" if logarithmic else "lr")
    if len(texts) < 8:
        # As many labels as values, written as in the configuration, each at its place.
        assert {label: place for place, label in axis.ticks} == {
            str(values[run_id]): place for run_id, place in places.items()
        }


def _sweep(home: Path) -> list[RunDir]:
    runs = []
    for number, (lr, optimizer) in enumerate([(0.1, "adam"), (0.01, "sgd"), (0.001, "adam")]):
        configuration = config(lr=lr, seed=number)
        configuration["model"]["init_args"]["optimizer"] = optimizer
        values = losses(200, lr=lr, seed=number)
        metrics = {"val/acc": {100: 0.5 + lr, 200: math.nan if number == 1 else 0.4}}
        name = ("brave", "calm", "deep")[number]
        run_id = f"{name}-owl-000{number}"
        runs.append(write_run(home, run_id, values, configuration=configuration, metrics=metrics))
    # A run that ended before it logged anything.
    runs.append(write_run(home, "empty-owl-0003", [], configuration=config(lr=0.1, seed=3)))
    return runs


def _compared(run_dirs: list[RunDir]) -> Comparison:
    read = read_runs(run_dirs, (), current_snapshot)
    assert not read.problems
    return Comparison(runs=read.runs, metrics=read.metrics)


def test_a_run_without_metrics_and_a_logged_nan_are_at_the_foot(tmp_path: Path) -> None:
    comparison = _compared(_sweep(tmp_path))
    # The seed comes last, because it says little.
    assert comparison.parameters == ["model.lr", "model.optimizer", "seed_everything"]
    best = parallel_view(comparison, ViewSettings(metric="val/acc"))
    assert [axis.title for axis in best.axes] == [
        "log lr",
        "optimizer",
        "seed_everything",
        "best val/acc",
    ]
    metric = {line.key: line.places[-1] for line in best.lines}
    assert metric["empty-owl-0003"] == 0.0
    assert metric["brave-owl-0000"] == 1.0
    assert metric["calm-owl-0001"] > metric["deep-owl-0002"] >= MISSING_SHARE
    assert {line.places[1] for line in best.lines if line.key.startswith("empty")} == {0.0}
    final = parallel_view(comparison, ViewSettings(metric="val/acc", value="final"))
    assert final.axes[-1].title == "final val/acc"
    assert {line.key: line.places[-1] for line in final.lines}["calm-owl-0001"] == 0.0
    hidden = parallel_view(comparison, ViewSettings(hidden=frozenset({"calm-owl-0001"})))
    assert [line.key[:4] for line in hidden.lines] == ["brav", "deep", "empt"]


def test_runs_with_the_same_settings_have_no_axes(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, name, [1.0], configuration=config(lr=0.1, seed=1))
        for name in ("brave-owl-0001", "calm-owl-0002")
    ]
    view_model = parallel_view(_compared(runs), ViewSettings())
    assert (view_model.axes, view_model.note) == ((), "no setting differs")


def test_the_rows_of_the_document_have_numbers_as_numbers(tmp_path: Path) -> None:
    rows = comparison_json(_compared(_sweep(tmp_path)))["parameters"]
    assert [row["settings"] for row in rows][1:] == [
        {"model.lr": 0.01, "model.optimizer": "sgd", "seed_everything": 1},
        {"model.lr": 0.001, "model.optimizer": "adam", "seed_everything": 2},
        {"model.lr": 0.1, "model.optimizer": None, "seed_everything": 3},
    ]
    assert rows[1]["final"]["val/acc"] == "NaN"
    assert rows[1]["best"]["val/acc"] == 0.51
    assert rows[3]["final"] == {}
