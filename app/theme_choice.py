"""The available colour themes, and the theme that the dashboard starts with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ltui.app.settings import Settings
from ltui.widgets.palette import LTUI_DARK, LTUI_LIGHT, THEMES

LIGHT_BACKGROUNDS = frozenset({"7", *(str(number) for number in range(9, 16))})
"""Numbers of the light colours among the terminal's 16: white, and all bright ones except grey."""


def theme_names(available: Iterable[str]) -> list[str]:
    """Return ltui's own themes, then the other ``available`` ones in alphabetical order."""
    ltui_themes = [theme.name for theme in THEMES]
    return ltui_themes + sorted(name for name in available if name not in ltui_themes)


def first_theme(settings: Settings, available: Collection[str], environ: Mapping[str, str]) -> str:
    """Return the chosen theme, or the one that suits the terminal's background."""
    chosen = settings.value("theme")
    if isinstance(chosen, str) and chosen in available:
        return chosen
    return LTUI_LIGHT.name if has_light_background(environ) else LTUI_DARK.name


def has_light_background(environ: Mapping[str, str]) -> bool:
    """Return whether ``COLORFGBG`` (``15;0``, ``0;default;15``) names a light background."""
    return environ.get("COLORFGBG", "").rpartition(";")[2].strip() in LIGHT_BACKGROUNDS
