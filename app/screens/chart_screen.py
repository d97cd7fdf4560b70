"""What the keys of ``chart_keys.py`` do on a screen with linked charts."""

from __future__ import annotations

from typing import Any

from ltui.app.live.frame import Frame
from ltui.app.panels.linked_charts import LinkedCharts
from ltui.app.presentation.chart_axis import AXES
from ltui.app.screens.dialog import FullScreen

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

    @property
    def is_top(self) -> bool:
        """Return whether no other screen lies above this one."""
        # A screen below one with a background is current for Textual, although nobody sees it.
        return self.is_current and self.app.screen is self

    def is_due(self, frame: Frame) -> bool:
        """Return whether to draw a frame. Few are drawn below a dialog, because Textual
        then paints the whole terminal for every change."""
        is_due = self.is_top or (
            self.is_current and abs(frame.now - self._drawn_at) >= _BELOW_DIALOG_S
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
