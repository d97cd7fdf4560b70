"""The commands of the home screen for the selected run: open, sort, resume, run again, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on, work

from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.launch_panel import READONLY, FormPanel
from ltui.app.panels.runs_panel import RunsPanel
from ltui.app.panels.worker_results import call_screen, show_error
from ltui.app.screens.confirm import ConfirmScreen
from ltui.app.screens.full_screen import FullScreen

if TYPE_CHECKING:
    from ltui.app.runs.run_entry import RunEntry
    from ltui.training.store.run_directory import RunDir


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

    def action_sort(self) -> None:
        self.runs_panel.next_order()

    def on_table_row_highlighted(self) -> None:
        # The footer omits keys that can't be used for the selected run.
        self.query_one(KeyFooter).refresh()

    # -- commands ----------------------------------------------------------------------------------

    def refusal_of(self, action: str) -> str | None:
        """Return the reason why ``action`` can't be done now; None if it can."""
        if action in ("launch", "resume", "rerun", "delete") and self.readonly:
            return READONLY
        if action not in ("resume", "rerun", "delete"):
            return None
        line = self.runs_panel.selected
        if line is None:
            return "There is no run."
        if action == "delete":
            return f"{line.id} is running. Stop it first." if line.live else None
        # Imported here: the first frame needs no run's state.
        from ltui.app.presentation.notifications import no_checkpoint, refusal

        if line.summary is None or line.live:
            return refusal(line.snapshot, action, readonly=self.readonly)
        can_resume = action != "resume" or line.summary.resumable
        return None if can_resume else no_checkpoint(line.name)

    def _selected_for(self, action: str) -> RunEntry | None:
        """Return the selected run if ``action`` can be done; else show the reason."""
        reason = self.refusal_of(action)
        if reason is not None:
            self.notify(reason, severity="warning", markup=False)
            return None
        return self.runs_panel.selected

    def action_resume(self) -> None:
        self._rerun("resume", new_run=False)

    def action_rerun(self) -> None:
        self._rerun("rerun", new_run=True)

    def _rerun(self, action: str, *, new_run: bool) -> None:
        line = self._selected_for(action)
        if line is None:
            return
        # Imported here: the first frame starts nothing.
        from ltui.app.screens.resume_or_rerun import RerunScreen

        def started(run_dir: RunDir | None) -> None:
            if run_dir is not None:
                self._open(run_dir)

        self.app.push_screen(RerunScreen(line.run_dir, new_run=new_run), started)

    def action_delete(self) -> None:
        if (self.refusal_of("delete") is not None and not self.runs_panel.marked) or self.readonly:
            self._selected_for("delete")
            return
        lines = [line for line in self.runs_panel.targets() if not line.live]
        if not lines:
            self.notify("The marked runs are running. Stop them first.", severity="warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._delete(lines)

        question = f"Delete {lines[0].id}? Its history, logs and checkpoints are lost."
        if len(lines) > 1:
            question = f"Delete {len(lines)} runs? Their history, logs and checkpoints are lost."
        self.app.push_screen(ConfirmScreen(question, yes="delete it", no="keep it"), answered)

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _delete(self, lines: list[RunEntry]) -> None:
        # Imported here: the first frame deletes nothing.
        from ltui.training.lifecycle.resume_run import delete

        deleted = 0
        for line in lines:
            try:
                delete(line.run_dir)
                deleted += 1
            except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
                show_error(self, f"{line.id} was not deleted", error)
        if deleted:
            words = lines[0].id if len(lines) == 1 else f"{deleted} runs"
            call_screen(self, self._changed, f"deleted {words}")

    def _changed(self, message: str) -> None:
        self.notify(message, markup=False)
        self.runs_panel.refresh_runs()

    def action_mark(self) -> None:
        self.runs_panel.toggle_mark()

    def action_star(self) -> None:
        if self.readonly:
            self.notify(READONLY, severity="warning", markup=False)
        elif lines := self.runs_panel.targets():
            self._star(lines, not all(line.labels.star for line in lines))

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def _star(self, lines: list[RunEntry], star: bool) -> None:
        # Imported here: the first frame changes no run.
        from dataclasses import replace

        from ltui.training.store.labels_file import change_labels

        try:
            for line in lines:
                change_labels(line.run_dir, lambda labels: replace(labels, star=star))
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            show_error(self, "the star was not changed", error)
        else:
            words = lines[0].id if len(lines) == 1 else f"{len(lines)} runs"
            call_screen(
                self, self._changed, f"{'starred' if star else 'removed the star of'} {words}"
            )
