"""Pictures of the widgets. ``--snapshot-update`` replaces them; check the new ones by eye."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.widgets.board import Board


@pytest.mark.parametrize(
    ("theme", "size"),
    [("ltui-dark", (60, 40)), ("ltui-light", (100, 40)), ("ltui-dark", (160, 50))],
    ids=["60-dark", "100-light", "160-dark"],
)
def test_board(snap_compare: Callable[..., bool], theme: str, size: tuple[int, int]) -> None:
    assert snap_compare(Board(theme), terminal_size=size)
