"""The head of a run at every width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from ltui.widgets.header import banner_and_note_lines, status_line
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import HeaderViewModel

SHAPE = HeaderViewModel(
    name="brave-owl", preset="cifar10-cnn", state="running", state_sign="●", tone=Tone.GOOD,
    epoch="epoch 3/30", step="step 1 204/2 930", share=0.41, eta="12 m 08 s left",
    elapsed="8 m 31 s", attempt="attempt 2",
)  # fmt: skip
PARTS = (
    "● running", "brave-owl", "cifar10-cnn", "epoch 3/30", "step 1 204/2 930",
    "41 %", "12 m 08 s left", "8 m 31 s", "attempt 2",
)  # fmt: skip


def text(view_model: HeaderViewModel, width: int) -> str:
    return "".join(cell.text for cell in status_line(view_model, width))


def test_everything_is_there_where_there_is_room() -> None:
    line = text(SHAPE, 160)
    assert all(part in line for part in PARTS)
    assert cell_len(line) == 160


@given(st.integers(24, 200))
def test_parts_are_whole_or_absent(width: int) -> None:
    line = text(SHAPE, width)
    assert cell_len(line) == width
    left = line
    for part in PARTS:
        left = left.replace(part, "", 1)
    assert set(left) <= set(" ━╸┈")


def test_a_long_command_takes_the_room_that_is_left() -> None:
    command = "torchrun --nproc-per-node 2 train.py --lr 0.02 --epochs 60"
    shape = replace(SHAPE, preset=command)
    assert "train.py" in text(shape, 160)
    assert all(part in text(shape, 160) for part in PARTS if part != SHAPE.preset)
    assert "torchrun --nproc" in text(shape, 150)
    assert all(cell_len(text(shape, width)) == width for width in range(24, 200))


def test_at_eighty_columns_what_matters_is_there() -> None:
    line = text(SHAPE, 80)
    for part in ("● running", "brave-owl", "step 1 204/2 930", "41 %", "12 m 08 s left"):
        assert part in line


def test_an_unknown_end_shows_no_bar_and_no_share() -> None:
    line = text(replace(SHAPE, share=None, eta=""), 160)
    assert "%" not in line
    assert "━" not in line


@pytest.mark.parametrize("width", [60, 80, 160])
def test_banner_and_notes_are_wrapped_between_words(width: int) -> None:
    banner = "STALLED 8 s: rank 2 waits for DataLoader worker 4711, frozen in augment.py:88"
    found = banner_and_note_lines(
        replace(SHAPE, banner=banner, notes=("history incomplete: disk full",)), width
    )
    assert all(cell_len(cell.text) <= width for cell in found)
    assert " ".join(c.text for c in found if c.tone is Tone.BAD) == banner
    assert found[-1].text == "history incomplete: disk full"
    assert banner_and_note_lines(SHAPE, width) == ()


def test_a_name_of_any_length_leaves_room_for_the_rest() -> None:
    line = text(replace(SHAPE, name="x" * 200, preset="python train.py " * 20), 100)
    assert cell_len(line) == 100
    assert "…" in line
    assert "step 1 204/2 930" in line
