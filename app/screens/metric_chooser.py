"""The list of all metrics of a run, to choose the metrics of the first panel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.presentation.metric_list import DESCRIPTIONS, matching
from ltui.widgets.columns import shortened
from ltui.widgets.formats import metric
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

MAX_NAME_CELLS = 40
KEYS = "space select   / filter   ⏎ apply   d default choice   esc cancel"


class MetricChooser(ModalScreen[tuple[str, ...] | None]):
    """Return the chosen names, an empty tuple for the default choice, or None after Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(
            "metrics",
            """
            space  | select  | select      | Select, or deselect
            escape | dismiss | cancel      | Change nothing
            slash  | filter  | filter      | Filter the names
            down   | to_list | to the list | Go to the list
            d      | default | default     | The default choice
            """,
        ),
        *bindings("metrics", "enter | apply | apply | Show these", priority=True),
    ]

    def __init__(
        self, names: Sequence[str], values: Mapping[str, float], chosen: Collection[str]
    ) -> None:
        super().__init__()
        self._names, self._values = tuple(names), dict(values)
        self._chosen = dict.fromkeys(chosen)
        """The chosen names, in the order in which they were chosen."""
        self._listed: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -metrics"):
            yield Input(placeholder="filter: part of a name, or val/*", compact=True)
            yield OptionList(id="metric-list", markup=False)
            yield Static(Text(KEYS), id="answers")

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "metrics"
        self._fill("")
        self.query_one(OptionList).focus()

    def _fill(self, pattern: str) -> None:
        shown = self.query_one(OptionList)
        self._listed = matching(self._names, pattern)
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
        self.dismiss(tuple(self._chosen))

    def action_default(self) -> None:
        self.dismiss(())

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()
