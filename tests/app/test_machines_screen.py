"""The run screen of a run on several machines, driven by keys on constructed frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from ltui.app.keys.footer import KeyFooter, listed_keys
from ltui.app.panels.gpu_panel import GpuPanel
from ltui.app.panels.ranks_panel import MachineTable, RanksPanel
from ltui.app.screens.choosers import LogChooser
from ltui.app.screens.run import RunScreen
from ltui.widgets.header import RunHeader
from ltui.widgets.line_sheet import LiveLines
from ltui.widgets.log_view import LogLines
from ltui.widgets.run_tables import GpuTable, RankTable
from tests.app.frames import frame
from tests.app.machine_frames import large_run, machine_frame, machine_run, stalled_run, unreachable
from tests.app.one_run import OneRun, Script, one_run, reached, settled, shown, until

SMALL, NORMAL = (80, 24), (160, 50)


def keys(screen: RunScreen) -> list[str]:
    return [row.key for row in screen.query_one(MachineTable).rows]


async def focused(pilot: Pilot[Any], what: type | str) -> None:
    """Wait until a widget of this kind, or with this id, has the focus."""

    def is_focused() -> bool:
        widget = pilot.app.screen.focused
        if isinstance(what, str):
            return widget is not None and widget.id == what
        return isinstance(widget, what)

    await until(pilot, is_focused)


async def listed(pilot: Pilot[Any], screen: RunScreen, expected: list[str]) -> None:
    """Wait until the table has these rows."""
    await until(pilot, lambda: keys(screen) == expected)


def fits(screen: RunScreen) -> bool:
    """Return whether the table of machines is wholly on the screen, with at least two rows."""
    table = screen.query_one(MachineTable)
    return table.size.height >= 3 and screen.region.contains_region(table.region)


def text_of(widget: Any) -> list[str]:
    return [strip.text.rstrip() for strip in widget.render_lines(widget.size.region)]


@pytest.mark.parametrize("size", [SMALL, NORMAL])
@pytest.mark.parametrize("name", ["stalled", "unreachable", "large"])
def test_pictures(snap_compare: Callable[..., bool], name: str, size: tuple[int, int]) -> None:
    runs = {
        "stalled": stalled_run,
        "unreachable": lambda: machine_run(machines={1: unreachable(1)}),
        "large": large_run,
    }
    app = OneRun(Script(machine_frame(runs[name]())))

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        if size == SMALL:
            await pilot.press("4")
        # The grid knows its height only after the first layout.
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=drawn)


async def test_enter_and_space_unfold_a_machine_and_fold_it_again() -> None:
    async with one_run(machine_frame(), NORMAL) as (pilot, _, screen):
        await pilot.press("4")
        await focused(pilot, MachineTable)
        await listed(pilot, screen, ["n0", "n1"])
        await pilot.press("down", "enter")
        await listed(pilot, screen, ["n0", "n1", *(f"r{n}" for n in range(8, 16))])
        await pilot.press("down", "down", "space")
        await listed(pilot, screen, ["n0", "n1"])
        assert screen.query_one(MachineTable).cursor_key == "n1"
        await pilot.press("u")
        await until(pilot, lambda: len(keys(screen)) == 18)
        await pilot.press("u")
        await listed(pilot, screen, ["n0", "n1"])


async def test_the_choice_of_the_user_stays_and_rows_follow_the_frames() -> None:
    script = Script(machine_frame())
    async with one_run(script, NORMAL) as (pilot, _, screen):
        script.frame = machine_frame(stalled_run())
        await listed(pilot, screen, ["n1", "r11", "n0"])
        await pilot.press("4", "home", "enter")
        await until(pilot, lambda: len(keys(screen)) == 10)
        await pilot.press("enter")
        await listed(pilot, screen, ["n1", "n0"])
        script.frame = machine_frame()
        await listed(pilot, screen, ["n0", "n1"])


async def test_the_filter_lists_what_matches_in_its_panel_and_escape_clears_it() -> None:
    async with one_run(machine_frame(stalled_run()), NORMAL) as (pilot, _, screen):
        panel, table = screen.query_one(RanksPanel), screen.query_one(MachineTable)
        await pilot.press("4", "slash")
        await focused(pilot, Input)
        await pilot.press(*"stalled")
        await listed(pilot, screen, ["n1", "r11"])
        await until(pilot, lambda: str(panel.border_subtitle) == "1 of 16 ranks match")
        hints = {hint.words for hint in screen.query_one(KeyFooter)._hints}
        assert hints == {"to the list", "clear the filter", "help"}
        await pilot.press("enter")
        await focused(pilot, MachineTable)
        assert panel.is_filtering
        await pilot.press("escape")
        await until(pilot, lambda: not panel.is_filtering)
        await listed(pilot, screen, ["n1", "r11", "n0"])
        await pilot.press("slash", *"gpu-a")
        await listed(pilot, screen, ["n0"])
        await until(pilot, lambda: table.size.height == 2)
        await pilot.press(*"nothing")
        await listed(pilot, screen, [])
        await until(pilot, lambda: table.size.height == 2)
        assert any("no match" in line for line in text_of(table))
        await pilot.press("escape", "5", "slash")
        await focused(pilot, "log-query")


async def test_a_log_is_chosen_from_a_list_or_by_its_rank() -> None:
    async with one_run(machine_frame(stalled_run()), NORMAL) as (pilot, app, screen):
        log = screen.panels.log_panel
        assert any("gpu-b:" in line for line in text_of(screen.query_one(LogLines)))
        await pilot.press("v")
        options = (await reached(pilot, LogChooser)).query_one(OptionList)
        assert options.option_count == 19
        await pilot.press(*"gpu-b:12")
        await until(pilot, lambda: options.option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen)
        assert log.source == 12
        await pilot.press("v")
        await reached(pilot, LogChooser)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        assert log.source == 12
        await pilot.press("4", "home", "down", "enter")
        await until(pilot, lambda: log.source == 11)
        assert "log, gpu-b:11" in str(screen.query_one("#log").border_title)


async def test_a_thousand_ranks_are_readable_on_a_small_terminal() -> None:
    async with one_run(machine_frame(large_run()), SMALL) as (pilot, _, screen):
        assert "128 machines, 1" in screen.query_one(RunHeader).render_line(0).text
        await pilot.press("4")
        await settled(pilot)
        grid = text_of(screen.query_one("#rank-grid", LiveLines))
        cells = [line.split(maxsplit=1)[1] for line in grid[2:]]
        assert grid[2].startswith("   r0 ")
        assert sum(len(line.replace(" ", "")) for line in cells) == 1024
        assert "x" in cells[1]
        table = text_of(screen.query_one(MachineTable))
        assert "gpu-11  88-95" in table[1]
        assert "! DEAD" in table[2]
        assert max(map(len, (*grid, *table))) <= 80


async def test_every_size_shows_machines_and_gpus() -> None:
    async with one_run(machine_frame(large_run()), (200, 60)) as (pilot, _, screen):
        for size in ((80, 24), (60, 15), (100, 30), (130, 40), (160, 48), (160, 50), (200, 60)):
            await pilot.resize_terminal(*size)
            for key in "34":
                await pilot.press(key)
                await pilot.pause()
            await until(pilot, lambda: fits(screen))
            await until(pilot, lambda: keys(screen)[:1] == ["n11"])
        assert len(screen.query_one(GpuPanel).query_one(GpuTable).rows) == 1024


async def test_only_the_rows_that_changed_are_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine_frame(large_run())
    script = Script(first)
    async with one_run(script, NORMAL) as (pilot, _, screen):
        await settled(pilot)
        painted: list[Region] = []
        widgets = (screen.query_one(MachineTable), screen.query_one("#rank-grid", LiveLines))
        for widget in widgets:
            monkeypatch.setattr(
                widget, "refresh", lambda *regions, **_: painted.extend(regions or [None])
            )
        screen.query_one(RanksPanel).show(replace(first, now=first.now + 0.2), alone=False)
        assert painted == []
        ranks = list(first.snapshot.ranks)
        ranks[1] = replace(ranks[1], step_s=0.4)
        changed = replace(first, snapshot=replace(first.snapshot, ranks=tuple(ranks)))
        screen.query_one(RanksPanel).show(changed, alone=False)
        # The line of rank 1 in the grid, and the row of its machine.
        assert [(region.height, region.y) for region in painted] == [(1, 1), (1, 6)]


async def test_on_one_machine_there_is_neither_a_filter_nor_a_key_for_it() -> None:
    async with one_run(frame(), NORMAL) as (pilot, _, screen):
        assert not screen.query(MachineTable)
        assert not screen.query("#rank-filter")
        assert not any("Unfold" in key.about for key in listed_keys(screen))
        await pilot.press("4", "slash")
        await focused(pilot, "log-query")


async def test_machines_that_appear_later_replace_the_table_of_ranks_and_name_the_lines() -> None:
    run = machine_run()
    unnamed = tuple(replace(node, ranks=()) for node in run.nodes)
    joining = machine_frame(replace(run, nodes=unnamed, ranks=()), log=machine_frame(run).log)
    script = Script(machine_frame(replace(run, nodes=())))
    async with one_run(script, NORMAL) as (pilot, _, screen):
        log = screen.query_one(LogLines)
        await pilot.press("4")
        await focused(pilot, RankTable)
        script.frame = joining
        await until(pilot, lambda: screen.query(MachineTable))
        await focused(pilot, MachineTable)
        assert not any("gpu-b:10" in line for line in text_of(log))
        script.frame = machine_frame(run)
        await listed(pilot, screen, ["n0", "n1"])
        await until(pilot, lambda: any("gpu-b:10" in line for line in text_of(log)))
