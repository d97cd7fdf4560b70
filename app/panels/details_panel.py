"""The details of a run as a scrolling panel, in two columns if it is wide enough."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll

from ltui.app.live.frame import Frame
from ltui.app.panels.live_text import LiveText
from ltui.app.presentation import run_details

TWO_COLUMNS_FROM = 100
"""Minimum cells of width for the two parts to be placed side by side."""


class DetailsView(VerticalScroll):
    """Metrics and configuration, then checkpoints, events and other facts."""

    DEFAULT_CSS = """
    DetailsView { height: 1fr; width: 1fr; scrollbar-size: 0 1; }
    DetailsView Static { width: 1fr; height: auto; }
    DetailsView #detail-facts { margin-top: 1; }
    DetailsView.-wide #detail-facts { margin-top: 0; }
    DetailsView.-wide { layout: horizontal; }
    DetailsView.-wide #detail-figures { margin-right: 3; }
    """

    def compose(self) -> ComposeResult:
        yield LiveText(id="detail-figures", wraps=True)
        yield LiveText(id="detail-facts", wraps=True)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= TWO_COLUMNS_FROM, "-wide")

    def show(self, frame: Frame) -> None:
        """Draw the details of ``frame``; unchanged parts are not repainted."""
        figures, facts = self.query(LiveText)
        figures.show(run_details.metrics_and_configuration(frame))
        facts.show(run_details.checkpoints_and_events(frame))
