"""The keys that change all charts of a screen, the same on every screen with linked charts."""

from __future__ import annotations

from ltui.app.keys.footer import KeyHint

CHART_KEYS = """
x      | axis                | x axis           | Steps, epochs, time, time of day or samples
y      | log_scale           | y scale          | Switch between a linear and a logarithmic y axis
o      | outliers            | outliers         | Show all values, or cut outliers off the y axis
+,=    | smooth(1)           | more smoothing   | Smooth the curves more
-      | smooth(-1)          | less smoothing   | Smooth the curves less
"""
CHART_HINTS = (
    KeyHint("↑↓", "zoom", "focused.zoom(1)"),
    KeyHint("←→", "crosshair", "focused.move(1)"),
    KeyHint("shift+←→", "pan", "focused.pan(1)"),
    KeyHint("home", "show all", "focused.show_all"),
    KeyHint(", .", "marks", "focused.mark(1)"),
)
"""Hints while a chart has the focus."""
SCALE_HINTS = (
    KeyHint("x", "x axis", "screen.axis"),
    KeyHint("y", "y scale", "screen.log_scale"),
    KeyHint("+-", "smoothing", "screen.smooth(1)"),
)
"""Hints for all charts of a screen."""
