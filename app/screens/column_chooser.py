"""The list of all fields, metrics and settings, to choose the columns and the order of the runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.presentation.metric_list import matching
from ltui.app.runs.list_layout import (
    DEFAULT_LAYOUT,
    ListLayout,
    first_order,
    order_text,
    reversed_order,
    with_column,
)
from ltui.app.runs.run_fields import FIELD_NAMES, FIELDS, SETTING
from ltui.app.screens.dialog import Dialog
from ltui.widgets.changing_list import ChangingList
from ltui.widgets.columns import shortened
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

MAX_NAME_CELLS = 40
ALIGNED_NAME_CELLS = 24
"""Cells of the column of names. A longer name moves its description to the right."""


class ColumnChooser(Dialog[ListLayout | None]):
    """Return the chosen columns and order, or None after Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(
            "columns",
            """
            space  | select   | select      | Show as a column, or not
            s      | sort     | sort        | Sort by it, then in the opposite order, then not
            left   | move(-1) | to the left | Move the column to the left
            right  | move(1)  | to the right | Move the column to the right
            escape | dismiss(None) | cancel | Change nothing
            slash  | filter   | filter      | Filter the names
            down   | to_list  | to the list | Go to the list
            d      | default  | default     | The usual columns in the usual order
            """,
        ),
        *bindings(
            "columns",
            "enter | apply | apply | Show these; in the filter: go to the first match",
            priority=True,
        ),
    ]

    def __init__(self, layout: ListLayout, names: Collection[str]) -> None:
        """``names``: metrics and settings that can be chosen besides the fields."""
        super().__init__()
        self._chosen, self._order = list(layout.columns), layout.order
        self._names = set(names)
        self._listed: tuple[str, ...] = ()
        self._name_cells = 0

    def compose(self) -> ComposeResult:
        keys = "space select  ←→ move  s sort  / filter  d default  ⏎ apply  esc cancel"
        with Vertical(classes="dialog -metrics"):
            yield Input(placeholder="filter: part of a name, config.*, or /loss$/", compact=True)
            yield Static(id="problem", markup=False)
            yield ChangingList(id="column-list", markup=False)
            yield Static(keys, id="answers")

    def on_mount(self) -> None:
        self._fill()
        self.query_one(OptionList).focus()

    def offer(self, names: Collection[str]) -> None:
        """Add metrics and settings that were read meanwhile."""
        if not self._names.issuperset(names):
            self._names.update(names)
            self._fill()

    def _fill(self, highlighted: str | None = None) -> None:
        """List the names that match the filter, the chosen ones first in their order."""
        shown, problem = self.query_one(OptionList), self.query_one("#problem", Static)
        fields = [name for name in FIELD_NAMES if name not in ("id", "name")]
        others = sorted(self._names - set(fields), key=lambda n: (n.startswith(SETTING), n))
        names = dict.fromkeys((*self._chosen, *fields, *others))
        try:
            listed = matching(names, self.query_one(Input).value)
        except ValueError as error:
            # Keep the list while the expression is being typed.
            problem.update(str(error))
            problem.display = True
            return
        problem.display = False
        highlighted = highlighted or self._highlighted
        self._listed = listed
        longest = max((len(clean_name(name)) for name in listed), default=0)
        self._name_cells = min(ALIGNED_NAME_CELLS, longest)
        shown.clear_options()
        shown.add_options(Option(self._row(name)) for name in listed)
        if listed:
            shown.highlighted = listed.index(highlighted) if highlighted in listed else 0
        title = f"columns; sorted by {order_text(self._order)}" if self._order else "columns"
        self.query_one(".dialog").border_title = title

    @property
    def _highlighted(self) -> str | None:
        index = self.query_one(OptionList).highlighted
        return None if index is None else self._listed[index]

    def _row(self, name: str) -> Text:
        # The sign differs in form, so that the choice can be read without colour.
        place = f"[{self._chosen.index(name) + 1:>2}]" if name in self._chosen else "[  ]"
        sign = ""
        if name == self._order.removeprefix("-"):
            sign = "↓" if self._order.startswith("-") else "↑"
        label = shortened(clean_name(name), MAX_NAME_CELLS).ljust(self._name_cells)
        row = Text(f"{place} {sign:1} {label} ", no_wrap=True)
        about = FIELDS[name].about if name in FIELDS else ""
        if not about:
            about = "setting" if name.startswith(SETTING) else "metric"
        return row.append(about, "dim")

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._fill()

    def action_select(self) -> None:
        name = self._highlighted
        if name in self._chosen:
            self._chosen.remove(name)
        elif name is not None:
            self._chosen = list(with_column(self._chosen, name))
        self._show_changes()

    def action_sort(self) -> None:
        name = self._highlighted
        if name is None:
            return
        first = first_order(name)
        following = {first: reversed_order(first), reversed_order(first): ""}
        self._order = following.get(self._order, first)
        self._show_changes()

    def _show_changes(self) -> None:
        """Show the changed choice without moving any row."""
        shown = self.query_one(OptionList)
        for index, name in enumerate(self._listed):
            shown.replace_option_prompt_at_index(index, self._row(name))

    def action_move(self, by: int) -> None:
        name = self._highlighted
        if name not in self._chosen:
            return
        place = self._chosen.index(name)
        self._chosen.insert(max(0, place + by), self._chosen.pop(place))
        self._fill(name)

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_default(self) -> None:
        self.dismiss(DEFAULT_LAYOUT)

    def action_apply(self) -> None:
        """Apply the choice; from the filter, go to the first match."""
        if isinstance(self.focused, Input):
            self.action_to_list()
            return
        self.dismiss(ListLayout(tuple(self._chosen), self._order))
