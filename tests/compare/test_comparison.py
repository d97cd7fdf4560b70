"""What a comparison finds in runs that were written by the real writer."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.app.compare.alignment import BAND_NAMES
from ltui.app.compare.compared_run import keep_colours, run_colours
from ltui.app.compare.comparison import Comparison, Grouping, groups_of
from ltui.app.compare.comparison_charts import ViewSettings, reference_id
from ltui.app.compare.comparison_report import comparison_json, report_lines
from ltui.app.compare.comparison_tables import EQUAL, settings_table
from ltui.app.compare.read_run import default_metrics, read_runs
from ltui.app.presentation.run_configuration import command_settings, is_seed
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.code_record import CodeRecord, write_record
from ltui.training.store.labels_file import change_labels, read_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart_options import COLOURS, MARKERS, dash_of, sign_of
from tests.compare.stored_runs import EPOCH, accuracies, config, losses, write_run, write_seeds
from tests.required import required

LOSS = "train/loss"


def compared(run_dirs: list[RunDir], *globs: str, grouping: Grouping | None = None) -> Comparison:
    read = read_runs(run_dirs, globs, current_snapshot)
    assert not read.problems
    return Comparison(runs=read.runs, metrics=read.metrics, grouping=grouping or Grouping())


@pytest.mark.parametrize("steps", [40, 3000, 30_000])
def test_final_and_best_are_exact_even_if_the_curve_is_merged(tmp_path: Path, steps: int) -> None:
    values = losses(steps)
    run = write_run(tmp_path, "brave-owl-0001", values, configuration=config(lr=0.1, seed=1))
    other = write_run(tmp_path, "calm-owl-0002", values[:40], configuration={})
    summary = compared([run, other]).runs[0].metrics[LOSS]
    assert summary.direction == "min"
    assert (summary.final.value, summary.final.step) == (values[-1], steps)
    best = required(summary.best)
    assert (best.value, best.step) == (min(values), int(np.argmin(values)) + 1)
    assert best.step_is_exact
    assert required(summary.highest).step == int(np.argmax(values)) + 1


def test_nan_and_infinite_values_are_never_best(tmp_path: Path) -> None:
    values = [0.5, -math.inf, 0.2, math.inf, math.nan]
    metrics = {"val/loss": dict(enumerate(values, start=1)), "late": {5: 1.0}}
    run = write_run(tmp_path, "brave-owl-0001", [1.0] * 5, configuration={}, metrics=metrics)
    other = write_run(tmp_path, "calm-owl-0002", [1.0] * 3, configuration={})
    comparison = compared([run, other], "val/*", "late")
    summary = comparison.runs[0].metrics["val/loss"]
    assert (required(summary.best).value, required(summary.best).step) == (0.2, 3)
    assert math.isnan(summary.final.value)
    assert summary.final.step == 5
    assert comparison.runs[0].metrics["late"].best is None
    text = "\n".join(report_lines(comparison, 80))
    assert "NaN" in text
    assert "not logged by run 2" in text
    assert comparison_json(comparison)["runs"][0]["metrics"]["val/loss"]["final"]["value"] == "NaN"


def test_the_run_itself_decides_which_values_are_better(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, "brave-owl-0001", [1.0] * 3, configuration={}, metrics={"odd": {1: 1.0, 2: 3.0}}
    )
    text = run.spec_path.read_text()
    run.spec_path.write_text(text.replace("best: null", "best: odd").replace("min", "max"))
    other = write_run(tmp_path, "calm-owl-0002", [1.0] * 3, configuration={})
    odd = compared([run, other], "odd").runs[0].metrics["odd"]
    assert required(odd.best).value == 3.0


def test_time_speed_and_memory(tmp_path: Path) -> None:
    for run in compared(write_seeds(tmp_path)).runs:
        steps = run.snapshot.global_step or 0
        assert run.time_s == pytest.approx(steps * 0.01)
        assert run.samples_per_s == pytest.approx(3200)
        assert run.peak_memory_bytes == 2.0**30 + steps


def test_runs_that_differ_only_in_the_seed_are_a_group(tmp_path: Path) -> None:
    comparison = compared(write_seeds(tmp_path))
    assert comparison.differing_settings == ["seed_everything", "model.lr"]
    assert [(g.label, len(g.runs)) for g in comparison.groups] == [("lr=0.1", 3), ("lr=0.3", 2)]
    group = comparison.groups[0]
    positions, band = required(comparison.group_curve(group, "val/acc"))
    members = [accuracies(losses(1500 - 100 * n, lr=0.1, seed=n + 1)) for n in range(3)]
    assert positions.tolist() == list(range(EPOCH, 1501, EPOCH))
    for position, mean, low, high, count in zip(
        positions, band.mean, band.low, band.high, band.count, strict=True
    ):
        values = [one[int(position)] for one in members if int(position) in one]
        assert count == len(values)
        assert (mean, low, high) == pytest.approx((np.mean(values), min(values), max(values)))
    spread = required(comparison.spread(group, "val/acc", "final"))
    assert spread.mean == pytest.approx(np.mean([list(one.values())[-1] for one in members]))


def test_code_that_differs_is_shown_and_does_not_part_a_group(tmp_path: Path) -> None:
    runs = write_seeds(tmp_path)[:3]
    for number, (run, diff) in enumerate(zip(runs, (b"+a", b"+b", b""), strict=True)):
        record = CodeRecord(
            attempt=1, recorded_at=1.0, command=("python",), host="h", user="u",
            packages={"torch": "2.6", "numpy": f"2.{number // 2}"}, commit="3f48a5e012aa",
            changed_count=1 if diff else 0,
        )  # fmt: skip
        write_record(run, record, diff)
    comparison = compared(runs)
    assert comparison.differing_settings == ["seed_everything", "code.changes", "package.numpy"]
    changes = [run.code["code.changes"] for run in comparison.runs]
    assert len(set(changes)) == 3
    assert changes[2] == "none"
    assert "code.commit" in comparison.equal_settings
    assert [len(group.runs) for group in comparison.groups] == [3]
    assert comparison_json(comparison)["settings"]["package.numpy"][runs[2].id] == "2.1"


def test_the_groups_that_a_person_gave_the_runs_come_before_those_of_the_settings(
    tmp_path: Path,
) -> None:
    runs = write_seeds(tmp_path)
    for run in (runs[0], runs[-1]):
        change_labels(run, lambda labels: replace(labels, group="mine"))
    first, *others = compared(runs).groups
    assert (first.label, first.runs) == ("mine", (runs[0].id, runs[-1].id))
    assert all(runs[0].id not in group.runs for group in others)
    by_setting = compared(runs, grouping=Grouping(by=("model.lr",)))
    assert "mine" not in [group.label for group in by_setting.groups]


def test_the_settings_are_those_that_differ_and_one_line_for_the_others(tmp_path: Path) -> None:
    comparison = compared(write_seeds(tmp_path))
    view = settings_table(comparison, ViewSettings())
    assert [row.key for row in view.rows] == [*comparison.differing_settings, EQUAL]
    same = len(comparison.equal_settings)
    assert required(view.rows[-1].line)[0].text.startswith(f"▸ {same} the same: ")
    listed = settings_table(comparison, ViewSettings(equal=True)).rows
    assert len(listed) == len(view.rows) + same
    (epochs,) = [row.line for row in listed if row.key.endswith("max_epochs")]
    assert "max_epochs" in required(epochs)[0].text
    grouped = settings_table(comparison, ViewSettings(grouped=True))
    titles = [column.title for column in grouped.columns[1:]]
    assert len(titles) == len(comparison.groups)
    sizes = [f"({len(group.runs)})" for group in comparison.groups]
    assert all(title.endswith(size) for title, size in zip(titles, sizes, strict=True))


def test_groups_by_keys_that_a_person_names(tmp_path: Path) -> None:
    runs = write_seeds(tmp_path)
    together = compared(runs, grouping=Grouping(ignored=("lr",)))
    assert [len(g.runs) for g in together.groups] == [5]
    by_seed = compared(runs, grouping=Grouping(by=("seed_everything",)))
    assert [(g.label, len(g.runs)) for g in by_seed.groups] == [
        ("seed_everything=1", 2),
        ("seed_everything=2", 2),
    ]
    with pytest.raises(ProblemError, match="Did you mean"):
        compared(runs, grouping=Grouping(by=("model.lrr",)))


@given(
    st.dictionaries(
        st.text("abcd", min_size=1, max_size=4),
        st.dictionaries(st.sampled_from(["lr", "seed", "x.seed", "w"]), st.sampled_from("12")),
    )
)
def test_groups_hold_exactly_the_runs_that_are_alike(settings: dict[str, dict[str, str]]) -> None:
    groups = groups_of(settings, Grouping())
    kept = {
        run: {name: value for name, value in one.items() if not is_seed(name)}
        for run, one in settings.items()
    }
    for run, one in kept.items():
        alike = {other for other, values in kept.items() if values == one}
        mine = [set(group.runs) for group in groups if run in group.runs]
        assert mine == ([alike] if len(alike) > 1 else [])


def test_options_of_a_command_are_settings() -> None:
    words = "torchrun --nproc-per-node 2 train.py --lr=0.1 --seed 3 opt.name=adam --amp --x -1.5"
    assert command_settings(words.split()) == {
        "command": "torchrun train.py",
        "nproc-per-node": "2",
        "lr": "0.1",
        "seed": "3",
        "opt.name": "adam",
        "amp": "true",
        "x": "-1.5",
    }


NAMES = st.text("abcdef0123456789", min_size=4, max_size=4)


@given(st.sets(NAMES, max_size=40))
def test_every_run_has_its_own_colour_and_sign(run_ids: set[str]) -> None:
    colours = run_colours(dict.fromkeys(run_ids))
    shown = {(colour % COLOURS, sign_of(colour)) for colour in colours.values()}
    assert len(shown) == len(run_ids)
    assert colours == run_colours(dict.fromkeys(sorted(run_ids, reverse=True)))
    assert len({colour % COLOURS for colour in colours.values()}) == min(len(run_ids), COLOURS)
    # A few runs differ without colour, too.
    assert len(set(map(sign_of, colours.values()))) == min(len(run_ids), len(MARKERS))


@given(st.lists(st.sets(NAMES, min_size=1, max_size=5), max_size=20))
def test_a_run_keeps_its_colour_in_every_later_comparison(comparisons: list[set[str]]) -> None:
    kept: dict[str, int] = {}
    for run_ids in comparisons:
        colours = run_colours({run_id: kept.get(run_id) for run_id in run_ids})
        assert all((colours[one] - kept[one]) % COLOURS == 0 for one in run_ids & kept.keys())
        # Only the sign of a run that meets another one with its sign is a different one.
        signs = [sign_of(kept[one]) for one in run_ids & kept.keys()]
        assert all(
            colours[one] == kept[one]
            for one in run_ids & kept.keys()
            if signs.count(sign_of(kept[one])) == 1
        )
        assert len({sign_of(colour) for colour in colours.values()}) == len(run_ids)
        kept = colours | kept


def test_runs_with_the_same_sign_from_earlier_comparisons_differ_without_colour() -> None:
    colours = run_colours({"first-0001": 2, "second-0002": 2 + COLOURS * 8 - COLOURS, "third": 2})
    assert len({sign_of(colour) for colour in colours.values()}) == 3
    # A group is told by the sign of its first member, which chooses first.
    assert sign_of(run_colours({"a": 5, "b": 5}, {"b"})["b"]) == sign_of(5)
    # There are eight signs; then the lines differ.
    many = run_colours(dict.fromkeys(map(str, range(32))))
    shown = {(sign_of(c), dash_of(c, dashes=False)) for c in many.values()}
    assert len(shown) == 32


def test_a_run_that_has_just_started_counts_neither_as_different_nor_as_the_reference(
    tmp_path: Path,
) -> None:
    """What it has not reported yet is not known, and it has no value to compare others with."""
    first, second = compared(write_seeds(tmp_path)[:2]).runs
    snapshot = replace(first.snapshot, id="new-0009", state=RunState.RUNNING, global_step=None)
    new = replace(first, snapshot=snapshot, settings={}, code={}, curves={}, metrics={})
    them = Comparison(runs=(first, second), metrics=(LOSS,))
    all_of_them = Comparison(runs=(new, first, second), metrics=(LOSS,))
    assert all_of_them.differing_settings == them.differing_settings
    assert all_of_them.parameters == them.parameters
    assert reference_id(all_of_them, ViewSettings()) == first.id
    later = replace(new, snapshot=replace(snapshot, global_step=5))
    runs = (later, first, second)
    assert len(Comparison(runs=runs, metrics=(LOSS,)).differing_settings) > 1


def test_colours_are_stored_even_if_another_dashboard_was_faster(tmp_path: Path) -> None:
    runs = write_seeds(tmp_path)[:3]
    change_labels(runs[0], lambda labels: replace(labels, tags=("base",)))
    read = compared(runs).runs
    # Another dashboard gives the second run a colour after this one has read it.
    change_labels(runs[1], lambda labels: replace(labels, colour=63))
    first = keep_colours(read, runs)
    assert first[1].colour == 63
    assert [run.colour for run in first] == [read_labels(run).colour for run in runs]
    assert read_labels(runs[0]).tags == ("base",)
    # Later comparisons, also with fewer runs, show the same; of two equal signs one is another.
    again = compared(runs[1:])
    kept = [required(run.colour) for run in first[1:]]
    assert [colour % COLOURS for colour in again.colours.values()] == [c % COLOURS for c in kept]
    assert len(set(map(sign_of, again.colours.values()))) == len(kept)
    assert keep_colours(again.runs, runs) == again.runs


def test_a_run_that_cannot_be_written_is_compared_all_the_same(tmp_path: Path) -> None:
    runs = write_seeds(tmp_path)[:2]
    read = compared(runs).runs
    shutil.rmtree(runs[0].path)
    first, second = keep_colours(read, runs)
    assert (first, first.colour) == (read[0], None)
    assert second.colour == read_labels(runs[1]).colour


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    runs = write_seeds(tmp_path)
    runs[1].db_path.write_bytes(b"no database" * 1000)
    runs[2].spec_path.write_text("version: [")
    read = read_runs(runs, (), current_snapshot)
    assert [run.id for run in read.runs] == [runs[0].id, runs[3].id, runs[4].id]
    assert [str(runs[1].db_path), str(runs[2].spec_path)] == [p.where for p in read.problems]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_report_fits_into_the_terminal(tmp_path: Path, width: int) -> None:
    runs = write_seeds(tmp_path)
    long = config(lr=0.2, seed=9) | {"data": {"note": "words " * 30, "name" * 20: 1}}
    metric = "val/" + "x" * 90 + "\x1b[31m"
    run_id, metrics = "a-very-long-name-of-a-run-0009", {metric: {5: 1.0}}
    runs.append(write_run(tmp_path, run_id, losses(50), configuration=long, metrics=metrics))
    text = report_lines(compared(runs, "*"), width)
    assert max(map(len, text)) <= width
    assert not any("\x1b" in line for line in text)


def test_a_deviation_is_printed_as_such_and_a_range_as_a_range(tmp_path: Path) -> None:
    comparison = compared(write_seeds(tmp_path)[:3], "val/acc")

    def group_line(band: str) -> str:
        lines = report_lines(replace(comparison, band=band), 100)
        assert f"groups (mean and {BAND_NAMES[band]})" in lines
        return lines[-1]

    assert re.search(r"\d\.\d+ ± 0\.\d+", group_line("std"))
    assert re.search(r"\d\.\d+ ± 0\.\d+", group_line("stderr"))
    assert re.search(r"\[0\.\d+, 0\.\d+\]", group_line("minmax"))


def test_the_runs_are_ranked_by_the_metric_of_their_validation() -> None:
    names = ["lr", "train_loss", "train/acc", "val_acc", "val_loss", "test_loss"]
    assert default_metrics(names) == ("val_loss", "test_loss", "val_acc", "train_loss")
    assert default_metrics(["lr", "train/loss"]) == ("train/loss",)
