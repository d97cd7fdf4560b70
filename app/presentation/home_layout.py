"""The panels of the home screen that are visible, by terminal size and by choice. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

PRESETS, FORM, RUNS, YAML = "presets", "form", "runs", "yaml"
PANELS = (PRESETS, FORM, RUNS, YAML)
"""All panels in the order of their numbers, from 1."""
LEAST_WIDTH, LEAST_HEIGHT = 60, 12
SIDE_WIDTH = 120
"""Columns from which the presets stand beside the list of runs."""
YAML_WIDTH, YAML_HEIGHT = 140, 20
"""Size from which the configuration stands beside the form."""


class HomeLayout(Struct, frozen=True, kw_only=True):
    """The runs, or what a new run is started with. Without a run, always the latter."""

    width: int = 160
    height: int = 50
    has_runs: bool = False
    new_run: bool = False
    """Presets and form fill the screen although there are runs."""
    zoomed: str = ""
    """The panel that fills the screen of a new run; empty if none does."""
    side_presets: bool = True
    """The presets are shown beside the runs if there is room."""

    @property
    def tiny(self) -> bool:
        """True if the terminal has no room for any panel."""
        return self.width < LEAST_WIDTH or self.height < LEAST_HEIGHT

    @property
    def shows_runs(self) -> bool:
        """True if the list of runs is shown, False if presets and form are."""
        return self.has_runs and not self.new_run

    def visible(self) -> frozenset[str]:
        """Return the names of the visible panels."""
        if self.tiny:
            return frozenset()
        if self.shows_runs:
            beside = self.side_presets and self.width >= SIDE_WIDTH
            return frozenset({RUNS, PRESETS} if beside else {RUNS})
        if self.zoomed:
            return frozenset({self.zoomed})
        has_room = self.width >= YAML_WIDTH and self.height >= YAML_HEIGHT
        return frozenset({PRESETS, FORM, YAML} if has_room else {PRESETS, FORM})

    def showing(self, panel: str) -> HomeLayout:
        """Return the layout with a panel visible: the presets beside the runs if they are there."""
        if panel == RUNS:
            return replace(self, new_run=False, zoomed="")
        return self if panel in self.visible() else replace(self, new_run=True, zoomed="")

    def maximised(self, panel: str) -> HomeLayout:
        """Return the layout of a new run with one panel, or with all if one was maximised."""
        return replace(self, new_run=True, zoomed="" if self.zoomed else panel)
