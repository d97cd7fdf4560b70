"""The list of all metrics of a run, to choose the metrics of the first panel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.panels.panel import LiveText
from ltui.app.presentation.metric_list import DESCRIPTIONS, MetricChoice, matching
from ltui.app.screens.dialog import Dialog
from ltui.widgets.changing_list import ChangingList
from ltui.widgets.columns import shortened
from ltui.widgets.formats import metric
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

MAX_NAME_CELLS = 40
KEYS_OF_PANEL = {
    1: "space select  / filter  j one chart  a all  ⏎ apply  d default  esc cancel",
    2: "space select  / filter  ⏎ apply  d throughput  esc cancel",
    None: "space select  / filter  ⏎ apply  d default  esc cancel",
}
"""The line of keys by panel; None is a screen with one chart for each metric."""


class MetricChooser(Dialog[MetricChoice | None]):
    """Return the choice, one without names for the default choice, or None after Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(
            "metrics",
            """
            space  | select  | select      | Select, or deselect
            escape | dismiss | cancel      | Change nothing
            slash  | filter  | filter      | Filter the names
            down   | to_list | to the list | Go to the list
            d      | default | default     | The default choice
            j      | join    | one chart   | One chart for all, or one for each quantity
            a      | every   | all metrics | Show every metric as a small chart
            """,
        ),
        *bindings("metrics", "enter | apply | apply | Show these", priority=True),
    ]

    def __init__(
        self,
        names: Sequence[str],
        values: Mapping[str, float],
        chosen: Collection[str],
        *,
        panel: int | None = 1,
        joined: bool = False,
    ) -> None:
        """``panel`` 2 always has one chart, and None one for each metric; ``joined`` is the present
        choice of panel 1."""
        super().__init__()
        self._names, self._values = tuple(names), dict(values)
        self._chosen = dict.fromkeys(chosen)
        """The chosen names, in the order in which they were chosen."""
        self._panel, self._joined = panel, joined
        self._listed: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -metrics"):
            yield Input(placeholder="filter: part of a name, val/* or /loss$/", compact=True)
            yield LiveText(id="problem")
            yield ChangingList(id="metric-list", markup=False)
            yield Static(Text(KEYS_OF_PANEL[self._panel]), id="answers")

    def on_mount(self) -> None:
        self._show_title()
        self._fill("")
        self.query_one(OptionList).focus()

    def _show_title(self) -> None:
        if self._panel is None:
            self.query_one(".dialog").border_title = "metrics"
            return
        one = self._panel == 2 or self._joined
        charts = "in one chart" if one else "one chart for each quantity"
        self.query_one(".dialog").border_title = f"metrics of panel {self._panel}, {charts}"

    def _fill(self, pattern: str) -> None:
        shown, problem = self.query_one(OptionList), self.query_one("#problem", LiveText)
        problem.display = False
        try:
            self._listed = matching(self._names, pattern)
        except ValueError as error:
            # Keep the list while the expression is being typed.
            problem.show(Text(str(error)))
            problem.display = True
            return
        shown.clear_options()
        shown.add_options(Option(self._row(name)) for name in self._listed)
        if self._listed:
            shown.highlighted = 0

    def _row(self, name: str) -> Text:
        # The sign differs in form, so that the choice can be read without colour.
        sign = "[x]" if name in self._chosen else "[ ]"
        cells = min(MAX_NAME_CELLS, max(len(clean_name(one)) for one in self._names))
        label = shortened(clean_name(name), cells)
        value = metric(self._values[name]) if name in self._values else ""
        row = Text(f"{sign} {label.ljust(cells)} {value.rjust(10)}", no_wrap=True)
        return row.append(f"  {DESCRIPTIONS.get(name, '')}".rstrip(), "dim")

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._fill(event.value)

    def action_select(self) -> None:
        shown = self.query_one(OptionList)
        if shown.highlighted is None:
            return
        name = self._listed[shown.highlighted]
        if name in self._chosen:
            del self._chosen[name]
        else:
            self._chosen[name] = None
        shown.replace_option_prompt_at_index(shown.highlighted, self._row(name))

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_select()

    def action_apply(self) -> None:
        """Apply the choice; from the filter, go to the first match."""
        if isinstance(self.focused, Input):
            self.action_to_list()
            return
        self.dismiss(MetricChoice(tuple(self._chosen), joined=self._joined))

    def action_default(self) -> None:
        self.dismiss(MetricChoice())

    def action_every(self) -> None:
        self.dismiss(MetricChoice(every=True))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        return self._panel == 1 if action in ("every", "join") else True

    def action_join(self) -> None:
        """Switch between one chart and one for each quantity."""
        self._joined = not self._joined
        self._show_title()

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()
