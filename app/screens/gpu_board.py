"""What a screen shows of GPUs: the heat strip of many, a row each, what is wrong."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from ltui.app.frame import Frame
from ltui.app.gpu_panel import HEAT_FROM, findings_text, gpu_rows
from ltui.widgets.gpu_heat import GpuHeat
from ltui.widgets.gpu_table import GpuTable

TABLE_LINES = 9
"""Lines of the table where it shares the screen: the rest is scrolled to."""
HEAT_LINES = 4
FINDINGS = 3


class GpuBoard(Vertical):
    """Drawn from frames; ``lines`` says how high it wants to be where it shares the screen."""

    DEFAULT_CSS = """
    GpuBoard { height: 1fr; }
    GpuBoard #gpu-findings { height: auto; }
    """

    _said: Text | None = None

    def compose(self) -> ComposeResult:
        yield GpuHeat(id="gpu-heat")
        yield GpuTable(id="gpu-table")
        findings = Static(id="gpu-findings", markup=False)
        # Here, as a screen that is left while it opens is told that it is mounted without these.
        findings.display = False
        yield findings

    def show(self, frame: Frame, *, alone: bool) -> int:
        """Draw; ``alone``: this panel has all the height. Gives the lines it would take."""
        rows = gpu_rows(frame)
        heat = self.query_one(GpuHeat)
        many = len(rows) >= HEAT_FROM
        heat.display = many
        heat_lines = 0
        if many:
            heat.show(rows, max(HEAT_LINES, self.size.height // 2) if alone else HEAT_LINES)
            heat_lines = heat.grid(max(1, heat.size.width or self.size.width))[1]
        table = self.query_one(GpuTable)
        table.set_rows(rows)
        findings = findings_text(frame, 2 * FINDINGS if alone else FINDINGS)
        below = self.query_one("#gpu-findings", Static)
        below.display = bool(findings)
        if findings != self._said:
            lines = None if self._said is None else self._said.plain.count("\n")
            self._said = findings
            below.update(findings, layout=lines != findings.plain.count("\n"))
        said = findings.plain.count("\n") + 1 if findings else 0
        return heat_lines + min(len(rows) + 1, TABLE_LINES) + said
