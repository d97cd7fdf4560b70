"""The bases of screens with numbered panels, and of screens with linked charts.

A small terminal shows one panel at a time, with tabs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from textual import events, on
from textual.widget import Widget

from ltui.app.live.frame import Frame
from ltui.app.panels.linked_charts import LinkedCharts
from ltui.app.panels.panel import Panel, TabBar, focus_in, panel_around
from ltui.app.presentation.chart_axis import AXES
from ltui.app.screens.dialog import FullScreen


class TabbedScreen(FullScreen[Any]):
    """A screen of panels. Where only one of them is shown, Tab goes through all of them."""

    def tabs(self) -> tuple[Sequence[str], str]:
        """Return the names of all panels and the one that is shown; without tabs, no names."""
        raise NotImplementedError

    def action_panel(self, name: str) -> None:
        """Show a panel and move the focus into it."""
        raise NotImplementedError

    def focus_next(self, selector: str | type[Widget] = "*") -> Widget | None:
        """Move the focus to the next widget; from the last one of a tab, to the next tab."""
        return self.focused if self._turned_tab(1) else super().focus_next(selector)

    def focus_previous(self, selector: str | type[Widget] = "*") -> Widget | None:
        """Move the focus to the widget before; from the first one of a tab, to the tab before."""
        return self.focused if self._turned_tab(-1) else super().focus_previous(selector)

    def _turned_tab(self, step: int) -> bool:
        """Show the tab beside, unless the shown one has another widget for the focus."""
        names, shown = self.tabs()
        chain = self.focus_chain
        last = chain[-1 if step > 0 else 0] if chain else None
        if not names or (self.focused in chain and self.focused is not last):
            return False
        self.action_panel(names[(names.index(shown) + step) % len(names)])
        return True


class PanelScreen(TabbedScreen):
    """The layout of the panels. Containers of panels have the class ``panels``."""

    PANELS: ClassVar[Mapping[str, str]] = {}
    """The ids of the panels in the order of their numbers, and the titles of their tabs."""
    MIN_WIDTH: ClassVar[int] = 120
    MIN_HEIGHT: ClassVar[int] = 30
    """Minimum terminal size to show several panels at once."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = next(iter(self.PANELS))
        self.zoomed = False

    def on_resize(self) -> None:
        if self.is_mounted:
            self.lay_out()

    def panels_together(self) -> Collection[str]:
        """Return the panels that a large terminal shows."""
        return self.PANELS.keys()

    @property
    def shows_one(self) -> bool:
        """True if one panel is maximised, or the terminal has no room for several."""
        width, height = self.app.size
        return self.zoomed or width < self.MIN_WIDTH or height < self.MIN_HEIGHT

    def tabs(self) -> tuple[Sequence[str], str]:
        return (tuple(self.PANELS), self.chosen) if self.shows_one else ((), "")

    def lay_out(self) -> None:
        """Show the panels that the terminal has room for."""
        alone = self.shows_one
        visible = [self.chosen] if alone else self.panels_together()
        self.set_class(alone, "-alone")
        for name in self.PANELS:
            self.query_one(f"#{name}").display = name in visible
        for container in self.query(".panels"):
            container.display = any(panel.display for panel in container.query(Panel))
        self.query_one(TabBar).display = alone
        self.show_tabs()

    def tab_title(self, name: str) -> str:
        """Return the title of a panel's tab."""
        return self.PANELS[name]

    def show_tabs(self) -> None:
        """Draw the titles of the tabs."""
        names = enumerate(self.PANELS, 1)
        tabs = [(number, name, self.tab_title(name)) for number, name in names]
        self.query_one(TabBar).show(tabs, self.chosen)

    def action_panel(self, name: str) -> None:
        """Show a panel and move the focus into it."""
        self.chosen = name
        self.lay_out()
        focus_in(self.query_one(f"#{name}"))

    @on(events.DescendantFocus)
    def _focus_moved(self, event: events.DescendantFocus) -> None:
        name = panel_around(event.widget, self.PANELS)
        if name is not None and name != self.chosen:
            self.chosen = name
            self.lay_out()

    def action_zoom(self) -> None:
        self.zoomed = not self.zoomed
        self.lay_out()

    def action_cancel(self) -> None:
        """Restore a maximised panel, or leave the screen."""
        if self.zoomed:
            self.action_zoom()
        else:
            self.leave()

    def leave(self) -> None:
        """Go back to the screen before."""
        self.dismiss(None)


_BELOW_DIALOG_S = 2.0
"""Seconds between two frames that are drawn below a dialog. A frame a second took 6 % of a core."""


class ChartKeysScreen(FullScreen[Any]):
    """A screen whose linked charts are changed by ``CHART_KEYS``."""

    _drawn_at = 0.0
    """Time of the last frame for which ``is_due`` was true."""

    @property
    def charts(self) -> LinkedCharts:
        """The charts of the screen."""
        raise NotImplementedError

    def is_due(self, frame: Frame) -> bool:
        """Return whether to draw a frame. Few are drawn below a dialog, because Textual
        then paints the whole terminal for every change."""
        is_due = self.is_current and (
            self.app.screen is self or abs(frame.now - self._drawn_at) >= _BELOW_DIALOG_S
        )
        if is_due:
            self._drawn_at = frame.now
        return is_due

    def action_axis(self) -> None:
        self.charts.next_axis()
        self.notify(f"x axis: {AXES[self.charts.settings.axis]}", timeout=2)

    def action_log_scale(self) -> None:
        self.charts.toggle_log()

    def action_outliers(self) -> None:
        self.charts.toggle_outliers()

    def action_smooth(self, by: int) -> None:
        self.charts.smooth(by)
