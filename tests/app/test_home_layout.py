"""The panels of the home screen by terminal size and by choice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ltui.app.screens.home_layout import FORM, PRESETS, RUNS, YAML, HomeLayout

SIZES = [(200, 60), (160, 50), (120, 40), (80, 24), (60, 15)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_runs_come_first_if_there_are_any(width: int, height: int) -> None:
    none = HomeLayout(width=width, height=height)
    assert none.visible() >= {PRESETS, FORM}
    assert RUNS not in none.visible()
    some = replace(none, has_runs=True)
    assert some.visible() == ({RUNS, PRESETS} if width >= 120 else {RUNS})
    assert replace(some, side_presets=False).visible() == {RUNS}
    form = some.showing(FORM)
    assert form.visible() == none.visible()
    assert form.showing(RUNS) == some
    assert form.maximised(FORM).visible() == {FORM}
    assert form.maximised(FORM).maximised(FORM) == form


def test_the_presets_beside_the_runs_are_shown_without_a_form() -> None:
    wide = HomeLayout(width=160, height=50, has_runs=True)
    assert wide.showing(PRESETS) == wide
    assert replace(wide, width=80).showing(PRESETS).visible() == {PRESETS, FORM}
    assert YAML in wide.showing(FORM).visible()
    assert HomeLayout(width=40, height=10, has_runs=True).visible() == frozenset()
