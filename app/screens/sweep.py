"""The screen of a sweep: its trials with parameters, state and metric, and keys that change it.

A worker thread reads the record once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from ltui.app.compare.comparison_tables import TableRow, TableView, sized
from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.launch.sweep_changes import change_sweep, revive
from ltui.app.panels.comparison_widgets import ComparisonTable
from ltui.app.panels.launch_panel import READONLY
from ltui.app.panels.panel import LiveText, Panel
from ltui.app.presentation.sweep_view import (
    best_trials,
    importance_text,
    plan_text,
    state_tone,
    summary,
    trial_columns,
    trial_line,
    trial_texts,
)
from ltui.app.screens.dialog import ConfirmScreen, FullScreen, call_screen, show_error
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import RunDir
from ltui.training.sweep.decide import named_trial, resumed, retry
from ltui.training.sweep.importance import importance
from ltui.training.sweep.record import State, Sweep, Trial
from ltui.training.sweep.sweep_files import SweepDir, list_sweeps
from ltui.widgets.columns import Cells, Column
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line
from ltui.widgets.table import Table
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell

REFRESH_S = 1.0
"""Seconds between two looks at the record."""
IMPORTANCE_S = 15.0
"""Minimum seconds between two computations of the importance, which take some seconds."""
HINTS = (
    KeyHint("⏎", "open", "screen.open_trial", keep=True),
    KeyHint("s", "stop", "screen.stop"),
    KeyHint("r", "resume", "screen.resume"),
    KeyHint("C", "compare", "screen.compare"),
    KeyHint("[ ]", "other sweep", "screen.other(1)"),
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("q", "back", "screen.leave", keep=True),
)
_ORDER = {"state": 2, "last": 3, "best": 5, "step": 6, "seed": 7, "run": 9}
"""How important a column is where not all of them fit; parameters are as important as 4."""


class SweepScreen(FullScreen[None]):
    """The trials of one sweep."""

    ABOUT = "A stopped trial keeps its checkpoint and can go on."
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "sweep",
        """
        [Sweep]
        enter                | open_trial | open    | Open the run of the trial
        s                    | stop       | stop    | Stop the sweep; asks first
        r                    | resume     | resume  | Resume a stopped sweep; else run a trial again
        C                    | compare    | compare | Compare the curves of all trials
        left_square_bracket  | other(-1)  | newer   | Show the sweep that was started after it
        right_square_bracket | other(1)   | older   | Show the sweep that was started before it
        [Screen]
        q,escape             | leave      | back    | Go back
        """,
    )

    def __init__(self, sweep_dir: SweepDir, *, readonly: bool) -> None:
        super().__init__()
        self.sweep_dir, self.readonly = sweep_dir, readonly
        self.sweep: Sweep | None = None
        self._shares: tuple[dict[str, float], str] = ({}, "not computed yet")
        self._computed = (-IMPORTANCE_S, -1)
        """When the importance was computed, and of how many results."""

    def compose(self) -> ComposeResult:
        with Panel(None, "sweep", id="sweep"):
            yield LiveText(id="sweep-summary", wraps=True)
            yield ComparisonTable(id="sweep-trials")
            yield LiveText(id="sweep-trial", wraps=True)
            yield LiveText(id="sweep-importance", wraps=True)
        yield KeyFooter(HINTS, id="keys")

    def on_mount(self) -> None:
        self.query_one(Table).focus()
        self._read()
        self.set_interval(REFRESH_S, self._read)

    @work(thread=True, exclusive=True, group="sweep")
    def _read(self) -> None:
        sweep_dir = self.sweep_dir
        try:
            sweep = sweep_dir.read()
        except ProblemError as error:
            call_screen(self, self.query_one("#sweep-summary", LiveText).show, Text(str(error)))
            return
        if not self.readonly:
            revive(sweep_dir.home)
        call_screen(self, self._show, sweep_dir, sweep)
        at, results = self._computed
        if len(sweep.told) != results and time.monotonic() - at >= IMPORTANCE_S:
            self._computed = (time.monotonic(), len(sweep.told))
            self._shares = importance(sweep)
            call_screen(self, self._show, sweep_dir, sweep)

    def _show(self, sweep_dir: SweepDir, sweep: Sweep) -> None:
        if sweep_dir != self.sweep_dir:
            return
        self.sweep, (best, _) = sweep, best_trials(sweep)
        rows = tuple(_row(sweep, trial, is_best=trial in best) for trial in sweep.tried)
        columns = tuple(
            sized(Column(key=key, title=title, width=1, importance=_ORDER.get(key, 4)), rows)
            for key, title in trial_columns(sweep).items()
        )
        self.query_one(Panel).set_titles(f"sweep {sweep.name}", f"{len(rows)} trials")
        lines = Text(f"{summary(sweep)}\n{plan_text(sweep)}")
        self.query_one("#sweep-summary", LiveText).show(lines)
        self.query_one(ComparisonTable).show(TableView(columns, rows))
        shares = Text(importance_text(sweep, *self._shares), "dim")
        self.query_one("#sweep-importance", LiveText).show(shares)
        self._show_selected()
        self.query_one(KeyFooter).refresh()

    @on(Table.RowHighlighted)
    def _show_selected(self) -> None:
        trial = self._selected
        line = "" if trial is None else trial_line(trial)
        self.query_one("#sweep-trial", LiveText).show(Text(line))

    # -- keys --------------------------------------------------------------------------------------

    def refusal_of(self, action: str) -> str | None:
        """Return why ``action`` cannot be done now; None if it can."""
        name = action.partition("(")[0]
        if name in ("stop", "resume") and self.readonly:
            return READONLY
        if name == "compare" and (self.sweep is None or len(self.sweep.tried) < 2):
            return "There are no two trials yet."
        if name == "stop" and self.sweep is not None:
            state = self.sweep.state()
            return None if state == State.RUNNING else f"The sweep is {state}."
        return None

    def _refuses(self, action: str) -> bool:
        reason = self.refusal_of(action)
        if reason is not None:
            self.notify(reason, severity="warning", markup=False)
        return reason is not None

    @property
    def _selected(self) -> Trial | None:
        key = self.query_one(ComparisonTable).cursor_key
        tried = () if self.sweep is None else self.sweep.tried
        return next((trial for trial in tried if str(trial.number) == key), None)

    @on(Table.RowSelected)
    def action_open_trial(self) -> None:
        trial = self._selected
        if trial is not None and self.sweep is not None:
            self._open_run(self.sweep.run_id(trial))

    def _open_run(self, run: str) -> None:
        # Imported here: most sweeps are only looked at.
        from ltui.app.screens.run import RunScreen

        run_dir = RunDir(self.sweep_dir.home / "runs" / run)
        if not run_dir.path.exists():
            self.notify(f"The run {run} is not there.", severity="warning", markup=False)
            return
        self.app.push_screen(RunScreen(run_dir, readonly=self.readonly))

    def action_compare(self) -> None:
        if self._refuses("compare") or self.sweep is None:
            return
        # Imported here, as above.
        from ltui.app.screens.compare import CompareScreen

        runs = self.sweep_dir.home / "runs"
        found = [RunDir(runs / self.sweep.run_id(trial)) for trial in self.sweep.tried]
        self.app.push_screen(CompareScreen([run for run in found if run.path.exists()]))

    def action_other(self, by: int) -> None:
        sweeps = list_sweeps(self.sweep_dir.home)
        place = sweeps.index(self.sweep_dir) + by if self.sweep_dir in sweeps else 0
        if 0 <= place < len(sweeps):
            self.sweep_dir, self._shares = sweeps[place], ({}, "not computed yet")
            self._computed = (-IMPORTANCE_S, -1)
            self._read()
        else:
            self.notify(f"There is no {'older' if by > 0 else 'newer'} sweep.", timeout=3)

    def action_stop(self) -> None:
        if self._refuses("stop"):
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._change(lambda sweep: replace(sweep, stopped=True))

        question = f"Stop the sweep {self.sweep_dir.name} and its trials, with a checkpoint each?"
        self.app.push_screen(ConfirmScreen(question, yes="stop it"), answered)

    def action_resume(self) -> None:
        if self._refuses("resume") or self.sweep is None:
            return
        trial = self._selected
        if self.sweep.state() in (State.STOPPED, State.STOPPING):
            self._change(resumed)
        elif trial is not None:
            self._change(partial(_again, str(trial.number)))

    @work(thread=True, group="change")
    def _change(self, change: Callable[[Sweep], Sweep]) -> None:
        try:
            change_sweep(self.sweep_dir, change)
        except (ProblemError, OSError) as error:
            show_error(self, "The sweep was not changed", error)
        call_screen(self, self._read)

    def action_leave(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.dismiss()
        else:
            self.app.exit()


def show_last_sweep(screen: Screen[Any], home: Path, *, readonly: bool) -> None:
    """Show the sweep that was started last, over ``screen``."""
    sweeps = list_sweeps(home)
    if sweeps:
        screen.app.push_screen(SweepScreen(sweeps[0], readonly=readonly))
    else:
        screen.notify("No sweeps yet. `ltui sweep --help` says how to start one.", markup=False)


def _again(number: str, sweep: Sweep) -> Sweep:
    chosen = named_trial(sweep, number).number
    return retry(sweep, lambda trial: trial.number == chosen)


def _row(sweep: Sweep, trial: Trial, *, is_best: bool) -> TableRow:
    texts = trial_texts(sweep, trial, is_best=is_best)
    tones = {"state": state_tone(trial), "run": Tone.DIM}
    cells: dict[str, Cells] = {
        key: (Cell(text=clean_line(text), tone=tones.get(key, Tone.PLAIN)),)
        for key, text in texts.items()
    }
    return TableRow(str(trial.number), cells)
