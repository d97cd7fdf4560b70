"""Lists of names with a filter, to choose from: metrics, columns of the runs, logs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Literal

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ScreenResultType
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.presentation.metric_names import DESCRIPTIONS, MetricChoice, matching
from ltui.app.runs.run_fields import FIELD_NAMES, FIELDS, SETTING
from ltui.app.runs.run_rows import (
    DEFAULT_LAYOUT,
    ListLayout,
    first_order,
    order_text,
    reversed_order,
    with_column,
)
from ltui.app.screens.dialog import Dialog
from ltui.widgets.columns import shortened
from ltui.widgets.formats import metric
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_name

MAX_NAME_CELLS = 40
ALIGNED_NAME_CELLS = 24
"""Cells of the column of names. A longer name moves its description to the right."""
METRIC_KEYS = {
    1: "space select  / filter  j one chart  a all  ⏎ apply  d default  esc cancel",
    2: "space select  / filter  ⏎ apply  d throughput  esc cancel",
    None: "space select  / filter  ⏎ apply  d default  esc cancel",
}
"""The line of keys by panel; None is a screen with one chart for each metric."""
COLUMN_KEYS = "space select  ←→ move  s sort  / filter  d default  ⏎ apply  esc cancel"
LOG_KEYS = "type to filter   ↑↓ select   ⏎ show   f1 help   esc cancel"


class ChangingList(OptionList):
    """A list that ignores a click on an option that is gone, and pages while it has no room."""

    async def _on_click(self, event: events.Click) -> None:
        # Textual calls the method of the base class afterwards, unless that is prevented.
        option = event.style.meta.get("option")
        if option is not None and option >= self.option_count:
            event.prevent_default()

    def _move_page(self, direction: Literal[-1, 1]) -> None:
        # Without room no option has a line.
        if self.scrollable_content_region:
            super()._move_page(direction)


class Chooser(Dialog[ScreenResultType]):
    """A list of names below a field that filters them."""

    SHAPE: ClassVar[str] = "dialog -metrics"
    """Style classes of the dialog."""
    EXAMPLES: ClassVar[str]
    """What can be typed into the filter."""
    FIRST_FOCUS: ClassVar[str] = "#names"
    """Selector of the widget that has the focus at first."""

    def __init__(self, key_line: str) -> None:
        super().__init__()
        self._key_line = key_line
        self._listed: tuple[str, ...] = ()
        """The names that match the filter, in the order of the list."""

    def compose(self) -> ComposeResult:
        with Vertical(classes=self.SHAPE):
            yield Input(placeholder=f"filter: {self.EXAMPLES}", compact=True)
            yield Static(id="problem", markup=False)
            yield ChangingList(id="names", markup=False)
            yield Static(Text(self._key_line), id="answers")

    def on_mount(self) -> None:
        self._fill()
        self.query_one(self.FIRST_FOCUS).focus()

    def _names(self) -> Iterable[str]:
        """Return all names, in the order of the list."""
        raise NotImplementedError

    def _row(self, name: str) -> Text:
        """Return the line of a name."""
        raise NotImplementedError

    def _choice(self) -> ScreenResultType:
        """Return what was chosen."""
        raise NotImplementedError

    def _matching(self, pattern: str) -> tuple[str, ...]:
        """Return the names that match the filter. Raises ``ValueError``."""
        return matching(self._names(), pattern)

    def _fill(self, highlighted: str | None = None) -> None:
        """List the names that match the filter. The cursor is on a name, by default the first."""
        shown, problem = self.query_one(OptionList), self.query_one("#problem", Static)
        try:
            self._listed = self._matching(self.query_one(Input).value)
        except ValueError as error:
            # Keep the list while the expression is being typed.
            problem.update(str(error))
            problem.display = True
            return
        problem.display = False
        shown.clear_options()
        shown.add_options(Option(self._row(name)) for name in self._listed)
        if self._listed:
            place = self._listed.index(highlighted) if highlighted in self._listed else 0
            shown.highlighted = place

    @property
    def _highlighted(self) -> str | None:
        """The name under the cursor."""
        index = self.query_one(OptionList).highlighted
        return None if index is None else self._listed[index]

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._fill()

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_apply(self) -> None:
        """Apply the choice; from the filter, go to the first match."""
        if isinstance(self.focused, Input):
            self.action_to_list()
        else:
            self.dismiss(self._choice())


class MetricChooser(Chooser[MetricChoice | None]):
    """Return the choice, one without names for the default choice, or None after Esc."""

    EXAMPLES = "part of a name, val/* or /loss$/"
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
        super().__init__(METRIC_KEYS[panel])
        self._all_names, self._values = tuple(names), dict(values)
        self._name_cells = min(MAX_NAME_CELLS, max((len(clean_name(n)) for n in names), default=0))
        self._chosen = dict.fromkeys(chosen)
        """The chosen names, in the order in which they were chosen."""
        self._panel, self._joined = panel, joined

    def on_mount(self) -> None:
        self._show_title()

    def _show_title(self) -> None:
        title = "metrics"
        if self._panel is not None:
            one = self._panel == 2 or self._joined
            charts = "in one chart" if one else "one chart for each quantity"
            title = f"metrics of panel {self._panel}, {charts}"
        self.query_one(".dialog").border_title = title

    def _names(self) -> Iterable[str]:
        return self._all_names

    def _row(self, name: str) -> Text:
        # The sign differs in form, so that the choice can be read without colour.
        sign = "[x]" if name in self._chosen else "[ ]"
        label = shortened(clean_name(name), self._name_cells)
        value = metric(self._values[name]) if name in self._values else ""
        row = Text(f"{sign} {label.ljust(self._name_cells)} {value.rjust(10)}", no_wrap=True)
        return row.append(f"  {DESCRIPTIONS.get(name, '')}".rstrip(), "dim")

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_select()

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

    def _choice(self) -> MetricChoice:
        return MetricChoice(tuple(self._chosen), joined=self._joined)

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


class ColumnChooser(Chooser[ListLayout | None]):
    """Return the chosen columns and order of the runs, or None after Esc."""

    EXAMPLES = "part of a name, config.*, or /loss$/"
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
        super().__init__(COLUMN_KEYS)
        self._chosen, self._order = list(layout.columns), layout.order
        self._logged = set(names)
        self._name_cells = 0

    def offer(self, names: Collection[str]) -> None:
        """Add metrics and settings that were read meanwhile."""
        if not self._logged.issuperset(names):
            self._logged.update(names)
            self._fill()

    def _names(self) -> Iterable[str]:
        """Return the chosen names first, in their order."""
        fields = [name for name in FIELD_NAMES if name not in ("id", "name")]
        others = sorted(self._logged - set(fields), key=lambda n: (n.startswith(SETTING), n))
        return dict.fromkeys((*self._chosen, *fields, *others))

    def _matching(self, pattern: str) -> tuple[str, ...]:
        listed = super()._matching(pattern)
        longest = max((len(clean_name(name)) for name in listed), default=0)
        self._name_cells = min(ALIGNED_NAME_CELLS, longest)
        return listed

    def _fill(self, highlighted: str | None = None) -> None:
        super()._fill(highlighted or self._highlighted)
        title = f"columns; sorted by {order_text(self._order)}" if self._order else "columns"
        self.query_one(".dialog").border_title = title

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

    def action_select(self) -> None:
        name = self._highlighted
        if name in self._chosen:
            self._chosen.remove(name)
        elif name is not None:
            self._chosen = list(with_column(self._chosen, name))
        self._show_changes()

    def _show_changes(self) -> None:
        """Show the changed choice without moving any row."""
        shown = self.query_one(OptionList)
        for index, name in enumerate(self._listed):
            shown.replace_option_prompt_at_index(index, self._row(name))

    def action_sort(self) -> None:
        name = self._highlighted
        if name is None:
            return
        first = first_order(name)
        following = {first: reversed_order(first), reversed_order(first): ""}
        self._order = following.get(self._order, first)
        self._show_changes()

    def action_move(self, by: int) -> None:
        name = self._highlighted
        if name not in self._chosen:
            return
        place = self._chosen.index(name)
        self._chosen.insert(max(0, place + by), self._chosen.pop(place))
        self._fill(name)

    def _choice(self) -> ListLayout:
        return ListLayout(tuple(self._chosen), self._order)

    def action_default(self) -> None:
        self.dismiss(DEFAULT_LAYOUT)


class LogChooser(Chooser[int | None]):
    """Return the source of the chosen log of a run on several machines, or None after Esc."""

    SHAPE = "dialog"
    EXAMPLES = "gpu-b, gpu-b:12, launcher"
    FIRST_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "logs",
        """
        escape | dismiss | cancel      | Change nothing
        down   | to_list | to the list | Go to the list
        """,
    )

    def __init__(self, sources: Sequence[tuple[int, str]], current: int) -> None:
        """``sources``: source and name of each log."""
        super().__init__(LOG_KEYS)
        self._labels = {str(source): name for source, name in sources}
        self._current = str(current)

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "log"

    def _fill(self, highlighted: str | None = None) -> None:
        super()._fill(highlighted or self._current)

    def _matching(self, pattern: str) -> tuple[str, ...]:
        words = pattern.lower().split()
        named = self._labels.items()
        return tuple(key for key, name in named if all(word in name.lower() for word in words))

    def _row(self, name: str) -> Text:
        return Text(self._labels[name])

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _selected(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        if (source := self._highlighted) is not None:
            self.dismiss(int(source))
