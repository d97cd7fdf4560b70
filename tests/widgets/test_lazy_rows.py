"""Rows that a table builds only if they are drawn."""

from __future__ import annotations

import pytest

from ltui.widgets.columns import SAMPLES, LazyRows
from ltui.widgets.rank_table import RankTable
from ltui.widgets.view_models import RankRow
from tests.widgets.test_tables import Tables, rank_row, text_of


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
    app = Tables()
    async with app.run_test(size=(120, 24)) as pilot:
        table = app.query_one(RankTable)
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
