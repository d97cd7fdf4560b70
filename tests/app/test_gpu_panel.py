"""GPU rows, findings and the page of one GPU, from constructed frames."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from msgspec.structs import replace
from textual.app import App, ComposeResult

from ltui.app.gpu_demo import DemoApp
from ltui.app.launch.launch_text import free_gpus_text
from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuHistory, GpuSeries, window_means
from ltui.app.panels.gpu_panel import GpuOverview, GpuScreen
from ltui.app.presentation import gpu_view
from ltui.app.screens.run import RunScreen
from ltui.training.gpu.findings import Finding, verdicts
from ltui.training.gpu.reading import NO_DRIVER, GpuProcess, GpuReading, GpuView
from ltui.training.state.gpu_values import GPU_READINGS
from ltui.training.state.run_snapshot import GpuProcessSnapshot, RunState
from ltui.widgets.run_tables import GpuTable
from ltui.widgets.tone import Tone
from tests.app.frames import NOW, frame, gpu, gpu_row, snapshot
from tests.app.one_run import one_run, reached, text_of_screen, until


def finding(index: int, text: str, *, kind: str = "thermal", level: str = "warning") -> Finding:
    return Finding(
        kind=kind, gpu=index, place=f"GPU {index}", text=text, level=level, ranks=(index,),
        since=NOW - 40, evidence={},
    )  # fmt: skip


def with_findings(*findings: Finding, count: int = 4) -> Frame:
    gpus = tuple(gpu(i) for i in range(count))
    return frame(snapshot=snapshot(gpus=gpus, verdicts=verdicts(findings)))


def test_the_same_on_several_gpus_is_said_once() -> None:
    shown = with_findings(*(finding(i, "thermal slowdown for 40 s") for i in (0, 1, 2)))
    text = gpu_view.findings_text(shown, 3).plain
    assert text == "▲ GPUs 0-2: thermal slowdown for 40 s (ranks 0-2)"
    tones = [row.tone for row in gpu_view.gpu_rows(shown)]
    assert tones == [Tone.WARN, Tone.WARN, Tone.WARN, Tone.PLAIN]


def test_other_figures_are_said_to_be_of_one() -> None:
    shown = with_findings(finding(0, "memory at 97 %"), finding(2, "memory at 98 %"))
    text = gpu_view.findings_text(shown, 3).plain
    assert text.startswith("▲ GPUs 0, 2: memory at 97 % (figures of GPU 0; similar on the others)")


def test_the_serious_come_first_and_what_does_not_fit_is_counted() -> None:
    found = [finding(i, f"wrong in way {'abcdef'[i]}", kind=f"k{i}") for i in range(5)]
    found.append(finding(5, "fell off the bus", kind="unreadable", level="error"))
    lines = gpu_view.findings_text(with_findings(*found, count=6), 3).plain.splitlines()
    assert lines[0].startswith("! GPU 5: fell off the bus")
    assert lines[-1] == "and 4 more: d diagnose"


def test_of_an_ended_run_nothing_stands() -> None:
    shown = with_findings(finding(0, "thermal slowdown for 40 s"))
    over = replace(shown, snapshot=replace(shown.snapshot, state=RunState.FINISHED))
    assert not gpu_view.findings_text(over, 3)


def test_what_is_refused_is_not_available() -> None:
    bare = gpu(0, utilisation_percent=None, power_w=None, power_limit_w=None, temperature_c=None)
    (row,) = gpu_view.gpu_rows(frame(snapshot=snapshot(gpus=(bare,))))
    assert row.utilisation is None
    texts = (row.utilisation_text, row.power_text, row.temperature.text, row.sm_text)
    assert set(texts) == {"n/a"}
    page = gpu_view.readings_text(bare, frame()).plain
    assert "ECC uncorrected       n/a" in page
    assert "processes\n  n/a" in page


def test_whose_processes() -> None:
    processes = (
        GpuProcessSnapshot(pid=7, owner="foreign", memory_bytes=1 << 30, user="ada", name="python"),
        GpuProcessSnapshot(pid=8, owner="rank", rank=2, memory_bytes=3 << 30, name="python"),
    )
    page = gpu_view.readings_text(gpu(0, processes=processes), frame()).plain
    rank, foreign = page.splitlines()[-2:]
    assert "pid 8" in rank
    assert "rank 2: python" in rank
    assert "foreign: python, user ada" in foreign


class BoardApp(App[None]):
    """The board alone, as ``ltui demo gpus`` shows it."""

    def compose(self) -> ComposeResult:
        yield GpuOverview()


@asynccontextmanager
async def board(size: tuple[int, int]) -> AsyncIterator[Callable[[Frame], Awaitable[list[str]]]]:
    """Yield a function that shows a frame on the board and returns the lines of the screen."""
    app = BoardApp()
    async with app.run_test(size=size) as pilot:

        async def lines_of(shown: Frame) -> list[str]:
            app.query_one(GpuOverview).show(shown, alone=True)
            await pilot.pause()
            return text_of_screen(app).splitlines()

        yield lines_of


def title_of(lines: list[str]) -> str:
    return next(line for line in lines if " GPU " in line)


def rows_below_title(lines: list[str]) -> int:
    return sum("°C" in line for line in lines[lines.index(title_of(lines)) + 1 :])


async def test_a_gpu_is_a_block_with_its_finding_and_its_processes() -> None:
    used = GpuProcessSnapshot(pid=8, owner="rank", rank=1, memory_bytes=3 << 30, name="python")
    gpus = (gpu(0), gpu(1, processes=(used,)), gpu(2))
    hot = verdicts([finding(1, "thermal slowdown for 40 s")])
    app = BoardApp()
    async with app.run_test(size=(156, 46)) as pilot:
        app.query_one(GpuOverview).show(
            frame(snapshot=snapshot(gpus=gpus, verdicts=hot)), alone=True
        )
        await pilot.pause()
        lines = text_of_screen(app).splitlines()
        first = next(n for n, line in enumerate(lines) if "▲ 1 " in line)
        assert "▲ thermal slowdown for 40 s" in lines[first + 1]
        assert "pid 8" in lines[first + 2]
        assert "3.00 GiB" in lines[first + 2]
        assert lines[first + 3].split()[0] == "2"
        assert "\n".join(lines).count("thermal slowdown") == 1
        assert lines[first].count("98 %") == 1, "each reading once"
        assert lines[first].count("━") > 20, "four bars"
        table = app.query_one(GpuTable)
        table.cursor = 3
        assert str(table.cursor_key).partition("\n")[0] == "1", "a row below a GPU opens it"


async def test_each_reading_stands_once() -> None:
    history = GpuHistory()
    used = GpuProcessSnapshot(pid=8, owner="rank", rank=0, memory_bytes=3 << 30, name="python")
    readings = {"temperature_c": 57.0, "power_w": 431.0, "processes": (used,)}
    for second in range(20):
        history.add([gpu(0, sampled_at=NOW - 20 + second, **readings)])
    drawn = frame(snapshot=snapshot(gpus=(gpu(0, **readings),)), gpu_series=history.series())
    async with one_run(drawn) as (pilot, app, _):
        for keys, kind in ((["3", "z"], RunScreen), (["enter"], GpuScreen)):
            await pilot.press(*keys)
            await reached(pilot, kind)
            await until(pilot, lambda: "memory, GiB" in text_of_screen(app))
            text = text_of_screen(app)
            assert [len(re.findall(rf"\b{value}\b", text)) for value in (57, 431)] == [1, 1]


def test_windows_stand_fast_and_keep_gaps() -> None:
    rows = [gpu_row(t, utilisation_percent=v) for t, v in ((0, 20), (1, 40), (21, 100), (22, 0))]
    first, gap, last = window_means(GpuSeries(tuple(rows[:3])), 10, 12)
    assert first == pytest.approx(0.3)
    assert last == 1.0
    assert math.isnan(gap)
    later = window_means(GpuSeries(tuple(rows)), 10, 12)
    assert later[0] == first


def test_the_book_is_bounded_and_takes_a_reading_once() -> None:
    book = GpuHistory()
    stored = {name: np.full(100, 10.0) for name in GPU_READINGS}
    book.load(0, {"t": NOW - 900.0 + np.arange(100.0), **stored})
    for second in range(400):
        for _ in range(2):
            book.add([gpu(0, sampled_at=NOW + second)])
    times = book.series()[0].values("t")
    assert len(times) <= 302
    assert times[-1] == NOW + 399
    assert len(set(times)) == len(times)


@pytest.mark.parametrize(("count", "heat"), [(4, False), (9, True)])
async def test_enter_opens_a_gpu(count: int, heat: bool) -> None:
    gpus = tuple(gpu(i) for i in range(count))
    async with one_run(frame(snapshot=snapshot(gpus=gpus))) as (pilot, app, screen):
        assert screen.query_one("#gpu-heat").display == heat
        assert len(screen.query_one(GpuTable).rows) == count
        await pilot.press("3", "down", "enter")
        opened = await reached(pilot, GpuScreen)
        assert opened.gpu == "1"
        await pilot.press("]")
        await until(pilot, lambda: opened.gpu == "2")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)


@pytest.mark.parametrize("size", [(56, 11), (76, 20), (156, 46)])
async def test_the_rows_of_eight_gpus_come_before_their_heat_strip(size: tuple[int, int]) -> None:
    many = [finding(i, f"wrong in way {'abcdefgh'[i]}", kind=f"k{i}") for i in range(8)]
    async with board(size) as lines_of:
        for shown in (with_findings(count=8), with_findings(*many, count=8)):
            assert rows_below_title(await lines_of(shown)) == 8


async def test_the_strips_of_many_gpus_leave_room_for_rows() -> None:
    async with board((78, 21)) as lines_of:
        assert rows_below_title(await lines_of(with_findings(count=64))) >= 5


async def test_columns_stay_while_something_is_noted() -> None:
    async with board((160, 30)) as lines_of:
        titles = []
        for changes in ({}, {"error": "fell off the bus"}, {"throttle_reasons": ("power cap",)}):
            gpus = (gpu(0), gpu(1, **changes))
            lines = await lines_of(frame(snapshot=snapshot(gpus=gpus)))
            titles.append(title_of(lines))
        assert len(set(titles)) == 1
        assert any("throttled: power cap" in line for line in lines)


async def test_the_heat_strip_says_what_its_blocks_mean() -> None:
    async with board((160, 46)) as lines_of:
        await lines_of(with_findings(count=9))
        legend, *_ = await lines_of(with_findings(count=9))
        assert "▁ 0 %  ▇ 100 %" in legend
        assert "utilisation" in legend


class Gpus:
    """A poller of the demo that shows some GPUs."""

    def __init__(self, count: int) -> None:
        self.frame = frame(snapshot=snapshot(gpus=tuple(gpu(i) for i in range(count))))

    def poll(self) -> Frame:
        return self.frame

    def stop(self) -> None:
        pass


async def test_escape_does_not_quit_the_demo() -> None:
    app = DemoApp(lambda: Gpus(4))  # type: ignore[arg-type, return-value]
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("escape")
        await pilot.pause()
        assert app.is_running
        assert app._exit is False
        await pilot.press("q")
        await pilot.pause()
        assert app._exit is True


@pytest.mark.parametrize(("size", "charts"), [((160, 50), 4), ((80, 24), 2), ((60, 15), 0)])
async def test_the_lines_below_the_gpus_show_the_history_of_the_selected_one(
    size: tuple[int, int], charts: int
) -> None:
    app = DemoApp(lambda: Gpus(8))  # type: ignore[arg-type, return-value]
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: bool(app.screen.query(GpuTable)))
        overview = app.screen.query_one(GpuOverview)
        await until(pilot, lambda: overview.query_one(GpuTable).rows != ())
        await until(pilot, lambda: overview.query_one("GpuCharts").display is (charts > 0))
        await pilot.press("down")
        panels = [p for p in app.screen.query("GpuCharts Panel") if p.display]
        assert len(panels if overview.query_one("GpuCharts").display else []) == charts
        if charts:
            await until(pilot, lambda: panels[0].border_title == "GPU 1 activity, % of time")


async def test_bars_of_utilisation_and_memory_fit_into_eighty_columns() -> None:
    async with one_run(with_findings(), (80, 24)) as (pilot, app, _):
        await pilot.press("3")
        table = app.screen.query_one(GpuTable)
        keys = {placed.column.key for placed in table._placed_columns()}
        assert {"bar", "memory_bar", "power", "temperature"} <= keys


# -- the line of the launch form about this machine's GPUs ---------------------------------------

GIB = 1 << 30


def reading(index: int, used: int = 0, *processes: GpuProcess) -> GpuReading:
    return GpuReading(
        index=index,
        label=str(index),
        name="NVIDIA H100 80GB HBM3",
        memory_used_bytes=used,
        memory_total_bytes=80 * GIB,
        processes=processes,
    )


def test_free_and_used() -> None:
    used = reading(1, 40 * GIB, GpuProcess(pid=77, user="ada"))
    text = free_gpus_text(GpuView(readings=(reading(0), used))).plain
    assert "GPUs: 1 of 2 free" in text
    assert "free:1 chooses the one with the most free memory" in text
    first, second = text.splitlines()[1:]
    assert "80.0 GiB left  free" in first
    assert "40.0 GiB left  used by pid 77 (user ada)" in second


def test_of_many_those_in_use_come_first() -> None:
    busy = reading(60, 3 * GIB, GpuProcess(pid=5))
    view = GpuView(readings=(*(reading(i) for i in range(60)), busy))
    lines = free_gpus_text(view).plain.splitlines()
    assert lines[0].startswith("GPUs: 60 of 61 free")
    assert "60  H100" in lines[1]
    assert lines[-1] == "  and 53 more"


def test_none_and_a_hung_driver() -> None:
    assert NO_DRIVER in free_gpus_text(GpuView(note=NO_DRIVER)).plain
    hung = GpuView(readings=(reading(0),), note="driver has not answered for 4 s")
    assert "driver has not answered for 4 s" in free_gpus_text(hung).plain
