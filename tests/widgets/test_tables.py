"""Rank and GPU tables in a small app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.pilot import Pilot

from ltui.widgets.columns import SAMPLES, Cells, Column, LazyRows
from ltui.widgets.run_tables import GpuTable, RankTable
from ltui.widgets.table import Table
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, GpuRow, RankRow
from tests.widgets.board import rank_metrics


def rank_row(number: int, **more: object) -> RankRow:
    row = RankRow(
        rank=f"r{number}", pid=str(48_000 + number), device=f"cuda:{number}", phase="backward",
        step="1 204", age="12 ms", strip=(0.1, 0.1, 0.12), state=Cell(text="ok"),
        metrics=rank_metrics("7.84 k img/s", "98 %", "2.10 GiB"),
    )  # fmt: skip
    return replace(row, **more)


def gpu_row(number: int, **more: object) -> GpuRow:
    row = GpuRow(
        index=str(number), name="NVIDIA H200", ranks=f"r{number}", utilisation=0.98,
        utilisation_text="98 %", memory=0.43, memory_text="61.2 / 140 GiB",
        power_text="612 / 700 W", temperature=Cell(text="64 °C"), clock_text="1 980 MHz",
        strip=(0.9, 0.95, 0.98),
    )  # fmt: skip
    return replace(row, **more)


STALLED = {
    "state": Cell(text="STALLED", tone=Tone.BAD),
    "age": "8.2 s",
    "phase": "fetch data",
    "note": "worker 4711",
}


class Tables(App[None]):
    def __init__(self, ranks: int = 4) -> None:
        super().__init__()
        self.count = ranks
        self.seen: list[tuple[str, str | None]] = []

    def compose(self) -> ComposeResult:
        gpus, ranks = GpuTable(), RankTable()
        gpus.set_rows([gpu_row(n) for n in range(2)])
        if self.count:
            ranks.set_rows([rank_row(n) for n in range(self.count)])
        yield gpus
        yield ranks

    def on_table_row_selected(self, message: Table.RowSelected) -> None:
        self.seen.append(("selected", message.key))

    def on_table_row_highlighted(self, message: Table.RowHighlighted) -> None:
        self.seen.append(("highlighted", message.key))

    @property
    def ranks(self) -> RankTable:
        return self.query_one(RankTable)


def text_of(table: Table) -> list[str]:
    return [strip.text for strip in table.render_lines(table.size.region)]


@asynccontextmanager
async def tables(width: int = 120, ranks: int = 4) -> AsyncIterator[tuple[Pilot[Any], Tables]]:
    app = Tables(ranks)
    async with app.run_test(size=(width, 24)) as pilot:
        await pilot.pause()
        yield pilot, app


async def lines_of(pilot: Pilot[Any], app: Tables, *rows: RankRow) -> list[str]:
    """Show some ranks and return the lines of their table."""
    app.ranks.set_rows(rows)
    await pilot.pause()
    return text_of(app.ranks)


async def test_lines_fit_and_numbers_keep_their_columns() -> None:
    async with tables(60) as (pilot, app):
        for width in (60, 80, 100, 160, 220):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            lines = text_of(app.ranks)
            assert all(len(line) == width for line in lines)
            assert [line.find("1 204") for line in lines[1:5]] == [lines[1].find("1 204")] * 4
            assert "state" in lines[0]
            gpus = text_of(app.query_one(GpuTable))
            assert "98 %" in gpus[1]
            assert "61.2 / 140 GiB" in gpus[1]


async def test_a_stalled_rank_is_marked_by_sign_and_word() -> None:
    async with tables(80) as (pilot, app):
        rows = [rank_row(0), rank_row(1, **STALLED), *(rank_row(n) for n in (2, 3))]
        lines = await lines_of(pilot, app, *rows)
        assert "! STALLED" in lines[2]
        assert "fetch data" in lines[2]
        assert not any("!" in line for line in (lines[1], *lines[3:]))
        # A part repainted shows what the whole would.
        lines = await lines_of(pilot, app, rank_row(0, age="99 ms"), *rows[1:])
        app.ranks.refresh()
        await pilot.pause()
        assert lines == text_of(app.ranks)
        assert "99 ms" in lines[1]


async def test_only_changed_cells_are_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tables(160) as (_, app):
        table = app.ranks
        painted: list[Region] = []
        monkeypatch.setattr(table, "refresh", lambda *regions, **_: painted.extend(regions))
        table.set_rows([rank_row(n) for n in range(4)])
        assert painted == []
        table.set_rows([rank_row(0, step="1 205"), *(rank_row(n) for n in range(1, 4))])
        assert [(region.y, region.height, region.width) for region in painted] == [(1, 1, 10)]


async def test_a_new_row_is_laid_out_once_and_repainted_in_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tables(160) as (pilot, app):
        table = app.ranks
        asked: list[str] = []
        painted: list[Region] = []
        make, refresh = table.cells_of, table.refresh

        def noted(row: RankRow) -> object:
            asked.append(row.rank)
            return make(row)

        def refreshed(*regions: Region, **more: bool) -> object:
            painted.extend(regions)
            return refresh(*regions, **more)

        monkeypatch.setattr(table, "cells_of", noted)
        monkeypatch.setattr(table, "refresh", refreshed)
        rows = [rank_row(n) for n in range(4)]
        rows[2] = rank_row(2, step="1 205", age="1 s")
        assert "1 205" in (await lines_of(pilot, app, *rows))[3]
        assert asked.count("r2") == 1
        assert len(painted) == 1


async def test_a_thousand_ranks_scroll_and_only_seen_rows_are_made() -> None:
    async with tables(ranks=1024) as (pilot, app):
        made: list[str] = []
        table = app.ranks
        table.focus()
        await pilot.press("end")
        await pilot.pause()
        assert table.cursor_key == "r1023"
        assert "r1023" in "".join(text_of(table))
        assert "rank" in text_of(table)[0]
        original = table.cells_of

        def recorded(row: RankRow) -> Mapping[str, tuple[Cell, ...]]:
            made.append(row.rank)
            return original(row)

        table.cells_of = recorded  # type: ignore[method-assign]
        table.set_rows([rank_row(n, step="1 205") for n in range(1024)])
        await pilot.pause()
        assert "r1023" in made
        assert "r5" not in made
        assert len(made) < 200


async def test_the_cursor_stays_on_its_row_when_rows_come_and_go() -> None:
    async with tables() as (pilot, app):
        app.ranks.focus()
        await pilot.press("down", "down")
        for numbers, key in (
            (range(4), "r2"),
            ((9, 8, 0, 1, 2, 3), "r2"),
            ((0,), "r0"),
            ((), None),
        ):
            app.ranks.set_rows([rank_row(n) for n in numbers])
            assert app.ranks.cursor_key == key
        await pilot.press("down", "enter", "end", "pageup")
        await pilot.pause()
        assert "no rank has reported yet" in "".join(text_of(app.ranks))
        assert app.seen[-2:] == [("highlighted", "r0"), ("highlighted", None)]


async def test_a_click_moves_the_cursor_and_enter_or_a_double_click_opens() -> None:
    async with tables() as (pilot, app):
        app.ranks.focus()
        await pilot.press("down", "enter")
        # The cursor is marked only where the focus is.
        assert text_of(app.ranks)[2].startswith("▸")
        assert not any("▸" in line for line in text_of(app.query_one(GpuTable)))
        await pilot.click(RankTable, offset=(10, 4))
        await pilot.pause()
        assert app.ranks.cursor_key == "r3"
        await pilot.click(RankTable, offset=(10, 0))
        assert app.ranks.cursor_key == "r3"
        await pilot.double_click(GpuTable, offset=(10, 2))
        await pilot.pause()
        assert [k for what, k in app.seen if what == "selected"] == ["r1", "1"]
        assert not any("▸" in line for line in text_of(app.ranks))


async def test_markup_in_a_row_stays_text_and_columns_without_any_value_are_left_out() -> None:
    async with tables(200) as (pilot, app):
        note = "[bold]x[/bold] [@click=quit]"
        for cpu, shown in (("n/a", False), ("5 %", True)):
            row = rank_row(0, note=note, metrics=rank_metrics("7 img/s", cpu, "n/a"))
            lines = await lines_of(pilot, app, row)
            assert "[bold]x[/bold]" in lines[1]
            assert ("CPU" in lines[0]) == shown
            assert "memory" not in lines[0]


def test_letters_are_left_to_the_screens() -> None:
    """``k`` kills on a run screen: a table must not take it."""
    for table in (RankTable, GpuTable):
        keys = {key.strip() for b in table.BINDINGS for key in b.key.split(",")}  # type: ignore[union-attr]
        assert not any(len(key) == 1 for key in keys)


async def test_a_note_is_read_whole_at_the_cost_of_lesser_columns() -> None:
    note = "waiting for the script to start Lightning"
    async with tables() as (pilot, app):
        lines = await lines_of(pilot, app, rank_row(0, note=note))
        assert note in lines[1]
        assert "pid" not in lines[0]


class Words(Table[str]):
    """A table whose column takes the whole width."""

    COLUMNS = (Column(key="word", title="word", width=4, right=True, grows=True),)

    def key_of(self, row: str) -> str:
        return row

    def cells_of(self, row: str) -> Mapping[str, Cells]:
        return {"word": (Cell(text=row),)}


async def test_columns_end_beside_a_scrollbar_that_comes_and_goes() -> None:
    class OneTable(App[None]):
        def compose(self) -> ComposeResult:
            yield Words()

    app = OneTable()
    async with app.run_test(size=(40, 10)) as pilot:
        table = app.query_one(Words)
        for count, width in ((3, 40), (50, 39), (2, 40)):
            table.set_rows([f"word {number}" for number in range(count)])
            await pilot.pause()
            assert table.show_vertical_scrollbar == (count == 50)
            assert table.render_line(1).text[:width].endswith("word 0")


def lazy(
    count: int, built: list[int], *, step: str = "1 204", widest: int = 0
) -> LazyRows[RankRow]:
    def build(index: int) -> RankRow:
        built.append(index)
        return rank_row(index, step=step)

    return LazyRows([f"r{n}" for n in range(count)], build, [widest])


def test_a_row_is_built_once_and_only_if_needed() -> None:
    built: list[int] = []
    rows = lazy(1000, built)
    assert len(rows) == 1000
    assert rows[999].rank == "r999"
    assert rows[-1] is rows[999]
    assert [row.rank for row in rows[2:4]] == ["r2", "r3"]
    assert built == [999, 2, 3]
    with pytest.raises(IndexError):
        rows[1000]


def test_samples_are_the_first_rows_and_the_widest_one() -> None:
    assert len(lazy(1000, [], widest=700).samples()) == SAMPLES + 1
    assert len(lazy(3, []).samples()) == 3


async def test_a_table_builds_the_rows_that_it_shows() -> None:
    async with tables() as (pilot, app):
        table = app.ranks
        built: list[int] = []
        table.set_rows(lazy(1000, built))
        await pilot.pause()
        table.cursor = 500
        await pilot.pause()
        assert any("r500" in line for line in text_of(table))
        assert len(built) < 100
        assert table.keys[500] == table.cursor_key == "r500"
        built.clear()
        table.set_rows(lazy(1000, built, step="1 205"))
        await pilot.pause()
        assert "1 205" in "".join(text_of(table))
        assert len(built) < 100
