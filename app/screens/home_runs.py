"""The commands of the home screen for the selected run: open, sort, resume, run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from textual import on

from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.launch_panel import READONLY, FormPanel
from ltui.app.panels.runs_panel import RunsPanel, count_queued
from ltui.app.screens.dialog import FullScreen
from ltui.widgets.sanitise import clean_name

if TYPE_CHECKING:
    from ltui.app.runs.run_entry import RunEntry
    from ltui.app.runs.run_rows import ListLayout
    from ltui.training.store.run_directory import RunDir

TABLE_ACTIONS = frozenset({"sort", "reverse", "columns", "mark", "mark_all"})
"""Actions on the table of runs."""
CHANGING = frozenset({"launch", "queue_form", "new_run", "edit", "check", "resume", "rerun"})
"""Actions that start a run or read what a person who only watches must not see."""


class RunListScreen(FullScreen[None]):
    """A screen with a ``RunsPanel`` and keys that act on the selected run."""

    def __init__(self, *, readonly: bool) -> None:
        super().__init__()
        self.readonly = readonly
        self._opened_run: str | None = None
        """Id of the run that was opened last; None once the cursor is on its row again."""

    @property
    def runs_panel(self) -> RunsPanel:
        return self.query_one(RunsPanel)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Refuse what needs the table of runs until it is shown."""
        return action not in TABLE_ACTIONS or any(p.is_started for p in self.query(RunsPanel))

    # -- opening -----------------------------------------------------------------------------------

    @on(RunsPanel.Opened)
    def _run_opened(self, event: RunsPanel.Opened) -> None:
        event.stop()
        self._open(event.line.run_dir)

    @on(FormPanel.Launched)
    def _run_launched(self, event: FormPanel.Launched) -> None:
        event.stop()
        self._open(event.run_dir)

    def _open(self, run_dir: RunDir) -> None:
        # Imported here: the first frame shows no run.
        from ltui.app.screens.run import RunScreen

        self._opened_run = run_dir.id
        self.app.push_screen(RunScreen(run_dir, readonly=self.readonly))

    def on_screen_resume(self) -> None:
        # After a run's screen was closed, the cursor is on that run, as the keys act on it.
        if self._opened_run is not None:
            run_id, self._opened_run = self._opened_run, None
            self.runs_panel.focus_run(run_id)

    def action_open_run(self) -> None:
        line = self.runs_panel.selected
        if line is not None:
            self._open(line.run_dir)

    @on(FormPanel.Queued)
    def _run_queued(self, event: FormPanel.Queued) -> None:
        event.stop()
        self.runs_panel.refresh_runs()
        self.runs_panel.focus_run(event.run_dir.id)
        name = clean_name(event.run_dir.id)
        self.notify(f"{name} is in the run queue. Q shows it.", markup=False)

    def action_queue_form(self) -> None:
        form = self.query_one(FormPanel)
        if form.has_focus_within:
            form.launch(queued=True)

    def action_queue(self) -> None:
        reason = self.refusal_of("queue")
        if reason is not None:
            self.notify(reason, severity="warning", markup=False)
            return
        # Imported here: the first frame shows no queue.
        from ltui.app.screens.queue import QueueScreen

        def answered(run_dir: RunDir | None) -> None:
            if run_dir is not None:
                self._open(run_dir)

        home = self.runs_panel.home
        self.app.push_screen(QueueScreen(home, readonly=self.readonly), answered)

    def action_sort(self) -> None:
        self.runs_panel.next_order()

    def action_reverse(self) -> None:
        self.runs_panel.reverse_order()

    def action_columns(self) -> None:
        # Imported here: the first frame shows no run.
        from ltui.app.screens.choosers import ColumnChooser

        panel = self.runs_panel

        def answered(layout: ListLayout | None) -> None:
            panel.chooser = None
            if layout is not None:
                panel.use_layout(layout)

        panel.chooser = ColumnChooser(panel.list_layout, panel.logged_names())
        self.app.push_screen(panel.chooser, answered)

    def palette_entries(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield title, help and function of each entry that the palette offers for the runs."""
        for name in self.runs_panel.metrics_without_column():
            show = partial(self.runs_panel.add_column, name)
            about = "Add this metric as a column of the runs"
            yield f"Show metric {clean_name(name)}", about, show

    def on_table_row_highlighted(self) -> None:
        # The footer omits keys that can't be used for the selected run.
        self.query_one(KeyFooter).refresh()

    def farewell(self) -> str | None:
        """Return the message to print when the dashboard is closed: the runs that keep running."""
        live = [line.id for line in self.runs_panel.lines.values() if line.live]
        if not live:
            return None
        names = ", ".join(live[:4]) + (" and others" if len(live) > 4 else "")
        verb = "keeps" if len(live) == 1 else "keep"
        return f"{names} {verb} running. To watch: ltui attach"

    # -- commands ----------------------------------------------------------------------------------

    def refusal_of(self, action: str) -> str | None:
        """Return the reason why ``action`` can't be done now; None if it can."""
        if self.readonly and action in CHANGING:
            return READONLY
        if action == "queue" and not count_queued(self.runs_panel.lines.values()):
            return "No run waits in the run queue."
        if action not in ("resume", "rerun"):
            return None
        line = self._run_for(action)
        if line is None:
            return "There is no run."
        # Imported here: the first frame needs no run's state.
        from ltui.app.presentation.notifications import no_checkpoint, refusal

        if line.summary is None or line.live:
            return refusal(line.snapshot, action, readonly=self.readonly)
        can_resume = action != "resume" or line.summary.resumable
        return None if can_resume else no_checkpoint(line.name)

    def _run_for(self, action: str) -> RunEntry | None:
        """Return the selected run; for a resume, the marked one if there is one."""
        targets = self.runs_panel.targets()
        return targets[0] if action == "resume" and targets else self.runs_panel.selected

    def action_resume(self) -> None:
        self._run_again("resume", new_run=False)

    def action_rerun(self) -> None:
        self._run_again("rerun", new_run=True)

    def _run_again(self, action: str, *, new_run: bool) -> None:
        reason, line = self.refusal_of(action), self._run_for(action)
        if reason is not None or line is None:
            self.notify(reason or "There is no run.", severity="warning", markup=False)
            return
        # Imported here: the first frame starts nothing.
        from ltui.app.screens.resume_or_run_again import RunAgainScreen

        def started(run_dir: RunDir | None) -> None:
            if run_dir is not None:
                self._open(run_dir)

        self.app.push_screen(RunAgainScreen(line.run_dir, line.name, new_run=new_run), started)
