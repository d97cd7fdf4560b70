"""Machines and ranks of a run on several machines, as rows, labels and lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.app.foreground.progress_display import panel_lines, plain_line
from ltui.app.live.log_tail import node_of_launcher_log
from ltui.app.panels.log_panel import is_from, log_sources
from ltui.app.presentation import gpu_view, run_view
from ltui.app.presentation.machine_rows import MachineRows, RowSelection, matches
from ltui.app.presentation.machines import (
    machine_count,
    machine_names,
    rank_labels,
    rank_range,
    rank_summary,
)
from ltui.app.presentation.rank_grid import (
    MIN_RANKS,
    CellGrid,
    GridGroup,
    LegendEntry,
    Mark,
    gpu_grid,
    grid_lines,
    has_grid,
    rank_grid,
)
from ltui.app.presentation.run_details import checkpoints_and_events
from ltui.app.presentation.run_report import show_lines
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import (
    NodeSnapshot,
    NodeState,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
    snapshot_from_json,
)
from ltui.widgets.columns import Cells
from ltui.widgets.run_tables import heat_lines
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine, RankRow
from tests.app.frames import NOW, frame, snapshot
from tests.app.machine_frames import (
    large_run,
    machine,
    machine_frame,
    machine_run,
    stalled_run,
    unreachable,
)
from tests.required import required


def rows_of(run: RunSnapshot, query: str = "", **unfolded: bool) -> Sequence[RankRow]:
    """The rows, with machines ``n1`` unfolded or folded by the user."""
    folds = {int(key[1:]): value for key, value in unfolded.items()}
    return MachineRows(machine_frame(run), RowSelection(unfolded=folds, query=query)).rows()


def keys_of(run: RunSnapshot, query: str = "", **unfolded: bool) -> list[str]:
    return [row.key for row in rows_of(run, query, **unfolded)]


def metric(row: RankRow, key: str) -> str:
    return next(m.cell.text for m in row.metrics if m.column.key == key)


def test_a_healthy_machine_is_one_row() -> None:
    rows = rows_of(machine_run())
    assert [row.rank for row in rows] == ["+ gpu-a  0-7", "+ gpu-b  8-15"]
    assert [row.state.text for row in rows] == ["8 ok", "8 ok"]
    assert [metric(row, "gpu") for row in rows] == ["98 %", "98 %"]
    assert [metric(row, "report") for row in rows] == ["local", "< 2 s"]
    assert metric(rows[0], "step_s") == "104 ms"
    assert metric(rows[0], "rate") == "62.4\N{THIN SPACE}k"
    assert not any(row.note for row in rows)
    # The slowest rank is named if it is slower than the others.
    slow = machine_run(ranks={10: {"step_s": 0.25}})
    assert metric(rows_of(slow)[1], "step_s") == "250 ms r10"


def test_the_machine_with_the_stalled_rank_is_first_and_lists_it() -> None:
    rows = rows_of(stalled_run())
    assert [row.key for row in rows] == ["n1", "r11", "n0"]
    assert rows[0].state.text == "1 STALLED"
    assert rows[0].note == "7 waiting"
    assert rows[1].state.text == "STALLED"
    assert rows[1].note == "augment.py:88"
    assert rows[2].state.text == "8 waiting"


def test_an_unfolded_machine_lists_its_ranks_the_worst_first_with_their_readings() -> None:
    keys = keys_of(stalled_run(), n1=True)
    assert keys == ["n1", "r11", "r8", "r9", "r10", "r12", "r13", "r14", "r15", "n0"]
    assert keys_of(stalled_run(), n1=False) == ["n1", "n0"]
    row = rows_of(machine_run(), n1=True)[3]
    assert row.rank.strip() == "r9"
    assert row.device == "gpu1"
    assert (metric(row, "step_s"), metric(row, "gpu")) == ("104 ms", "98 %")


def test_a_machine_that_does_not_report_is_dim_with_the_reason() -> None:
    rows = rows_of(machine_run(machines={1: unreachable(1)}), n1=True)
    assert rows[0].key == "n1"
    assert rows[0].state.text == "unreachable"
    assert rows[0].state.tone is Tone.BAD
    assert rows[0].is_old
    assert rows[0].note == "no answer from 10.0.0.2 for 12 s"
    assert metric(rows[0], "report") == "12 s"
    assert {row.state.text for row in rows[1:9]} == {"no report"}
    assert all(row.is_old for row in rows[1:9])
    assert not rows[9].is_old
    silent = machine(1, state=NodeState.SILENT, link_age_s=3.9)
    assert rows_of(machine_run(machines={1: silent}))[0].note == "last report 4.0 s ago"


def test_values_of_an_ended_run_are_not_called_old() -> None:
    run = machine_run(machines={1: unreachable(1)}, state=RunState.STOPPED)
    assert not any(row.is_old for row in rows_of(run))
    assert keys_of(run) == ["n0", "n1"]


def test_a_machine_that_a_verdict_names_comes_first() -> None:
    slow = Verdict(kind="slow", level="slow", nodes=(2,), cause="gpu-c is slow", began=NOW)
    assert keys_of(machine_run(4, 2, verdicts=(slow,))) == ["n2", "n0", "n1", "n3"]


def test_a_machine_that_has_not_joined_is_a_row() -> None:
    late = NodeSnapshot(node=1, name="gpu-b", ranks=tuple(range(8, 16)))
    run = machine_run(machines={1: late})
    rows = rows_of(replace(run, ranks=run.ranks[:8]))
    assert [row.rank for row in rows] == ["  gpu-b  8-15", "+ gpu-a  0-7"]
    assert rows[0].state.text == "not joined"
    assert metric(rows[0], "report") == "none"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("12", ["n1", "r12"]),
        ("r12", ["n1", "r12"]),
        ("6-9", ["n0", "r6", "r7", "n1", "r8", "r9"]),
        ("gpu-b:12", ["n1", "r12"]),
        ("gpu-a:12", []),
        ("gpu-b", ["n1"]),
        ("10.0.0.2", ["n1"]),
        ("dead", ["n0", "r3"]),
        ("gpu-b dead", []),
        ("99", []),
    ],
)
def test_filters(query: str, expected: list[str]) -> None:
    run = machine_run(ranks={3: {"state": RankState.DEAD}})
    assert keys_of(run, query) == expected


def test_a_machine_is_found_by_its_state_and_by_a_number_in_its_name() -> None:
    run = machine_run(4, 2, machines={2: unreachable(2, per_node=2)})
    assert keys_of(run, "unreach") == ["n2"]
    assert keys_of(run, "no report") == ["n2"]
    assert matches("12", "12 rack-12", 3, "ok")
    assert not matches("12", "rack-12", 3, "ok")


# -- names and labels ------------------------------------------------------------------------------


def named(*names: str) -> RunSnapshot:
    nodes = tuple(NodeSnapshot(node=n, name=name) for n, name in enumerate(names))
    return snapshot(nodes=nodes, ranks=())


def test_names_are_short_and_unique() -> None:
    assert machine_names(named("a.cluster", "b.cluster")) == {0: "a", 1: "b"}
    assert machine_names(named("a.east", "a.west")) == {0: "a.east", 1: "a.west"}
    assert machine_names(named("10.0.0.1", "10.0.0.2")) == {0: "10.0.0.1", 1: "10.0.0.2"}
    assert machine_names(named("box", "box#2")) == {0: "box", 1: "box#2"}
    long = machine_names(named("research-cluster-node-0001", "research-cluster-node-0002"))
    assert long == {0: "…uster-node-0001", 1: "…uster-node-0002"}
    assert machine_names(named("evil\x1b[31m", "b"))[0].isprintable()


def test_labels_name_the_machine_only_on_several() -> None:
    assert rank_labels(snapshot()) == {}
    assert rank_labels(machine_run())[12] == "gpu-b:12"
    run = machine_run()
    assert rank_labels(replace(run, ranks=()))[12] == "gpu-b:12"
    names = [name for _, name in log_sources(machine_frame())]
    assert names[:3] == ["all ranks", "gpu-a:0", "gpu-a:1"]


def test_each_machine_has_a_launcher_with_a_log_of_its_own() -> None:
    sources = {name: source for source, name in log_sources(machine_frame())}
    second = LogLine(rank=None, text="elastic: ready", node=1)
    assert is_from(second, sources["gpu-b launcher"])
    assert is_from(second, sources["all ranks"])
    assert not is_from(second, sources["gpu-a launcher"])
    assert not is_from(LogLine(rank=3, text=""), sources["gpu-b launcher"])
    assert node_of_launcher_log("engine-12.log") == 12
    assert node_of_launcher_log("engine.log") == node_of_launcher_log("rank-00012.log") == 0


def test_the_details_list_machines_with_the_difference_of_their_clocks() -> None:
    nodes = {1: replace(unreachable(1), clock_skew_s=90.2)}
    text = checkpoints_and_events(machine_frame(machine_run(machines=nodes))).plain
    assert "machines\ngpu-a  10.0.0.1, ranks 0-7\n" in text
    assert "gpu-b  10.0.0.2, ranks 8-15, unreachable, clock 1 m 30 s ahead" in text
    assert "machines" not in checkpoints_and_events(frame()).plain


def test_ranks_of_a_machine_are_a_range_and_machines_are_counted() -> None:
    assert rank_range((3,)) == "3"
    assert rank_range((8, 9, 10)) == "8-10"
    assert rank_range((0, 2, 4)) == "3 ranks"
    assert rank_range(()) == "no rank"
    assert machine_count(snapshot()) == ""
    assert machine_count(machine_run()) == "2 machines, 16 ranks"
    assert machine_count(large_run()) == "128 machines, 1\N{THIN SPACE}024 ranks"
    assert rank_summary(machine_run(machines={1: unreachable(1)})) == "8 ok, 8 no report"
    assert run_view.header(machine_frame()).machines == "2 machines, 16 ranks"


def test_gpus_of_two_machines_are_never_merged() -> None:
    evidence = {"gpus": [2]}
    hot = Verdict(kind="gpu_thermal", level="warning", cause="hot", nodes=(1,), evidence=evidence)
    shown = machine_frame(machine_run(verdicts=(hot,)))
    rows = {row.index: row for row in gpu_view.gpu_rows(shown)}
    assert len(rows) == 16
    assert rows["gpu-b:2"].ranks == "r10"
    assert rows["gpu-b:2"].tone is Tone.WARN
    assert rows["gpu-a:2"].tone is Tone.PLAIN
    assert required(gpu_view.find_gpu(shown, "gpu-b:2")).node == 1


def test_gpus_of_a_machine_that_does_not_report_are_called_old() -> None:
    run = machine_run(machines={1: unreachable(1)})
    gpus = [replace(g, sampled_at=NOW - 12 if g.node else NOW - 1) for g in run.gpus]
    shown = machine_frame(replace(run, gpus=tuple(gpus)))
    rows = {row.index: row for row in gpu_view.gpu_rows(shown)}
    assert (rows["gpu-a:2"].stale, rows["gpu-a:2"].note) == (False, "")
    assert (rows["gpu-b:2"].stale, rows["gpu-b:2"].note) == (True, "12 s old")
    _, *lines = heat_lines(list(rows.values()), 99, 1.0, 60)
    is_old = [any(cell.text.strip() == "old" for cell in line) for line in lines]
    assert is_old == 8 * [False] + 8 * [True]
    signs = [mark.sign for group in gpu_grid(shown).groups for mark in group.marks]
    assert [sign == "?" for sign in signs] == 8 * [False] + 8 * [True]
    ended = machine_frame(replace(run, gpus=tuple(gpus), state=RunState.STOPPED))
    assert not any(row.stale or row.note for row in gpu_view.gpu_rows(ended))


# -- the grid --------------------------------------------------------------------------------------


def test_the_grid_gives_each_rank_a_sign() -> None:
    frame = machine_frame(large_run())
    grid = rank_grid(frame)
    assert has_grid(frame)
    assert not has_grid(machine_frame())
    marks = {
        label: mark.sign
        for group in grid.groups
        for label, mark in zip(group.labels, group.marks, strict=True)
    }
    assert len(marks) == 1024 > MIN_RANKS
    assert marks["r517"] == "!"
    assert marks["r90"] == "x"
    assert marks["r3"] == "…"
    assert marks["r616"] == "?"
    assert marks["r1"] == "▁"
    assert marks["r407"] == "▇"
    # Machine 60 reported 0.2 s ago, in which its ranks took up to five steps.
    assert [marks[f"r{n}"] for n in range(482, 488)] == ["▁", "2", "3", "4", "5", "6"]
    words = [f"{entry.sign} {entry.words}" for entry in grid.legend]
    assert words[:3] == ["x 1 DEAD", "! 1 STALLED", "? 8 no report"]
    assert any("steps behind" in entry for entry in words)


# -- lines without a dashboard ---------------------------------------------------------------------


def test_show_lists_machines_and_labels_ranks_and_gpus() -> None:
    text = "\n".join(show_lines(stalled_run(), NOW))
    assert "2 machines, 16 ranks" in text
    assert "\nmachines\n" in text
    assert "gpu-b  ranks 8-15  1 STALLED, 7 waiting" in text
    assert "gpu-b:11" in text
    assert "gpu-b:3" in text
    assert "slowest step 104 ms" in text
    assert "GPUs 98 % busy" in text
    cut = "\n".join(show_lines(machine_run(machines={1: unreachable(1)}), NOW))
    assert "unreachable" in cut
    assert "last report 12 s ago" in cut
    assert "no answer from 10.0.0.2 for 12 s" in cut


def test_show_lists_the_ranks_that_need_help_if_there_are_hundreds() -> None:
    lines = show_lines(large_run(), NOW)
    ranks = lines[lines.index("ranks") + 1 :]
    assert {ranks[0].split()[0], ranks[1].split()[0]} == {"gpu-11:90", "gpu-64:517"}


def test_lines_in_the_foreground_count_machines() -> None:
    line = plain_line(machine_run(machines={1: unreachable(1)}))
    assert "8 ok, 8 no report  2 machines, 16 ranks  1 machine unreachable" in line
    lines = [text for text, _ in panel_lines(stalled_run(), "hint", 100)]
    assert "2 machines, 16 ranks" in lines
    assert any(text.startswith("gpu-a:0 ") for text in lines)
    assert "gpu-b: unreachable  no answer from 10.0.0.2 for 12 s" in [
        text for text, _ in panel_lines(machine_run(machines={1: unreachable(1)}), "hint", 100)
    ]


def test_the_snapshot_keeps_machines_as_json() -> None:
    run = machine_run(machines={1: unreachable(1)})
    assert snapshot_from_json(to_json(run)).nodes == run.nodes
    assert to_json(run)["gpus"][8]["node"] == 1


# -- lines of a grid -----------------------------------------------------------------------------

OK, BAD = Mark("▁", Tone.DIM, 1), Mark("!", Tone.BAD, 9)
LEGEND = (LegendEntry("!", "1 STALLED", Tone.BAD), LegendEntry("▁▇", "step time"))


def grid(*sizes: int, bad: int | None = None) -> CellGrid:
    groups, first = [], 0
    for size in sizes:
        numbers = range(first, first + size)
        groups.append(
            GridGroup([f"r{n}" for n in numbers], [BAD if n == bad else OK for n in numbers])
        )
        first += size
    return CellGrid(tuple(groups), LEGEND)


def texts(lines: list[Cells]) -> list[str]:
    return ["".join(cell.text for cell in line) for line in lines]


def test_machines_are_separated_and_lines_begin_with_the_first_rank() -> None:
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 10, 14)) == [
        "! 1 STALLED",
        "▁▇ step time",
        " r0 ▁▁▁▁ ▁▁!▁",
        " r8 ▁▁▁▁",
    ]


def test_cells_are_dense_if_machines_do_not_fit_with_gaps() -> None:
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 2, 40))[-1] == " r0 ▁▁▁▁ ▁▁!▁ ▁▁▁▁"
    assert texts(grid_lines(grid(4, 4, 4, bad=6), 3, 17))[-1] == " r0 ▁▁▁▁▁▁!▁▁▁▁▁"


def test_neighbours_share_a_cell_with_the_worst_mark_if_there_are_too_many() -> None:
    lines = texts(grid_lines(grid(8, 8, bad=13), 3, 16))
    assert lines[-1] == " r0 ▁▁▁▁ ▁▁!▁"
    assert "1 cell: worst of 2 ranks" in " ".join(lines)


def test_machines_of_different_sizes_are_aligned() -> None:
    lines = texts(grid_lines(grid(2, 4, 4, 4), 6, 13))
    assert lines[-2:] == [" r0 ▁▁   ▁▁▁▁", " r6 ▁▁▁▁ ▁▁▁▁"]


def test_a_machine_wider_than_the_screen_takes_several_lines() -> None:
    lines = texts(grid_lines(grid(20), 10, 12))
    assert [line.strip() for line in lines[-3:]] == ["r0 ▁▁▁▁▁▁▁▁", "r8 ▁▁▁▁▁▁▁▁", "r16 ▁▁▁▁"]


def test_an_empty_grid_has_no_lines() -> None:
    assert grid_lines(grid(), 5, 40) == []
    assert grid_lines(grid(0, 0), 5, 40) == []
    assert grid_lines(grid(4), 0, 40) == []


def test_the_legend_takes_two_lines_at_most() -> None:
    entries = tuple(LegendEntry("x", f"meaning {n}") for n in range(9))
    lines = texts(grid_lines(CellGrid(grid(3).groups, entries), 6, 24))
    assert lines[:-1] == ["x meaning 0", "x meaning 1"]


@pytest.mark.parametrize("width", [20, 60, 80, 160])
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60), most_lines=st.integers(1, 20))
def test_lines_always_fit(width: int, sizes: list[int], most_lines: int) -> None:
    lines = texts(grid_lines(grid(*sizes), most_lines, width))
    cells = [line for line in lines if not re.search("step time|STALLED|worst", line)]
    assert len(lines) <= most_lines
    assert bool(cells) == any(sizes)
    assert all(cell_len(line) <= max(width, 30) for line in lines)


def test_machines_share_cells_if_there_are_more_of_them_than_cells() -> None:
    lines = texts(grid_lines(grid(*[2] * 40, bad=70), 3, 16))
    assert lines[-1] == " r0 ▁▁▁▁▁▁▁▁!▁"
    assert lines[0] == "1 cell: worst of 8 ranks"
