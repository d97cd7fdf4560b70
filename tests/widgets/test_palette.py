"""Themes: colours that stay apart wherever they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from rich.color import Color, ColorSystem, ColorType
from textual.app import App
from textual.color import Color as TextualColor
from textual.theme import Theme

from ltui.widgets.charts.chart_options import COLOURS
from ltui.widgets.palette import (
    COLOURBLIND_SERIES,
    CONTRAST_SERIES,
    DARK_SERIES,
    LIGHT_SERIES,
    LTUI_ANSI,
    LTUI_COLOURBLIND,
    LTUI_CONTRAST,
    LTUI_DARK,
    LTUI_LIGHT,
    THEMES,
    TRUE_COLOUR_THEMES,
    line_styles,
)
from ltui.widgets.tone import Tone

PALETTES = [DARK_SERIES, LIGHT_SERIES, CONTRAST_SERIES, COLOURBLIND_SERIES]


@pytest.mark.parametrize("colours", PALETTES)
def test_curves_have_different_colours_on_poor_terminals_which_are_entries_of_the_256(
    colours: tuple[str, ...],
) -> None:
    for system in (ColorSystem.STANDARD, ColorSystem.EIGHT_BIT):
        entries = [Color.parse(colour).downgrade(system) for colour in colours]
        assert len({entry.number for entry in entries}) == len(colours) == COLOURS
    assert [entry.get_truecolor().hex for entry in entries] == list(colours)


@pytest.mark.parametrize("theme", TRUE_COLOUR_THEMES, ids=lambda t: t.name)
def test_text_can_be_read_on_its_background(theme: Theme) -> None:
    variables = _colours(theme)
    background = TextualColor.parse(variables["background"])
    names = ["foreground", "success", "warning", "error", "accent", "ltui-dim"]
    names += [f"series-{n}" for n in range(8)]
    wanted = 4.5 if theme is not LTUI_CONTRAST else 7.0
    for name in names:
        shown = TextualColor.parse(variables[name])
        limit = 3.0 if name.startswith(("series", "ltui-dim")) else wanted
        assert _contrast(shown, background) >= limit, name


def _contrast(one: TextualColor, other: TextualColor) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: TextualColor) -> float:
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
                 for c in colour.normalized]  # fmt: skip
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


class Themed(App[object]):
    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)


@pytest.mark.parametrize("name", [*(t.name for t in THEMES), "nord", "textual-light", "ansi-dark"])
async def test_every_theme_gives_every_style(name: str) -> None:
    app = Themed()
    async with app.run_test():
        app.theme = name
        paint = line_styles(app)
        assert set(paint.tones) == set(Tone)
        assert len(paint.series) == len(paint.faint_series) == 8


async def test_without_colour_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        app = Themed()
    async with app.run_test():
        paint = line_styles(app)
        styles = [*paint.tones.values(), *paint.series, paint.selected, paint.match]
        assert all(s.color is None and s.bgcolor is None for s in styles)
        assert paint.of(Tone.BAD) != paint.of(Tone.PLAIN)
        assert paint.of(Tone.WARN) != paint.of(Tone.PLAIN)


VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip
"""What people with each kind of vision see of linear RGB, by Machado, Oliveira and Fernandes
(2009)."""
XYZ = np.array(
    ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
     (0.0193339, 0.1191920, 0.9503041)),
)  # fmt: skip
WHITE = np.array((0.95047, 1.0, 1.08883))


def seen(colour: str, vision: str) -> np.ndarray:
    """Return the CIELAB coordinates of a colour as people with that vision see it."""
    rgb = np.array(TextualColor.parse(colour).normalized)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / WHITE
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array((116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)))


def smallest_difference(colours: Sequence[str]) -> float:
    """Return the smallest distance (CIE 1976) of two colours for any kind of vision."""
    pairs = list(combinations(colours, 2))
    return min(
        float(np.linalg.norm(seen(one, vision) - seen(other, vision)))
        for vision in VISION
        for one, other in pairs
    )


@pytest.mark.parametrize("theme", [LTUI_CONTRAST, LTUI_COLOURBLIND], ids=lambda t: t.name)
def test_states_differ_for_every_kind_of_colour_vision(theme: Theme) -> None:
    colours = _colours(theme)
    tones = [colours[name] for name in ("success", "warning", "error", "foreground")]
    assert smallest_difference(tones) >= 30


def test_curves_differ_for_every_kind_of_colour_vision() -> None:
    assert smallest_difference(COLOURBLIND_SERIES) >= 24.9
    # The measure tells palettes apart: two colours of the dark theme are one to some people.
    assert smallest_difference(DARK_SERIES) < 5


@pytest.mark.skipif(LTUI_ANSI is None, reason="Textual 8.2.5 and newer have native ANSI colours")
async def test_the_ansi_theme_has_only_the_16_colours_of_the_terminal() -> None:
    app = Themed()
    async with app.run_test() as pilot:
        app.theme = "ltui-ansi"
        await pilot.pause()
        paint = line_styles(app)
        styles = [*paint.tones.values(), *paint.series, *paint.faint_series, paint.selected]
        for style in (*styles, paint.match):
            for colour in (style.color, style.bgcolor):
                assert colour is None or colour.type in (ColorType.DEFAULT, ColorType.STANDARD)
        assert len({str(style) for style in paint.series}) == 8
        assert paint.of(Tone.DIM) != paint.of(Tone.PLAIN)
        assert paint.selected.reverse


NEUTRAL = (
    "foreground", "background", "surface", "panel", "ltui-dim", "ltui-faint", "border",
    "border-blurred", "footer-background", "block-cursor-foreground",
    "block-cursor-blurred-background", "scrollbar", "scrollbar-hover", "scrollbar-background",
    "scrollbar-background-hover", "scrollbar-background-active", "scrollbar-corner-color",
)  # fmt: skip
GREYS = {0, 7, 8, 15, 16, 231, *range(232, 256)}
"""Entries of the 256-colour table without a hue, but for the greys of its colour cube."""
CUBE_GREYS = {16 + 43 * step for step in range(6)}


def _colours(theme: Theme) -> dict[str, str]:
    return {**theme.to_color_system().generate(), **theme.variables}


@pytest.mark.parametrize("theme", TRUE_COLOUR_THEMES, ids=lambda theme: theme.name)
def test_surfaces_and_frames_stay_grey_on_256_colours(theme: Theme) -> None:
    colours = _colours(theme)
    names = [*NEUTRAL, *(["ltui-selected"] if theme is not LTUI_CONTRAST else [])]
    for name in names:
        entry = Color.parse(colours[name]).downgrade(ColorSystem.EIGHT_BIT)
        assert entry.number in GREYS | CUBE_GREYS, (theme.name, name, colours[name])


@pytest.mark.parametrize("theme", [LTUI_DARK, LTUI_LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("name", ["panel", "ltui-selected", "scrollbar"])
def test_fields_rows_and_scrollbars_stand_out_on_256_colours(theme: Theme, name: str) -> None:
    colours = _colours(theme)
    shown, behind = (
        Color.parse(colours[key]).downgrade(ColorSystem.EIGHT_BIT).get_truecolor().normalized
        for key in (name, "background")
    )
    assert abs(shown[0] - behind[0]) > 0.05


@pytest.mark.parametrize("theme", TRUE_COLOUR_THEMES, ids=lambda theme: theme.name)
def test_edges_rows_and_scrollbars_stand_out_on_16_colours(theme: Theme) -> None:
    colours = _colours(theme)

    def number(name: str) -> int | None:
        return Color.parse(colours[name]).downgrade(ColorSystem.STANDARD).number

    for name in ("border", "border-blurred", "primary", "ltui-selected", "scrollbar",
                 "block-cursor-background", "block-cursor-blurred-background"):  # fmt: skip
        assert number(name) != number("background"), name
    assert number("foreground") != number("ltui-selected")
    assert number("scrollbar") != number("scrollbar-background")
