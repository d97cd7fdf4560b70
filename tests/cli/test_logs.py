"""``ltui logs`` over the log files of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.app.commands.logs import _Printer, selected_sources
from ltui.app.presentation.machines import log_labels
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import NodeSnapshot, RunSnapshot, RunState


def run_of_machines() -> RunSnapshot:
    """Return a run on gpu-a with the ranks 0 to 7 and gpu-b with the ranks 8 to 15."""
    machines = tuple(
        NodeSnapshot(
            node=node, name=name, host=f"{name}.cluster", ranks=tuple(range(8 * node, 8 * node + 8))
        )
        for node, name in enumerate(("gpu-a", "gpu-b"))
    )
    return RunSnapshot(id="a-1", name="a", state=RunState.RUNNING, nodes=machines)


def printed(capfdbinary: pytest.CaptureFixture[bytes]) -> list[str]:
    return capfdbinary.readouterr().out.decode().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rank-00000.log").write_text(
        "plain start\n2026-11-22 10:00:01,500 a\n  more of a\n2026-11-22 10:00:03 c\n"
    )
    (tmp_path / "rank-00001.log").write_text("[2026-11-22T10:00:02.25] b\nno time\n")
    (tmp_path / "engine.log").write_text("2026-11-22 10:00:02.900000 engine\nwithout end")
    return tmp_path


def test_lines_with_times_are_merged_and_name_their_rank(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert _Printer(folder).print_new(last=True)
    assert printed(capfdbinary) == [
        "r0 plain start",
        "r0 2026-11-22 10:00:01,500 a",
        "r0   more of a",
        "r1 [2026-11-22T10:00:02.25] b",
        "r1 no time",
        "2026-11-22 10:00:02.900000 engine",
        "without end",
        "r0 2026-11-22 10:00:03 c",
    ]


def test_logs_without_times_are_printed_whole(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-0000{rank}.log").write_text("one\ntwo\n")
    _Printer(tmp_path).print_new(last=True)
    assert printed(capfdbinary) == ["r0 one", "r0 two", "r1 one", "r1 two"]


def test_only_new_lines_follow_and_one_rank_has_no_prefix(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    printer = _Printer(folder, {1})
    assert printer.print_new(last=False)
    assert printed(capfdbinary) == ["[2026-11-22T10:00:02.25] b", "no time"]
    assert not printer.print_new(last=False)
    with (folder / "rank-00001.log").open("a") as file:
        file.write("half")
    assert not printer.print_new(last=False)
    with (folder / "rank-00001.log").open("a") as file:
        file.write(" line\nrest")
    assert printer.print_new(last=True)
    assert printed(capfdbinary) == ["half line", "rest"]


@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        (None, ["gpu-a:0 ready", "gpu-b:8 ready", "gpu-b ready", "gpu-a ready"]),
        ("1", ["gpu-b:8 ready", "gpu-b ready"]),
    ],
)
def test_lines_of_several_machines_name_the_machine_and_its_launcher(
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    machine: str | None,
    lines: list[str],
) -> None:
    for name in ("rank-00000", "rank-00008", "engine", "engine-1"):
        (tmp_path / f"{name}.log").write_text("ready\n")
    sources = selected_sources(None, machine, run_of_machines())
    _Printer(tmp_path, sources, log_labels(run_of_machines())).print_new(last=True)
    assert printed(capfdbinary) == lines


@pytest.mark.parametrize(
    ("rank", "machine", "sources"),
    [
        (None, None, None),
        ("3", None, {3}),
        (None, "gpu-b", {*range(8, 16), -3}),
        (None, "1", {*range(8, 16), -3}),
        (None, "gpu-a.cluster", {*range(8), -2}),
        ("gpu-b:12", None, {12}),
        ("1:12", None, {12}),
        ("12", "gpu-b", {12}),
        ("gpu-b:12", "gpu-b", {12}),
    ],
)
def test_a_rank_and_a_machine_select_logs(
    rank: str | None, machine: str | None, sources: set[int] | None
) -> None:
    assert selected_sources(rank, machine, run_of_machines()) == sources


@pytest.mark.parametrize(
    ("rank", "machine", "what"),
    [
        ("gpu-b:3", None, "gpu-b has no rank 3.*Its ranks: 8-15"),
        ("gpu-c:3", None, "no such machine.*Known machines: 0 .gpu-a., 1 .gpu-b."),
        (None, "gpu-c", "--node gpu-c.*no such machine"),
        ("gpu-b:12", "gpu-a", "another machine than --node gpu-a"),
    ],
)
def test_what_selects_no_log_is_refused(rank: str | None, machine: str | None, what: str) -> None:
    with pytest.raises(ProblemError, match=what):
        selected_sources(rank, machine, run_of_machines())


def test_a_run_on_one_machine_has_no_others() -> None:
    with pytest.raises(ProblemError, match="runs on one machine: omit it"):
        selected_sources(None, "gpu-b", None)
