"""The rows of home's list of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.app.panels.runs_table import RunsTable
from ltui.app.presentation.metric_names import headline_metric
from ltui.app.runs.run_entry import RunEntry, summarise
from ltui.app.runs.run_fields import FIELD_NAMES
from ltui.app.runs.run_rows import (
    DEFAULT_COLUMNS,
    RunRow,
    distinct_programs,
    is_empty,
    run_row,
    sorted_runs,
    with_column,
)
from ltui.training.config.preset_discovery import shipped_names
from ltui.training.config.presets import apply_form, load_preset
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import MetricValue, RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import NOW, snapshot


def logged(**values: float) -> dict[str, MetricValue]:
    names = {key.replace("__", "/"): value for key, value in values.items()}
    return {name: MetricValue(last=value, step=9) for name, value in names.items()}


def line(name: str, **values: float) -> RunEntry:
    run = snapshot(id=name, name=name, metrics=logged(**values))
    return RunEntry(run_dir=RunDir(Path("/runs") / name), summary=summarise(run))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"train__loss": 0.5, "val__loss": 0.4}, "val/loss"),
        ({"train__loss": 0.5, "lr": 0.1}, "loss"),
        ({"valid_acc": 0.9, "eval_loss": 0.4, "test_loss": 0.3}, "eval_loss"),
        ({"val__loss": 0.4, "val__accuracy": 0.9}, "val/loss"),
        ({"entropy": -1.999, "kl": 0.1, "lr": 0.01, "reward": 12.0}, "reward"),
        ({"lr": 0.01, "grad_norm": 3.0, "perplexity": 20.0}, "perplexity"),
    ],
)
def test_the_metric_of_a_run_is_of_its_validation_else_its_loss_else_its_score(
    values: dict[str, float], name: str
) -> None:
    shown = headline_metric(snapshot(metrics=logged(**values)))
    assert shown is not None
    assert shown.name == name


def test_the_title_names_the_metric_once_and_a_cell_only_another_one() -> None:
    rows: list[RunRow] = [
        run_row(line("a", train__loss=0.5), NOW),
        run_row(line("b", train__loss=0.25), NOW),
        run_row(line("c", reward=12.0), NOW),
    ]
    table = RunsTable()
    columns = {column.key: column.title for column in table.columns_of(rows)}
    assert columns["metric"] == "loss"
    cells = ["".join(cell.text for cell in table.cells_of(row)["metric"]) for row in rows]
    assert not any("loss" in cell for cell in cells)
    assert cells[2].startswith("reward ")


def test_every_column_has_a_title_by_which_filters_and_sorting_name_it() -> None:
    rows = [run_row(line("a", train__loss=0.5), NOW)]
    titles = {column.key: column.title for column in RunsTable().columns_of(rows)}
    assert titles == {name: name for name in ("name", *DEFAULT_COLUMNS)} | {"metric": "loss"}
    assert set(DEFAULT_COLUMNS) < set(FIELD_NAMES)


def test_runs_are_sorted_by_the_best_metric_and_those_without_come_last() -> None:
    lines = [line("none"), line("high", train__loss=0.5), line("low", train__loss=0.25)]
    best_first = sorted_runs(lines, "metric", reverse=False)
    assert [entry.id for entry in best_first] == ["low", "high", "none"]
    worst_first = sorted_runs(lines, "metric", reverse=True)
    assert [entry.id for entry in worst_first] == ["high", "low", "none"]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("/usr/bin/python3", "-u", "/home/me/proj/train.py", "--lr", "1"), "train.py --lr 1"),
        (("/opt/bin/accelerate", "launch"), "accelerate launch"),
    ],
)
def test_a_command_is_named_by_its_script(command: tuple[str, ...], shown: str) -> None:
    run = snapshot(preset=None, command=command)
    row = run_row(RunEntry(run_dir=RunDir(Path("/runs/a")), summary=summarise(run)), NOW)
    assert row.program == shown


def test_the_form_takes_as_many_epochs_as_the_command_line() -> None:
    for name in shipped_names():
        preset = load_preset(name)
        texts = {"trainer.max_epochs": "500000"}
        problems = [p for p in apply_form(preset, texts).problems if p.where in texts]
        assert problems == [], name


def test_a_run_with_an_incomplete_history_says_so_in_the_list() -> None:
    run = snapshot(
        state=RunState.FINISHED, detail="finished at step 9", history_note="records lost: 120"
    )
    entry = RunEntry(run_dir=RunDir(Path("/runs/a")), summary=summarise(run))
    assert run_row(entry, NOW).note.text == "history incomplete"


def test_a_run_that_cannot_be_read_is_a_row_with_the_reason() -> None:
    entry = RunEntry(run_dir=RunDir(Path("/runs/bad-bear-ffff")), problem="written by a newer ltui")
    row = run_row(entry, NOW)
    assert (row.state.text, row.note.text) == ("damaged", "written by a newer ltui")


def test_the_star_stands_before_a_name_that_is_cut_off() -> None:
    entry = replace(line("a-name-of-a-run-that-does-not-fit"), labels=RunLabels(star=True))
    name = "".join(cell.text for cell in RunsTable().cells_of(run_row(entry, NOW))["name"])
    assert "★ a-name" in name


@pytest.mark.parametrize(
    ("state", "detail", "progress", "note"),
    [
        (RunState.FINISHED, "finished at step 192", "step 192", ""),
        (RunState.STOPPED, "stopped at step 41, checkpoint verified", "step 41/192", "checkpoint"),
        (RunState.FAILED, "rank 1 raised ValueError", "step 41/192", "rank 1 raised"),
    ],
)
def test_a_row_says_nothing_twice(state: RunState, detail: str, progress: str, note: str) -> None:
    step = 192 if state is RunState.FINISHED else 41
    run = snapshot(state=state, detail=detail, global_step=step, max_steps=192)
    entry = RunEntry(run_dir=RunDir(Path("/runs/a")), summary=summarise(run))
    row = run_row(entry, NOW)
    assert row.progress == progress
    assert row.note.text.startswith(note)
    assert bool(row.note.text) == bool(note)
    assert is_empty(entry, "detail") == (not note)


def test_a_live_run_has_its_share_and_the_time_that_is_left() -> None:
    run = snapshot(global_step=61, max_steps=100, eta_s=240.0)
    entry = RunEntry(run_dir=RunDir(Path("/runs/a")), summary=summarise(run), snapshot=run)
    assert run_row(entry, NOW).progress.split() == ["61", "%", "4", "m", "00", "s", "left"]


def test_programs_show_what_differs() -> None:
    lines = ["train.py --epochs 6 --lr 0.1 --amp", "train.py --epochs 6 --lr 0.01 --amp"]
    one = "eval.py --epochs 6"
    assert distinct_programs(frozenset([*lines, one, "quickstart"])) == {
        lines[0]: "train.py … --lr 0.1",
        lines[1]: "train.py … --lr 0.01",
        one: one,
        "quickstart": "quickstart",
    }


def test_a_new_column_is_left_of_those_that_matter_least() -> None:
    columns = ("state", "metric", "program", "created")
    assert with_column(columns, "val/acc") == ("state", "metric", "val/acc", "program", "created")
    assert with_column(("state",), "val/acc") == ("state", "val/acc")
    assert with_column(columns, "tag") == (*columns, "tag")
