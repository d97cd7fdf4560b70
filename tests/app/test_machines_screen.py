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
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.widgets.header import RunHeader
from ltui.widgets.line_sheet import LiveLines
from ltui.widgets.log_view import LogLines
from ltui.widgets.run_tables import RankTable
from tests.app.frames import frame
from tests.app.machine_frames import large_run, machine_frame, machine_run, stalled_run, unreachable
from tests.app.one_run import OneRun, Script, one_run, settled, shown, until

SMALL, NORMAL = (80, 24), (160, 50)


def keys(screen: RunScreen) -> list[str]:
    return [row.key for row in screen.query_one(MachineTable).rows]


def focused_id(screen: RunScreen) -> str | None:
    return screen.focused.id if screen.focused is not None else None


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
        await until(pilot, lambda: isinstance(screen.focused, MachineTable))
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
        await until(pilot, lambda: keys(screen) == ["n1", "r11", "n0"])
        await pilot.press("4", "home", "enter")
        await until(pilot, lambda: len(keys(screen)) == 10)
        await pilot.press("enter")
        await listed(pilot, screen, ["n1", "n0"])
        script.frame = machine_frame()
        await until(pilot, lambda: keys(screen) == ["n0", "n1"])


async def test_the_filter_lists_what_matches_and_escape_clears_it() -> None:
    async with one_run(machine_frame(stalled_run()), NORMAL) as (pilot, _, screen):
        await pilot.press("4", "slash")
        await until(pilot, lambda: isinstance(screen.focused, Input))
        await pilot.press(*"stalled")
        await listed(pilot, screen, ["n1", "r11"])
        panel = screen.query_one(RanksPanel)
        await until(pilot, lambda: str(panel.border_subtitle) == "1 of 16 ranks match")
        hints = {hint.words for hint in screen.query_one(KeyFooter)._hints}
        assert hints == {"to the list", "clear the filter", "help"}
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(screen.focused, MachineTable))
        assert panel.is_filtering
        await pilot.press("escape")
        await until(pilot, lambda: not panel.is_filtering)
        await listed(pilot, screen, ["n1", "r11", "n0"])
        await pilot.press("slash", *"nothing")
        await listed(pilot, screen, [])
        assert any("no match" in line for line in text_of(screen.query_one(MachineTable)))


async def test_the_rows_that_match_a_filter_fit_into_the_panel() -> None:
    async with one_run(machine_frame(), NORMAL) as (pilot, _, screen):
        await pilot.press("4", "slash")
        await until(pilot, lambda: isinstance(screen.focused, Input))
        await pilot.press(*"gpu-b")
        await listed(pilot, screen, ["n1"])
        table = screen.query_one(MachineTable)
        await until(pilot, lambda: table.size.height == 2)
        await pilot.press(*"nothing")
        await listed(pilot, screen, [])
        await until(pilot, lambda: table.size.height == 2)


async def test_slash_elsewhere_finds_in_the_log() -> None:
    async with one_run(machine_frame(), NORMAL) as (pilot, _, screen):
        await pilot.press("5", "slash")
        await until(pilot, lambda: focused_id(screen) == "log-query")


async def test_enter_on_a_rank_opens_its_log_with_the_name_of_its_machine() -> None:
    async with one_run(machine_frame(stalled_run()), NORMAL) as (pilot, _, screen):
        await pilot.press("4", "home", "down", "enter")
        await until(pilot, lambda: screen.panels.log_panel.source == 11)
        assert "log, gpu-b:11" in str(screen.query_one("#log").border_title)


async def test_a_log_is_chosen_from_a_list() -> None:
    async with one_run(machine_frame(), NORMAL) as (pilot, app, screen):
        assert any("gpu-b:" in line for line in text_of(screen.query_one(LogLines)))
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, LogChooser))
        assert app.screen.query_one(OptionList).option_count == 19
        await pilot.press(*"gpu-b:12")
        await until(pilot, lambda: app.screen.query_one(OptionList).option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert screen.panels.log_panel.source == 12
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, LogChooser))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, RunScreen))
        assert screen.panels.log_panel.source == 12


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
                await pilot.pause(0.3)
            await until(pilot, lambda: fits(screen))
            await until(pilot, lambda: keys(screen)[:1] == ["n11"])
        assert len(screen.query_one(GpuPanel).query_one("#gpu-table").rows) == 1024  # type: ignore[attr-defined]


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
        await until(pilot, lambda: focused_id(screen) == "log-query")


async def test_machines_that_appear_later_replace_the_table_of_ranks() -> None:
    run: RunSnapshot = machine_run()
    script = Script(machine_frame(replace(run, nodes=())))
    async with one_run(script, NORMAL) as (pilot, _, screen):
        await pilot.press("4")
        await until(pilot, lambda: isinstance(screen.focused, RankTable))
        script.frame = machine_frame(run)
        await until(pilot, lambda: screen.query(MachineTable))
        await until(pilot, lambda: isinstance(screen.focused, MachineTable))
        await listed(pilot, screen, ["n0", "n1"])


async def test_lines_of_machines_that_join_later_get_the_names_of_the_machines() -> None:
    run = machine_run()
    unnamed = tuple(replace(node, ranks=()) for node in run.nodes)
    lines = machine_frame(run).log
    script = Script(machine_frame(replace(run, nodes=unnamed, ranks=()), log=lines))
    async with one_run(script, NORMAL) as (pilot, _, screen):
        log = screen.query_one(LogLines)
        assert not any("gpu-b:10" in line for line in text_of(log))
        script.frame = machine_frame(run)
        await until(pilot, lambda: any("gpu-b:10" in line for line in text_of(log)))
