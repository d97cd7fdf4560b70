"""ltui's themes, and the styles that widgets take from the active theme.

Colours of curves are exact entries of the 256-colour table, so that they are the same there, and
they map to different ones of the 16 colours. Surfaces, frames and greys have a saturation below
0.15: Rich maps such colours to the grey ramp of the 256-colour table. It maps more saturated ones
to the colour cube, in which dark blue-greys become teal. The ANSI theme has the terminal's own 16
colours instead. With NO_COLOR, font weight and signs replace the colours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError
from textual.strip import Strip
from textual.theme import BUILTIN_THEMES, Theme

from ltui.widgets.tone import Tone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.widget import Widget

    from ltui.widgets.view_models import Cell

DARK_SERIES = (
    "#5f87ff", "#ffaf5f", "#5fd787", "#d787ff", "#5fd7d7", "#ff8787", "#949494", "#d7d7ff",
)  # fmt: skip
LIGHT_SERIES = (
    "#005fd7", "#af5f00", "#008700", "#8700af", "#008787", "#d70000", "#585858", "#00005f",
)  # fmt: skip
# Okabe and Ito's colours for every kind of colour vision, as the nearest of the 256 colours.
CONTRAST_SERIES = (
    "#5fd7ff", "#ffaf00", "#00d787", "#ff87d7", "#ff5f00", "#0087ff", "#ffffff", "#949494",
)  # fmt: skip
# Near the colours of Okabe and Ito. Each two differ by 25 or more (CIE 1976) to people with
# protanopia, deuteranopia or tritanopia, too.
COLOURBLIND_SERIES = (
    "#5fafff", "#ff8700", "#00875f", "#d7ff87", "#5f5faf", "#d70000", "#af87af", "#ffd7ff",
)  # fmt: skip
ANSI_SERIES = tuple(
    f"ansi_{name}"
    for name in "blue yellow green magenta cyan red default bright_black".split()  # noqa: SIM905
)

TERMINAL_DEFAULT = -1
"""Textual's number for the terminal's own text and background colours."""


def _series_variables(colours: tuple[str, ...]) -> dict[str, str]:
    return {f"series-{number}": colour for number, colour in enumerate(colours)}


def _scrollbar_variables(*, bar: str, hover: str, active: str, track: str) -> dict[str, str]:
    """Return all colours of scrollbars; those that Textual derives become teal on 256 colours."""
    tracks = ("background", "background-hover", "background-active", "corner-color")
    return {
        "scrollbar": bar,
        "scrollbar-hover": hover,
        "scrollbar-active": active,
        **{f"scrollbar-{part}": track for part in tracks},
    }


LTUI_DARK = Theme(
    name="ltui-dark",
    primary="#5fafff",
    secondary="#87afd7",
    accent="#87d7ff",
    warning="#ffaf5f",
    error="#ff6b6b",
    success="#87d787",
    foreground="#d0d4dc",
    background="#121418",
    surface="#17191e",
    panel="#2a2f38",
    dark=True,
    variables={
        **_series_variables(DARK_SERIES),
        **_scrollbar_variables(bar="#4a5361", hover="#5a6371", active="#5fafff", track="#15171b"),
        "ltui-dim": "#7d8694",
        "ltui-faint": "#363c46",
        "ltui-selected": "#343a45",
        "border": "#3e4550",
        "border-blurred": "#2f343d",
        "block-cursor-background": "#343a45",
        "block-cursor-foreground": "#eaecef",
        "block-cursor-blurred-background": "#343a45",
        "footer-background": "#17191e",
        "footer-key-foreground": "#87afd7",
        "footer-description-foreground": "#7d8694",
        "input-selection-background": "#5fafff 30%",
    },
)
LTUI_LIGHT = Theme(
    name="ltui-light",
    primary="#005faf",
    secondary="#44617f",
    accent="#00708f",
    warning="#9a5200",
    error="#c01c28",
    success="#1c7a34",
    foreground="#24272c",
    background="#f5f6f7",
    surface="#fbfbfc",
    panel="#e0e2e6",
    dark=False,
    variables={
        **_series_variables(LIGHT_SERIES),
        **_scrollbar_variables(bar="#a4aab3", hover="#9aa1ab", active="#005faf", track="#e4e6ea"),
        "ltui-dim": "#66707d",
        "ltui-faint": "#d5d8dd",
        "ltui-selected": "#c4d0de",
        "border": "#9aa5b3",
        "border-blurred": "#c8ccd3",
        "block-cursor-background": "#c4d0de",
        "block-cursor-foreground": "#131518",
        "block-cursor-blurred-background": "#c8ccd3",
        "footer-background": "#e0e2e6",
        "footer-key-foreground": "#005faf",
        "footer-description-foreground": "#55606e",
    },
)
LTUI_CONTRAST = Theme(
    name="ltui-contrast",
    primary="#5fafff",
    secondary="#ffffff",
    accent="#ffff5f",
    warning="#ffaf00",
    error="#ff5f5f",
    success="#5fafff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    dark=True,
    variables={
        **_series_variables(CONTRAST_SERIES),
        **_scrollbar_variables(bar="#949494", hover="#c6c6c6", active="#5fafff", track="#1c1c1c"),
        "ltui-dim": "#c6c6c6",
        "ltui-faint": "#585858",
        "ltui-selected": "#00005f",
        "border": "#ffffff",
        "border-blurred": "#949494",
        "block-cursor-background": "#00005f",
        "block-cursor-blurred-background": "#444444",
        "block-cursor-foreground": "#ffffff",
    },
)
LTUI_COLOURBLIND = replace(
    LTUI_DARK,
    name="ltui-colourblind",
    success="#00afff",
    warning="#ffaf00",
    error="#ff5f5f",
    variables={**LTUI_DARK.variables, **_series_variables(COLOURBLIND_SERIES)},
)
TRUE_COLOUR_THEMES = (LTUI_DARK, LTUI_LIGHT, LTUI_CONTRAST, LTUI_COLOURBLIND)
"""Themes for 256 colours and more. The last two suit every kind of colour vision."""


def _ansi_theme(native: Theme | None) -> Theme | None:
    """Return a theme of the terminal's own 16 colours; None before Textual 8.2.5, which has none.

    Background and text are the terminal's own, so that it suits dark and light terminals.
    """
    if native is None:
        return None
    return replace(
        native,
        name="ltui-ansi",
        accent="ansi_cyan",
        variables={
            **native.variables,
            **_series_variables(ANSI_SERIES),
            "ltui-dim": "ansi_default",
            "ltui-faint": "ansi_default",
            "ltui-selected": "ansi_default",
            "border": "ansi_default",
            "border-blurred": "ansi_bright_black",
        },
    )


LTUI_ANSI = _ansi_theme(BUILTIN_THEMES.get("ansi-dark"))
THEMES = (*TRUE_COLOUR_THEMES, *([] if LTUI_ANSI is None else [LTUI_ANSI]))
"""Themes to register."""


class LineStyles(Struct, frozen=True, kw_only=True):
    """Styles for drawing line by line. Only styles with a meaning have a background."""

    tones: dict[Tone, Style]
    series: tuple[Style, ...]
    faint_series: tuple[Style, ...]
    """The series colours nearer to the background, for raw values behind a curve and for bands."""
    selected: Style
    """Style that is added to the row under the cursor."""
    match: Style
    """Style of text that matches a search."""

    def of(self, tone: Tone) -> Style:
        """Return the style of a tone."""
        return self.tones[tone]

    def of_cell(self, cell: Cell) -> Style:
        """Return the style of a cell: that of its series, else that of its tone."""
        if cell.colour is None:
            return self.tones[cell.tone]
        return self.series[cell.colour % len(self.series)]


def line_styles(app: App[object]) -> LineStyles:
    """Return the styles of the active theme of ``app``."""
    theme = app.current_theme
    if app.no_color:
        return _colourless()
    variables = app.theme_variables
    fallback = DARK_SERIES if theme.dark else LIGHT_SERIES
    foreground = variables["foreground"]
    surface = variables["surface"]
    named = tuple(variables.get(f"series-{n}", fallback[n]) for n in range(len(fallback)))
    dim = variables.get("ltui-dim") or _mix(foreground, surface, 0.45)
    return _coloured(
        (
            foreground,
            surface,
            dim,
            variables.get("ltui-faint") or _mix(foreground, surface, 0.8),
            variables.get("ltui-selected") or _mix(variables["primary"], surface, 0.75),
            variables["success"],
            variables["warning"],
            variables["error"],
            variables["accent"],
        ),
        named,
    )


def cells_strip(cells: Sequence[Cell], width: int, widget: Widget) -> Strip:
    """Return a line of exactly ``width`` cells in the styles of the theme, on the widget's own."""
    base, styles = widget.visual_style.rich_style, line_styles(widget.app)
    segments = [Segment(cell.text, base + styles.of_cell(cell)) for cell in cells if cell.text]
    return Strip(segments).adjust_cell_length(width, base)


def _mix(colour: str, towards: str, share: float) -> str:
    return Color.parse(colour).blend(Color.parse(towards), share).hex6


@lru_cache(maxsize=16)
def _coloured(named: tuple[str, ...], series: tuple[str, ...]) -> LineStyles:
    foreground, surface, dim, faint, selected, good, warn, bad, accent = map(_parse, named)
    ground = Color.parse("black") if surface is None else surface
    inks = [_parse(name) for name in series]
    return LineStyles(
        tones={
            Tone.PLAIN: _ink(foreground),
            Tone.DIM: _faded(dim),
            Tone.FAINT: _faded(faint),
            Tone.GOOD: _ink(good),
            Tone.WARN: _ink(warn),
            Tone.BAD: _ink(bad, bold=True),
            Tone.ACCENT: _ink(accent),
        },
        series=tuple(_ink(ink) for ink in inks),
        faint_series=tuple(_mixed(ink, ground) for ink in inks),
        selected=Style(reverse=True) if _is_own(selected) else Style(bgcolor=_rich(selected)),
        match=Style(color=_rich(warn), reverse=True)
        if _is_own(ground)
        else Style(color=ground.rich_color, bgcolor=_rich(warn)),
    )


def _is_own(colour: Color | None) -> bool:
    """Return whether a colour is the terminal's own text or background, which can't be mixed."""
    return colour is None or colour.ansi == TERMINAL_DEFAULT or colour.a == 0


def _rich(colour: Color | None) -> RichColor | None:
    return None if colour is None else colour.rich_color


def _faded(colour: Color | None) -> Style:
    return Style(dim=True) if _is_own(colour) else _ink(colour)


def _mixed(ink: Color | None, ground: Color) -> Style:
    """Return the style of a colour that is nearer to the background."""
    if ink is None or ink.ansi is not None or _is_own(ground):
        return Style(color=_rich(ink), dim=True)
    return _ink(ink.blend(ground, 0.55))


def _parse(name: str) -> Color | None:
    try:
        return Color.parse(name)
    except ColorParseError:
        return None


def _ink(colour: Color | None, *, bold: bool = False) -> Style:
    # Named ANSI colours keep the terminal's own; Textual marks them with an index.
    return Style(color=_rich(colour), bold=bold or None)


@lru_cache(maxsize=1)
def _colourless() -> LineStyles:
    plain, dim = Style(), Style(dim=True)
    count = len(DARK_SERIES)
    return LineStyles(
        tones={
            Tone.PLAIN: plain,
            Tone.DIM: dim,
            Tone.FAINT: dim,
            Tone.GOOD: plain,
            Tone.WARN: Style(bold=True),
            Tone.BAD: Style(bold=True, underline=True),
            Tone.ACCENT: Style(bold=True),
        },
        series=(plain,) * count,
        faint_series=(dim,) * count,
        selected=Style(reverse=True, dim=False),
        match=Style(reverse=True),
    )
