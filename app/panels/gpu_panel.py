"""What a screen shows of GPUs: the heat strip of many, a row each, what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Static

from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import HEAT_S
from ltui.app.presentation.gpu_view import HEAT_STRIP_MIN_GPUS, findings_text, gpu_rows
from ltui.widgets.gpu_heat import GpuHeat
from ltui.widgets.gpu_table import GpuTable
from ltui.widgets.view_models import GpuRow

TABLE_LINES = 9
"""Lines of the table where it shares the screen: the rest is scrolled to."""
HEAT_LINES = 4
MANY = 16
"""More GPUs than this are read from the heat strip first."""
FINDINGS = 3


class GpuOverview(Vertical):
    """Drawn from frames; ``lines`` says how high it wants to be where it shares the screen."""

    DEFAULT_CSS = """
    GpuOverview { height: 1fr; }
    GpuOverview #gpu-findings { height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    MORE: ClassVar[str] = ": d diagnose"
    """Where to read the findings that do not fit."""

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
        most_findings = self._findings_lines(alone=alone)
        heat_lines = self._show_heat(rows, alone=alone)
        self.query_one(GpuTable).set_rows(rows)
        findings = findings_text(frame, most_findings, more=self.MORE)
        below = self.query_one("#gpu-findings", Static)
        below.display = bool(findings)
        below.styles.max_height = most_findings
        if findings != self._said:
            lines = None if self._said is None else self._said.plain.count("\n")
            self._said = findings
            below.update(findings, layout=lines != findings.plain.count("\n"))
        said = findings.plain.count("\n") + 1 if findings else 0
        return heat_lines + min(len(rows) + 1, TABLE_LINES) + said

    def _findings_lines(self, *, alone: bool) -> int:
        """Lines for findings: few where the rows need the room."""
        return min(2 * FINDINGS, max(2, self.size.height // 4)) if alone else FINDINGS

    def _show_heat(self, rows: Sequence[GpuRow], *, alone: bool) -> int:
        """Draw the heat strip of many GPUs in what rows and findings leave; return its lines."""
        heat = self.query_one(GpuHeat)
        room = HEAT_LINES
        if alone:
            room = self.size.height - (len(rows) + 1) - self._findings_lines(alone=True) - 1
            # Of a hundred GPUs the table is scrolled, and the strips still show all.
            room = max(room, self.size.height // 2 if len(rows) > MANY else 0)
        heat.display = len(rows) >= HEAT_STRIP_MIN_GPUS and room > 0
        if not heat.display:
            return 0
        heat.show(rows, min(room, len(rows)), HEAT_S)
        return heat.lines(max(1, heat.size.width or self.size.width))
