"""The run queue on a screen: the order, what each run waits for, and keys that change both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ltui.app.launch import queue_changes
from ltui.app.launch.queue_changes import QueueView, place_words, queue_view
from ltui.app.panels.launch_panel import READONLY
from ltui.app.screens.choosers import ChangingList
from ltui.app.screens.dialog import ConfirmScreen, Dialog, call_screen, do_after, error_lines
from ltui.training.lifecycle.run_queue import retry, take_out
from ltui.training.store.run_directory import RunDir
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line, clean_name

REFRESH_S = 1.0
"""Seconds between two readings of the queue."""
KEY_LINE = "K J move  h hold, release  t try again  D take out  ⏎ open  esc close"
EMPTY = "Nothing waits any more."


class QueueScreen(Dialog[RunDir]):
    """Return the run to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "queue",
        """
        escape,q          | dismiss(None) | close    | Back to the runs
        K,shift+up        | move(-1)      | earlier  | Let the run start earlier
        J,shift+down      | move(1)       | later    | Let the run start later
        h                 | hold          | hold     | Keep the run from starting, or release it
        t                 | retry         | retry    | Put back a run that could not be started
        D,delete          | take_out      | take out | Take the run out of the queue; asks first
        """,
    )

    def __init__(self, home: Path, *, readonly: bool) -> None:
        super().__init__()
        self._home, self._readonly = home, readonly
        self._view = QueueView(places=(), entries={}, damaged={})

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -queue"):
            yield Static(Text("Run queue", "bold"), id="question")
            yield ChangingList(id="names", markup=False)
            yield Static(Text(KEY_LINE), id="answers")

    def on_mount(self) -> None:
        self._read()
        self.set_interval(REFRESH_S, self._read)

    @work(thread=True, exclusive=True, group="queue")
    def _read(self) -> None:
        try:
            view = queue_view(self._home)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            call_screen(self, self._show_problem, error)
        else:
            call_screen(self, self._show, view)

    def _show(self, view: QueueView) -> None:
        """List the entries. The cursor stays on its run."""
        shown, selected = self.query_one(OptionList), self._selected
        self._view = view
        rows = [self._row(number) for number in range(len(view.places))]
        rows += [
            Text.assemble(" -  ", clean_name(run), ("\n    " + clean_line(why, 300), "dim"))
            for run, why in view.damaged.items()
        ]
        shown.clear_options()
        shown.add_options([Option(row) for row in rows] or [Option(EMPTY, disabled=True)])
        runs = self._runs
        if runs:
            shown.highlighted = runs.index(selected) if selected in runs else 0

    def _row(self, number: int) -> Text:
        place = self._view.places[number]
        entry = self._view.entries[place.run]
        priority = f"  priority {entry.priority}" if entry.priority else ""
        return Text.assemble(
            f"{number + 1:>2}  ",
            (clean_name(place.run), "bold"),
            (f"{priority}\n    {clean_line(place_words(self._view, place), 300)}", "dim"),
        )

    @property
    def _runs(self) -> list[str]:
        return [*(place.run for place in self._view.places), *self._view.damaged]

    @property
    def _selected(self) -> str | None:
        """The run under the cursor."""
        index, runs = self.query_one(OptionList).highlighted, self._runs
        return runs[index] if index is not None and index < len(runs) else None

    @on(OptionList.OptionSelected)
    def _open(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self._selected is not None:
            self.dismiss(RunDir(self._home / "runs" / self._selected))

    def action_move(self, by: int) -> None:
        run = self._selected
        if run is not None and run in self._view.entries:
            waiting = [p.run for p in self._view.places if self._view.entries[p.run].waits]
            number = waiting.index(run) + 1 + by if run in waiting else 1
            self._change(lambda run_dir: queue_changes.move(run_dir, max(1, number)))

    def action_hold(self) -> None:
        entry = self._view.entries.get(self._selected or "")
        if entry is not None:
            self._change(lambda run_dir: queue_changes.hold(run_dir, held=not entry.held))

    def action_retry(self) -> None:
        self._change(retry)

    def action_take_out(self) -> None:
        if self._readonly:
            self._change(take_out)
        elif (run := self._selected) is not None:
            text = f"Take {clean_name(run)} out of the run queue?"
            question = ConfirmScreen(text, yes="take it out", no="let it wait")
            run_dir = RunDir(self._home / "runs" / run)
            do_after(self, question, lambda: self._carry_out(take_out, run_dir))

    def _change(self, change: Callable[[RunDir], object]) -> None:
        """Change the selected entry, in a thread: another process may hold the queue's lock."""
        if self._readonly:
            self.notify(READONLY, severity="warning", markup=False)
        elif self._selected is not None:
            self._carry_out(change, RunDir(self._home / "runs" / self._selected))

    @work(thread=True, group="queue changes")
    def _carry_out(self, change: Callable[[RunDir], object], run_dir: RunDir) -> None:
        try:
            change(run_dir)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            call_screen(self, self._show_problem, error)
        else:
            call_screen(self, self._read)

    def _show_problem(self, error: Exception) -> None:
        text = clean_line("; ".join(error_lines(error)), 300)
        self.notify(text, severity="warning", markup=False)
